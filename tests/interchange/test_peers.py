"""Peers by name, and options that belong to one of them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import RunFolder
from headrace.errors import ConfigError
from headrace.interchange.incoming import Said
from headrace.interchange.peers import PEERS, export_run, import_run
from headrace.progress import Silent
from tests.interchange.runs import same_states, states_of


@pytest.mark.parametrize("peer", PEERS)
def test_each_peer_goes_out_and_comes_in(peer: str, run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    out = export_run(peer, run, tmp_path / "out", Silent(), target=tiny)
    final = {"speculators": "pre_norm", "specforge": None, "deepspec": "post_norm"}[peer]
    taps = "zlab" if peer == "deepspec" else "after_block:0,after_block:2"
    found = import_run(peer, tmp_path / "out", RunFolder(tmp_path / "to"), Said(tiny, taps, final), Silent())
    assert found["num_records"] == out["num_samples"] == 8
    assert found["taps"][:2] == ["after_block:0", "after_block:2"]


@pytest.mark.parametrize("peer", PEERS)
def test_another_export_into_the_same_folder_is_refused(
    peer: str, run: RunFolder, run_normed: RunFolder, tiny: Path, tmp_path: Path
) -> None:
    export_run(peer, run, tmp_path, Silent(), target=tiny)
    other = "specforge" if peer != "specforge" else "deepspec"
    with pytest.raises(ConfigError, match="export to"):
        export_run(other, run_normed, tmp_path, Silent())


@pytest.mark.parametrize(
    ("peer", "options"),
    [("torchspec", {}), ("deepspec", {"final": True}), ("specforge", {"states": False})],
)
def test_unknown_peers_and_options_of_others_are_refused(
    peer: str, options: dict[str, Any], run: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=peer):
        export_run(peer, run, tmp_path / "out", Silent(), **options)
    assert not (tmp_path / "out").exists()


def test_files_elsewhere_are_for_speculators_alone(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hidden-states"):
        import_run("deepspec", tmp_path, RunFolder(tmp_path), Said(tiny, "zlab"), Silent(), tmp_path)
    with pytest.raises(ConfigError, match="torchspec"):
        import_run("torchspec", tmp_path, RunFolder(tmp_path), Said(tiny, "zlab"), Silent())


KILLED = """
import functools, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from headrace.config import RunFolder
from headrace.interchange import deepspec, incoming, outgoing
from headrace.interchange.incoming import Said
from headrace.interchange.peers import export_run, import_run
from headrace.progress import Silent

what, peer, here, there, target, taps, final = sys.argv[1:]
left = [4]


def dies(inner):
    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    return call


deepspec.export = functools.partial(deepspec.export, sync_bytes=1)
if what == "export":
    outgoing.Outgoing.sent = dies(outgoing.Outgoing.sent)
    export_run(peer, RunFolder(Path(here)), Path(there), Silent(), target=Path(target))
else:
    incoming.check_states = dies(incoming.check_states)
    said = Said(Path(target), taps, final or None)
    import_run(peer, Path(here), RunFolder(Path(there)), said, Silent())
"""


@pytest.mark.parametrize("peer", PEERS)
def test_what_was_killed_ends_as_if_it_had_not_been(peer: str, run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    final = {"speculators": "pre_norm", "specforge": "", "deepspec": "post_norm"}[peer]
    taps = "zlab" if peer == "deepspec" else "after_block:0,after_block:2"

    def killed(what: str, here: Path, there: Path) -> None:
        words = [what, peer, str(here), str(there), str(tiny), taps, final]
        done = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr

    whole, out = tmp_path / "whole", tmp_path / "out"
    summary = export_run(peer, run, whole, Silent(), target=tiny)
    killed("export", run.root, out)
    assert not json.loads((out / "stage.json").read_text())["finished"]
    assert export_run(peer, run, out, Silent(), target=tiny) == summary
    files = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    if peer != "deepspec":  # imports share their code
        return
    said = Said(tiny, taps, final or None)
    import_run(peer, whole, RunFolder(tmp_path / "a"), said, Silent())
    killed("import", whole, tmp_path / "b")
    found = import_run(peer, whole, RunFolder(tmp_path / "b"), said, Silent())
    assert found["num_records"] == 8
    assert same_states(states_of(RunFolder(tmp_path / "a")), states_of(RunFolder(tmp_path / "b")))
