"""The shape of the package: which room may import which, which rooms need no torch, which tests stand beside what."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace

SRC = Path(headrace.__file__).parent
PROJECT = Path(__file__).parent.parent
MODULES = sorted(path for path in SRC.rglob("*.py"))
NAMED = [path for path in MODULES if path.name != "__init__.py"]

# Imports point up this list, never down.
ROOMS = [
    "errors", "taps", "record", "token_rule", "source", "kinds", "yaml_text", "config", "order", "files", "progress",
    "codec", "plan", "prepare", "target", "store", "capture", "stream", "drafter", "train", "evaluate", "calibrate",
    "raw_slice", "trial", "transcode", "export", "interchange", "plugins", "report", "doctor", "testing", "cli",
]  # fmt: skip

TORCH_FREE = [
    "errors", "taps", "record", "token_rule", "source", "kinds", "yaml_text", "config", "order", "files", "progress",
    "codec.spec", "plan",
    *sorted(f"store.{path.stem}" for path in (SRC / "store").glob("*.py") if path.name != "__init__.py"),
    *sorted(f"stream.{path.stem}" for path in (SRC / "stream").glob("*.py") if path.name != "__init__.py"),
    "cli.main", "testing.states", "interchange.slots", "interchange.arrow_folder", "doctor.examine",
    "target.channel", "target.engine_file", "target.vllm_command", "target.vllm_process",
]  # fmt: skip

# `from headrace import __version__` and the like: the package itself is above every room.
PACKAGE = "headrace"


def name(path: Path) -> str:
    return str(path.relative_to(SRC))


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of this package that a module imports anywhere, types and functions included, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno} imports relatively"
            if node.module == PACKAGE:
                yield from ((f"{PACKAGE}.{alias.name}", node.lineno) for alias in node.names)
            elif node.module is not None:
                yield node.module, node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_room_imports_only_from_rooms_above_it(path: Path) -> None:
    if path.parent == SRC and path.name == "__init__.py":
        return
    rank = ROOMS.index(room(path))
    for module, line in imported(path):
        parts = module.split(".")
        if parts[0] != PACKAGE or len(parts) == 1 or parts[1].startswith("__"):
            continue
        assert ROOMS.index(parts[1]) <= rank, f"{name(path)}:{line} imports {module}, a room below its own"


@pytest.mark.parametrize("path", [p for p in MODULES if room(p) not in ("testing", "__init__")], ids=name)
def test_nothing_imports_the_fakes(path: Path) -> None:
    assert not [line for module, line in imported(path) if module.startswith("headrace.testing")]


@pytest.fixture(scope="module")
def weights() -> dict[str, str]:
    """For each torch-free module, what its import raised where there is no torch; one process for all."""
    code = (
        "import importlib, json, sys\n"
        "sys.modules['torch'] = None\n"
        "found = {}\n"
        "for module in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module('headrace.' + module)\n"
        "    except ImportError as exc:\n"
        "        found[module] = str(exc)\n"
        "    heavy = [m for m in ('transformers', 'matplotlib', 'tensorboard') if m in sys.modules]\n"
        "    if heavy:\n"
        "        found.setdefault(module, 'imports ' + ', '.join(heavy))\n"
        "print(json.dumps(found))\n"
    )
    run = [sys.executable, "-c", code, *TORCH_FREE]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_room_needs_no_torch(module: str, weights: dict[str, str]) -> None:
    assert module not in weights, weights[module]


@pytest.mark.parametrize("path", NAMED, ids=name)
def test_a_module_has_a_test_of_its_name(path: Path) -> None:
    twin = PROJECT / "tests" / path.relative_to(SRC).parent / f"test_{path.name}"
    assert twin.exists(), f"{twin.relative_to(PROJECT)} is missing"


@pytest.mark.parametrize("path", NAMED, ids=name)
def test_a_module_opens_with_what_flows_in_and_out(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, "no opening paragraph"


@pytest.mark.parametrize("path", [*MODULES, *sorted((PROJECT / "tests").rglob("*.py"))], ids=lambda p: p.name)
def test_no_file_is_longer_than_500_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_function_is_longer_than_60_lines(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < 60, f"{name(path)}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_nothing_is_caught_broadly_or_printed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            kind = "" if node.type is None else ast.unparse(node.type)
            broad = kind in ("", "Exception", "BaseException")
            assert not broad or room(path) == "cli", f"{name(path)}:{node.lineno} catches everything"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert room(path) == "cli", f"{name(path)}:{node.lineno} prints"


def test_no_file_is_called_after_nothing() -> None:
    assert not {path.stem for path in MODULES} & {"utils", "util", "helpers", "common", "misc"}
