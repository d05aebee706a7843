"""Tiny random targets for tests, saved like any model of transformers.

In: a folder and an architecture. Out: the folder with config, safetensors weights and a word-level tokenizer; the
same bytes for the same seed. Answers are noise, but every tensor lies where the real architecture has it.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

NUM_BLOCKS = 5
HIDDEN_SIZE = 32
VOCAB_SIZE = 64
EOS_ID = 2
TEMPLATE = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"


def save_tiny_target(
    folder: Path,
    kind: Literal["llama", "qwen3"] = "llama",
    *,
    tied: bool = True,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """Save a random target of 5 blocks, hidden 32, vocabulary 64, 4 heads on 2 key heads.

    Args:
        max_shard_size: as in save_pretrained; "20KB" makes a sharded folder with an index.
        changes: further fields of the config.
    """
    model = tiny_model(kind, tied=tied, seed=seed, **changes)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0, bos_token_id=1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_model(
    kind: Literal["llama", "qwen3"] = "llama", *, tied: bool = True, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The model alone, in float32 and evaluation mode; no random state outside is touched."""
    shape: dict[str, Any] = {
        "num_hidden_layers": NUM_BLOCKS,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "vocab_size": VOCAB_SIZE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,  # wide enough for answers that differ
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        **changes,
    }
    config = LlamaConfig(**shape) if kind == "llama" else Qwen3Config(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words w3 to w63 and three special tokens, one id each."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
