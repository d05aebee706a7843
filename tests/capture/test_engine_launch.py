import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from headrace.capture.engine_launch import Wish, launch, prepared_engine
from headrace.codec.spec import SPEC_NAME, short_spec
from headrace.config import RunFile, RunFolder
from headrace.errors import ConfigError, TargetError
from headrace.files import write_json
from headrace.progress import Silent
from headrace.target.engine_file import EngineFile
from headrace.testing.tiny_target import HIDDEN_SIZE, save_tiny_target
from tests.engines import free_port, stand_in

# Stands for `vllm serve`: its environment, and a server that answers /health, or dies.
PYTHON = """#!{python}
import http.server, json, sys
if sys.argv[1] == "-c":
    print(json.dumps({{"vllm": "0.32.0+cpu", "headrace": "0.1.0", "prefix": "/nowhere"}}))
    sys.exit()
if "--die" in sys.argv:
    sys.exit("no memory for the cache")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Notes(Silent):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("engine") / "tiny", "qwen3")


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in(tmp_path_factory.mktemp("python"), PYTHON)


def run_of(root: Path, tiny: Path, python: Path, **changed: Any) -> tuple[RunFile, RunFolder]:
    own: dict[str, Any] = {
        "run": str(root / "run"),
        "target": {"model": str(tiny), "dtype": "float32", "taps": ["after_block:3", "after_block:0"]},
        "engine": {"python": str(python), "port": free_port(), "flags": ["--api-key", "s3cret"]},
    }
    cfg = RunFile.model_validate({**own, **changed})
    return cfg, RunFolder(Path(cfg.run))


def test_engine_json_says_what_the_command_captures(tmp_path: Path, tiny: Path, python: Path) -> None:
    cfg, folder = run_of(tmp_path, tiny, python)
    with prepared_engine(cfg, folder, Wish(name="b"), Silent()) as engine:
        file = EngineFile.read(folder.root / "engines" / "b")
        assert engine.file == file
        assert file.taps == ["after_block:0", "after_block:3", "final:pre_norm"]
        assert file.layer_ids == [1, 4, 5]
        assert file.encoded == [1, 0]  # the run's order
        assert file.hidden_size == HIDDEN_SIZE
        assert file.spec == short_spec("raw", 2, HIDDEN_SIZE, "float32")
        assert file.url == f"http://127.0.0.1:{cfg.engine.port}"
        private = Path(file.channel).parent
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert len(file.channel) < 100
        assert "[1, 4, 5]" in engine.shown
        assert "s3cret" in engine.command
        assert "s3cret" not in engine.shown
    with prepared_engine(cfg, folder, Wish(name="b"), Silent()) as again:
        assert again.file == file  # the same private folder, not one more
    private.rmdir()


def test_a_last_state_that_the_run_stores_is_not_captured_twice(tmp_path: Path, tiny: Path, python: Path) -> None:
    cfg, folder = run_of(tmp_path, tiny, python, capture={"final_state": True})
    with prepared_engine(cfg, folder, Wish(), Silent()) as engine:
        assert engine.file.layer_ids == [1, 4, 5]
        assert engine.file.encoded == [1, 0, 2]
        Path(engine.file.channel).parent.rmdir()


def test_a_latent_is_left_out_until_it_is_fitted(tmp_path: Path, tiny: Path, python: Path) -> None:
    cfg, folder = run_of(tmp_path, tiny, python, capture={"codec": "latent:8x4"})
    notes = Notes()
    with prepared_engine(cfg, folder, Wish(), notes) as engine:
        assert engine.file.codec is None
        assert "not fitted yet" in notes.said[0]
    (folder.root / "codec").mkdir()
    spec = short_spec("latent:8x4", 2, HIDDEN_SIZE, cfg.states_dtype)
    write_json(folder.root / "codec" / SPEC_NAME, spec.to_json())
    with prepared_engine(cfg, folder, Wish(), notes) as engine:
        assert engine.file.spec == spec
        assert engine.file.basis == str(folder.root / "codec")
        Path(engine.file.channel).parent.rmdir()


def test_what_auto_means_is_said_to_vllm_and_to_the_client(
    tmp_path: Path, tiny: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"model": str(tiny), "taps": ["after_block:0"]}
    cfg, folder = run_of(tmp_path, tiny, python, target=target)
    for fast, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("headrace.target.device.fast_bfloat16", lambda device, fast=fast: fast)
        with prepared_engine(cfg, folder, Wish(), Silent()) as engine:
            assert engine.file.dtype == dtype
            assert f"--dtype {dtype}" in engine.shown
            Path(engine.file.channel).parent.rmdir()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_a_name_that_is_no_plain_one_is_refused(tmp_path: Path, tiny: Path, python: Path, name: str) -> None:
    cfg, folder = run_of(tmp_path, tiny, python)
    with pytest.raises(ConfigError, match="a plain name"), prepared_engine(cfg, folder, Wish(name=name), Silent()):
        pass
    assert not folder.root.exists()


def test_a_tap_that_vllm_does_not_capture_is_refused(tmp_path: Path, tiny: Path, python: Path) -> None:
    target = {"model": str(tiny), "taps": ["final:post_norm"]}
    cfg, folder = run_of(tmp_path, tiny, python, target=target)
    with pytest.raises(ConfigError, match="a tap that vLLM captures"), prepared_engine(cfg, folder, Wish(), Silent()):
        pass
    assert not list(folder.root.rglob("engine.json"))


def test_a_launched_engine_is_healthy_and_ends_with_its_socket(tmp_path: Path, tiny: Path, python: Path) -> None:
    cfg, folder = run_of(tmp_path, tiny, python)
    seen, notes = [], Notes()
    with prepared_engine(cfg, folder, Wish(), notes) as engine:
        private = Path(engine.file.channel).parent
        launch(engine, notes, lambda server: seen.append(private.is_dir()))
    assert seen == [True]
    assert not private.exists()
    assert "healthy after" in notes.said[-1]


def test_one_name_is_one_engine_at_a_time(tmp_path: Path, tiny: Path, python: Path) -> None:
    cfg, folder = run_of(tmp_path, tiny, python)
    with (
        prepared_engine(cfg, folder, Wish(), Silent()) as engine,
        pytest.raises(ConfigError, match="to be alone in engine"),
        prepared_engine(cfg, folder, Wish(), Silent()),
    ):
        pass
    Path(engine.file.channel).parent.rmdir()


def test_a_server_that_dies_at_the_start_shows_why(tmp_path: Path, tiny: Path, python: Path) -> None:
    cfg, folder = run_of(tmp_path, tiny, python)
    cfg = cfg.model_copy(update={"engine": cfg.engine.model_copy(update={"flags": ["--die"]})})
    with (
        pytest.raises(TargetError, match="exit code 1") as found,
        prepared_engine(cfg, folder, Wish(), Silent()) as engine,
    ):
        launch(engine, Silent())
    assert "no memory for the cache" in str(found.value)
    assert "no memory" in (folder.root / "engines" / "0" / "log").read_text()


def test_a_port_that_is_taken_is_named_before_the_start(tmp_path: Path, tiny: Path, python: Path) -> None:
    cfg, folder = run_of(tmp_path, tiny, python)
    with socket.socket() as other:
        other.bind(("127.0.0.1", cfg.engine.port))
        other.listen()
        with (
            pytest.raises(TargetError, match="a free port"),
            prepared_engine(cfg, folder, Wish(), Silent()) as engine,
        ):
            launch(engine, Silent())
    assert not Path(engine.file.channel).parent.exists()
