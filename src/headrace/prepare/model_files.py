"""The small files of a model folder: config, generation config, tokenizer.

In: a model folder. Out: each file as transformers reads it, and the longest sample the target has positions for.
Whatever is wrong with a file is a TargetError that names it.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.errors import HeadraceError, TargetError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class Reading:
    """A context in which a library reads a model's files: what it raises becomes a TargetError.

    Not a list of exceptions: transformers, huggingface_hub, tokenizers and safetensors each have their own, some plain.
    """

    def __init__(self, expected: str, hint: str) -> None:
        self._expected = expected
        self._hint = hint

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, HeadraceError):
            found = " ".join(str(error).split())
            raise TargetError(self._expected, f"{type(error).__name__}: {found[:400]}", self._hint) from error


def check_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: TargetError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise TargetError(f"a JSON object in {path}", str(exc), "download the file again") from exc
    if not isinstance(value, dict):
        raise TargetError(f"a JSON object in {path}", f"a {type(value).__name__}", "download the file again")
    return value


def load_config(folder: Path) -> Any:
    """The config of a model folder; remote code is never run. Raises: TargetError naming config.json."""
    from transformers import AutoConfig

    path = folder / CONFIG
    if not path.is_file():
        raise TargetError(f"a model folder with {CONFIG}", f"no {path}", "check target.model")
    check_json(path)
    with Reading(f"a config in {path} that transformers knows", "give an architecture without remote code"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def load_generation_config(folder: Path) -> Any | None:
    """The generation config of a model folder, None if it has none. Raises: TargetError naming the file."""
    from transformers import GenerationConfig

    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return None
    check_json(path)
    with Reading(f"a generation config in {path} that transformers knows", "download the file again, or remove it"):
        return GenerationConfig.from_pretrained(folder)


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a model folder; remote code is never run. Raises: TargetError naming its files."""
    from transformers import AutoTokenizer

    for name in (CONFIG, *TOKENIZER_FILES):
        if (Path(folder) / name).is_file():
            check_json(Path(folder) / name)
    expected = f"a tokenizer in {folder} ({' and '.join(TOKENIZER_FILES)})"
    with Reading(expected, "copy the model's tokenizer files beside it"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def max_positions(folder: Path | str) -> int | None:
    """Tokens of the longest text the target has positions for; None where no config says it. Raises: TargetError."""
    if not (Path(folder) / CONFIG).is_file():
        return None
    text = load_config(Path(folder)).get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    return positions
