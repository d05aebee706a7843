"""The built-in target: a causal language model in transformers, on the CPU or one GPU.

In: a folder, a hub id or `demo`. Out: its identity, states at named taps of whole capture groups, answers by batched
decoding, and hooks for cached decoding. No remote code is ever run; weights come from safetensors alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from headrace.codec.base import TORCH_DTYPES
from headrace.config import TargetConfig
from headrace.errors import TargetError
from headrace.prepare.model_files import CONFIG, Reading, load_config, load_generation_config, load_tokenizer
from headrace.prepare.template import read_template, template_hash, tokenizer_hash
from headrace.taps import Tap
from headrace.target.base import Generated, TargetSpec
from headrace.target.demo import demo_target_folder
from headrace.target.device import choose_device, run_dtype
from headrace.target.generate import Decoding, generate, stop_ids
from headrace.target.hooks import PassEnded, Taps, hooked, text_part
from headrace.target.quantised import Quantisation, check_runs, read_quantisation
from headrace.target.weights import Weights, weights_hash


class TransformersTarget:
    """A target that transformers runs; `model` is in evaluation mode on its device."""

    def __init__(
        self, spec: TargetSpec, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> None:
        self.spec = spec
        self.model = model
        self.tokenizer = tokenizer
        self.folder = folder

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: those of generation_config, and of the config if it has none."""
        own, text = self.model.generation_config, self.model.config.get_text_config()
        return stop_ids(own.eos_token_id if own is not None else None) or stop_ids(text.eos_token_id)

    @torch.inference_mode()
    def states(
        self, ids: Sequence[npt.NDArray[np.int32]], taps: Sequence[Tap], padded_tokens: int
    ) -> list[torch.Tensor]:
        """Run one capture group in one pass that stops after its last tap.

        Padding lies to the right, where causal attention never looks from a real token.
        Returns: for each sample a CPU tensor [T, L, H] in the target's dtype, taps in the order asked.
        Raises: TargetError for a tap the model does not have, or a sample longer than `padded_tokens`.
        """
        if any(len(i) > padded_tokens or not len(i) for i in ids):
            raise TargetError(
                f"samples of 1 to {padded_tokens} tokens", str([len(i) for i in ids]), "rebuild the prepared set"
            )
        padded = torch.zeros(len(ids), padded_tokens, dtype=torch.long)
        for n, own in enumerate(ids):
            padded[n, : len(own)] = torch.from_numpy(np.array(own, dtype=np.int64))
        with hooked(self.model, taps, stop=True) as seen:
            with suppress(PassEnded):
                text_part(self.model)(input_ids=padded.to(self.model.device), use_cache=False)
            states_BTLH = seen.take().cpu()
        return [states_BTLH[n, : len(own)].clone() for n, own in enumerate(ids)]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        *,
        batch_size: int = 64,
        told: Callable[[int, int], None] | None = None,
    ) -> list[Generated]:
        """Answer prompts given as ids, `batch_size` at a time; greedy when temperature is 0.

        Args:
            told: called now and then with the numbers of tokens written and answers finished since its last call.
        Raises: TargetError for an empty prompt, one too long, or blocks that see a window only.
        """
        decoding = Decoding(max_new_tokens, self.stop_ids, temperature, top_p, seed)
        return generate(self.model, prompts, decoding, batch_size, told or (lambda *_: None))

    @contextmanager
    def tap_states(self, taps: Sequence[Tap]) -> Iterator[Taps]:
        """Collect states of each pass of `model` inside the context; `take()` gives [B, T, L, H] of the last one."""
        with hooked(self.model, taps, stop=False) as seen:
            yield seen


def own_engine() -> tuple[str, str]:
    """Name and version of what runs a target here, as its identity has them."""
    return "transformers", f"{transformers.__version__} torch {torch.__version__}"


def load_target(cfg: TargetConfig, folder: Path | None = None) -> TransformersTarget:
    """Load a target.

    Args:
        folder: the model's folder, when it is known already; else found from `cfg.model`.
    Raises: TargetError for a folder without weights, an unknown architecture, tensors that are missing, damaged files,
    no such device; PrepareError for a template that cannot be read.
    """
    folder = folder or target_folder(cfg.model)
    Weights(folder)  # a file that is cut off is named here
    device = choose_device(cfg.device)
    dtype = run_dtype(cfg.dtype, device)
    quantised = read_quantisation(folder)
    check_runs(quantised, folder)
    model = _load_model(folder, device, dtype, quantised)
    engine = own_engine()
    tokenizer = load_tokenizer(folder)
    spec = read_spec(cfg, folder, tokenizer, type(model).__name__, dtype, engine)
    return TransformersTarget(spec, model, tokenizer, folder)


def read_spec(
    cfg: TargetConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    architecture: str,
    dtype: str,
    engine: tuple[str, str],
) -> TargetSpec:
    """A target's identity, from its files. Args: engine: what runs it, and which version of that."""
    config = load_config(folder).get_text_config()
    template = read_template(cfg.chat_template) if cfg.chat_template else tokenizer.chat_template
    return TargetSpec(
        model=cfg.model,
        architecture=architecture,
        num_blocks=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=dtype,
        quantisation=read_quantisation(folder).identity,
        weights_hash=weights_hash(folder),
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(template or ""),
        engine=engine[0],
        engine_version=engine[1],
    )


def target_folder(model: str) -> Path:
    """The folder of a model: the demo's cache, a local folder, or a snapshot of a hub id.

    Raises: TargetError when it is none of them, or holds no config.json that transformers knows.
    """
    folder = demo_target_folder() if model == "demo" else _local_folder(model) or _hub_folder(model)
    load_config(folder)
    return folder


def _local_folder(model: str) -> Path | None:
    try:
        local = Path(model).expanduser()
    except RuntimeError as exc:
        raise TargetError("a model folder", f"{model}: {exc}", "check target.model") from exc
    if local.is_dir():
        return local
    if local.exists():
        raise TargetError("a model folder", f"a file, {model}", "set target.model to the folder it lies in")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise TargetError("a model folder", f"no folder {model}", "check target.model")
    return None


def _hub_folder(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"])
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
        raise TargetError(
            "demo, a local folder or a hub id that can be reached", f"{model}: {exc}", "check target.model"
        ) from exc


def _load_model(folder: Path, device: torch.device, dtype: str, quantised: Quantisation) -> PreTrainedModel:
    config = load_config(folder)
    load_generation_config(folder)  # transformers passes over a broken one, and answers would never end
    known = f"a causal language model that transformers {transformers.__version__} knows in {folder / CONFIG}"
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with Reading(known, quantised.hint or "give a whole model folder, of an architecture without remote code"):
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=TORCH_DTYPES[dtype],
                use_safetensors=True,
                trust_remote_code=False,  # or a person at a terminal would be asked
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
            )
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    if found["missing_keys"] or found["mismatched_keys"]:
        missing = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
        raise TargetError(
            f"every tensor that {folder / CONFIG} calls for",
            f"{len(missing)} missing or of another shape: {missing[:4]}",
            "download the model again; transformers would fill them with random numbers",
        )
    text_part(model)  # one that keeps its blocks elsewhere is refused here
    return model.to(device).eval().requires_grad_(False)
