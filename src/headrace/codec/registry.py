"""Codecs by name.

In: a spec, and the folder its basis lies in; or what a run file says: a short name, or the folder of a fitted codec
(`codec.json` and `basis.safetensors`). Out: the codec.
"""

from collections.abc import Callable
from pathlib import Path

from headrace.codec.base import Codec, RawCodec
from headrace.codec.basis import FILE_NAME, Basis, load_basis
from headrace.codec.fp8 import Fp8Codec
from headrace.codec.lossless import LosslessCodec
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.spec import KNOWN, NAMES, SPEC_NAME, CodecSpec, fitted_spec, is_short, short_spec
from headrace.errors import CodecError
from headrace.files import write_atomic, write_json

_PLAIN: dict[str, Callable[[CodecSpec], Codec]] = {"raw": RawCodec, "lossless": LosslessCodec, "fp8": Fp8Codec}


def open_codec(spec: CodecSpec, folder: Path | None = None) -> Codec:
    """The codec that a spec names.

    Args: folder: where `basis.safetensors` lies, for a codec that was fitted.
    Raises: CodecError for a codec this version does not know, and for a basis that is absent or another.
    """
    if spec.name in _PLAIN:
        return _PLAIN[spec.name](spec)
    if spec.name not in NAMES:
        raise CodecError(f"a codec of this version ({', '.join(NAMES)})", spec.name, "upgrade headrace")
    basis: Basis | None = None
    if "basis" in spec.parameters:
        if folder is None:
            raise CodecError("the folder of a fitted basis", "none", "open the codec from its states folder")
        basis = load_basis(folder, spec.parameters["basis"])
    return QuantisedCodec(spec, basis)


def save_codec(spec: CodecSpec, basis: Basis, folder: Path) -> CodecSpec:
    """Write a fitted codec, its spec last. Returns: the spec with the digest of its basis."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPEC_NAME).unlink(missing_ok=True)
    named = CodecSpec.from_json({**spec.to_json(), "parameters": {**spec.parameters, "basis": basis.save(folder)}})
    write_json(folder / SPEC_NAME, named.to_json())
    return named


def chosen_spec(setting: str, num_taps: int, hidden_size: int, dtype: str) -> tuple[CodecSpec, Path | None]:
    """What `capture.codec` names: a spec, and the folder of its basis if it was fitted.

    Raises: CodecError for an unknown name, a folder that holds no codec, and a codec fitted for other states.
    """
    if is_short(setting):
        return short_spec(setting, num_taps, hidden_size, dtype), None
    folder = Path(setting)
    if not folder.is_dir():
        raise CodecError(f"{KNOWN}, or the folder of a fitted codec", repr(setting), "see docs/codecs.md")
    return fitted_spec(folder, num_taps, hidden_size, dtype), folder


def copy_basis(spec: CodecSpec, source: Path | None, to: Path) -> None:
    """Keep a fitted codec's basis beside what was encoded or trained with it. Raises: CodecError for another basis."""
    if "basis" not in spec.parameters or source is None or source == to:
        return
    if (to / FILE_NAME).is_file():
        load_basis(to, spec.parameters["basis"])
        return
    load_basis(source, spec.parameters["basis"])
    write_atomic(to / FILE_NAME, (source / FILE_NAME).read_bytes())
