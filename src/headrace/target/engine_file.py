"""`engine.json`: what one engine process serves, how its columns are called, and where its channel is.

In, before a launch: a run's taps, codec and model. Out: one file that the engine's connector and the capture process
both read, so that columns, codec and addresses are said in one place. Torch-free. Raises only ConfigError.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.codec.spec import CodecSpec
from headrace.errors import ConfigError
from headrace.files import read_json, write_json

ENGINE_FILE = "engine.json"
LOG_FILE = "log"
_HINT = "run headrace engine again"
_DECISIVE = ("taps", "num_states", "encoded", "codec", "model_folder", "dtype")  # what must be equal within a run


@dataclass(frozen=True)
class EngineFile:
    """One engine.

    `taps` names the columns in the order the engine hands them out, `layer_ids` are the engine's own numbers of them;
    `encoded` are the columns of the run's taps, in the run's order. `codec` is None until one is fitted: such an
    engine gives raw columns alone, and reads the file again when a payload is asked for. `basis` is the folder of a
    fitted codec's basis. `dtype` is what the target runs in. `files` is where the plain file form goes; None: over the
    channel.
    """

    url: str
    channel: str
    model: str
    model_folder: str
    taps: list[str]
    layer_ids: list[int]
    num_states: int
    hidden_size: int
    encoded: list[int]
    codec: dict[str, Any] | None
    basis: str | None
    queue_bytes: int
    engine: str
    version: str
    dtype: str
    files: str | None = None

    @property
    def spec(self) -> CodecSpec | None:
        """The codec's spec."""
        return None if self.codec is None else CodecSpec.from_json(self.codec)

    def differences(self, other: "EngineFile") -> list[str]:
        """Fields that must be equal for two engines of one run, and are not."""
        return [name for name in _DECISIVE if getattr(self, name) != getattr(other, name)]

    def told(self) -> dict[str, Any]:
        """JSON for a client that has the channel but not the file."""
        return asdict(self)

    def write(self, folder: Path) -> Path:
        """Publish `engine.json` in a folder. Returns: its path."""
        write_json(folder / ENGINE_FILE, asdict(self))
        return folder / ENGINE_FILE

    @classmethod
    def read(cls, path: Path) -> "EngineFile":
        """Read the file, or that of a folder. Raises: ConfigError where it is absent, damaged or says nonsense."""
        path = path / ENGINE_FILE if path.is_dir() else path
        return cls.from_json(read_json(path, _HINT), str(path))

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> "EngineFile":
        """Read what `told` gave. Raises: ConfigError naming `where`."""
        try:
            found = cls(**value)
            ordered = sorted(set(found.layer_ids)) == found.layer_ids
            sized = len(found.taps) == len(found.layer_ids) == found.num_states
            named = all(0 <= column < found.num_states for column in found.encoded)
            fits = found.spec is None or found.spec.num_taps == len(found.encoded)
        except TypeError as exc:
            raise ConfigError(f"an engine's description in {where}", str(exc), _HINT) from exc
        if not (ordered and sized and named and fits):
            told = f"taps {found.taps}, numbers {found.layer_ids}, encoded {found.encoded}"
            raise ConfigError(f"ascending columns, each with its name, in {where}", told, _HINT)
        return found
