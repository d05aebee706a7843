"""A run's vLLM engine: what it is to serve, said in `engine.json`; and its server, started and watched.

In: a run file and vLLM's environment. Out: `engines/NAME/` of the run's folder with `engine.json` and `log`, and the
command; with a launch, a server until it is stopped. The channel's socket lies in a private folder that goes with it.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.capture.capture import capture_taps
from headrace.codec.registry import chosen_spec
from headrace.codec.spec import SPEC_NAME, CodecSpec, is_auto, is_latent
from headrace.config import RunFile, RunFolder
from headrace.errors import ConfigError
from headrace.files import locked
from headrace.prepare.model_files import load_config
from headrace.progress import Progress
from headrace.taps import FINAL_PRE_NORM, from_vllm, to_vllm
from headrace.target.device import choose_device, run_dtype
from headrace.target.engine_file import ENGINE_FILE, LOG_FILE, EngineFile
from headrace.target.transformers_target import target_folder
from headrace.target.vllm_command import (
    LOOPBACK,
    Installed,
    capture_arguments,
    command,
    find_vllm,
    shown,
    variables,
)
from headrace.target.vllm_process import START_S, EngineProcess, is_healthy


@dataclass(frozen=True)
class Wish:
    """What a person asks of one engine beside the run file. `port` None means engine.port."""

    name: str = "0"
    host: str = LOOPBACK
    port: int | None = None
    to_files: bool = False


@dataclass(frozen=True)
class Engine:
    """One engine, ready to start."""

    file: EngineFile
    path: Path
    command: list[str]
    added: dict[str, str]

    @property
    def shown(self) -> str:
        """The command for a shell, secrets left out."""
        return shown(self.command, self.added)


@contextmanager
def prepared_engine(cfg: RunFile, folder: RunFolder, wish: Wish, progress: Progress) -> Iterator[Engine]:
    """Hold `engines/NAME` alone and write its `engine.json`.

    Raises: ConfigError for a name that is no plain one or in use, and for a tap that vLLM does not capture; TargetError
    for no vLLM of a known version, or no model.
    """
    if not wish.name or Path(wish.name).name != wish.name or wish.name.startswith("."):
        raise ConfigError("a plain name for an engine", repr(wish.name), "for example --name 1")
    vllm = find_vllm(cfg.engine.python)
    where = folder.root / "engines" / wish.name
    with locked(where, "engine"):
        file = describe(cfg, folder, where, wish, vllm)
        if file.codec is None:
            progress.note(f"engine: {cfg.capture.codec} is not fitted yet: raw columns alone until engine.json has it")
        path = file.write(where)
        arguments = capture_arguments(file, path, cfg.engine.flags)
        yield Engine(file, path, command(vllm, arguments), variables(vllm, os.environ))


def describe(cfg: RunFile, folder: RunFolder, where: Path, wish: Wish, vllm: Installed) -> EngineFile:
    """What `engine.json` of the folder `where` says: taps by name in vLLM's order, the last state among them."""
    model = target_folder(cfg.target.model)
    text = load_config(model).get_text_config()
    depth, hidden_size = int(text.num_hidden_layers), int(text.hidden_size)
    taps = capture_taps(cfg, depth)
    numbers = [to_vllm(tap, depth) for tap in taps]
    layer_ids = sorted({*numbers, to_vllm(FINAL_PRE_NORM, depth)})  # the probe needs the last state
    spec, basis = _codec(cfg, folder, len(taps), hidden_size)
    port = cfg.engine.port if wish.port is None else wish.port
    previous = EngineFile.read(where) if (where / ENGINE_FILE).is_file() else None
    if previous is not None and is_healthy(previous.url):
        hint = "stop it, or choose another --name and --port"
        raise ConfigError(f"no engine {wish.name} running", f"one at {previous.url}", hint)
    return EngineFile(
        url=f"http://{wish.host}:{port}",
        channel=str(_socket_folder(previous) / "s"),
        model=Path(cfg.target.model).name,
        model_folder=str(model.resolve()),
        taps=[str(from_vllm(number, depth)) for number in layer_ids],
        layer_ids=layer_ids,
        num_states=len(layer_ids),
        hidden_size=hidden_size,
        encoded=[layer_ids.index(number) for number in numbers],
        codec=None if spec is None else spec.to_json(),
        basis=None if basis is None else str(basis.resolve()),
        queue_bytes=cfg.engine.queue_bytes,
        engine="vllm",
        version=vllm.version,
        dtype=engine_dtype(cfg, vllm),
        files=str((where / "files").resolve()) if wish.to_files else None,
    )


@contextmanager
def running(engine: Engine, progress: Progress) -> Iterator[EngineProcess]:
    """A healthy server; it ends, with its workers and its socket, when the block ends.

    Raises: TargetError for a port that is taken and, with exit code and last lines, for a server that dies.
    """
    try:
        with EngineProcess(engine.command, engine.added, engine.path.parent / LOG_FILE, engine.file.url) as server:
            progress.start("engine starts", None, "s")
            seconds = server.wait_healthy(START_S, lambda passed: progress.advance(int(passed)))
            progress.end()
            progress.note(f"engine: healthy after {seconds:.0f} s at {engine.file.url}, process {server.pid}")
            yield server
    finally:
        shutil.rmtree(Path(engine.file.channel).parent, ignore_errors=True)


def launch(engine: Engine, progress: Progress, until: Callable[[EngineProcess], None] = EngineProcess.watch) -> None:
    """Start the server and watch it.

    Args: until: what to do while it is healthy; by default, wait until it dies. Raises: TargetError as `running`.
    """
    with running(engine, progress) as server:
        until(server)


def _codec(cfg: RunFile, folder: RunFolder, num_taps: int, hidden_size: int) -> tuple[CodecSpec | None, Path | None]:
    """The run's codec, as far as it is fitted or chosen."""
    setting = cfg.capture.codec
    if is_latent(setting) or is_auto(setting):
        if is_latent(setting) and (folder.root / "codec" / SPEC_NAME).is_file():
            return chosen_spec(str(folder.root / "codec"), num_taps, hidden_size, cfg.states_dtype)
        return None, None
    return chosen_spec(setting, num_taps, hidden_size, cfg.states_dtype)


def engine_dtype(cfg: RunFile, vllm: Installed) -> str:
    """What the server runs in; by the build of vLLM, for the torch here may be one that sees no GPU."""
    if vllm.for_cpu:
        return run_dtype(cfg.target.dtype, choose_device("cpu"))
    return "bfloat16" if cfg.target.dtype == "auto" else cfg.target.dtype


def _socket_folder(previous: EngineFile | None) -> Path:
    """A folder of mode 0700 with a short path; that of an earlier start where it is still ours."""
    if previous is not None:
        old = Path(previous.channel).parent
        if old.is_dir() and not old.is_symlink():
            found = old.stat()
            if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
                return old
    return Path(tempfile.mkdtemp(prefix="headrace-"))
