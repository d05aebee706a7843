"""`headrace store export` and `import`: a summary on stdout, errors with their exit code."""

import json
from pathlib import Path

from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.testing.tiny_target import save_tiny_target
from tests.interchange.runs import captured, same_states, states_of


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["store", *words])
    return result.exit_code, result.stdout, result.stderr


def test_a_run_goes_out_and_comes_in(tmp_path: Path) -> None:
    tiny = save_tiny_target(tmp_path / "tiny")
    run = captured(tiny, tmp_path / "run", lengths=(5, 8, 3), heldout=(1,))
    code, out, _ = call("export", str(run.root), str(tmp_path / "out"), "--to", "speculators", "--json")
    assert code == 0
    assert json.loads(out)["target_layer_ids"] == [1, 3]
    words = ["import", str(tmp_path / "out"), str(tmp_path / "back"), "--from", "speculators", "--target", str(tiny)]
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert "--taps" in err
    assert not (tmp_path / "back").exists()
    code, out, _ = call(*words, "--taps", "vllm:1,3", "--final", "pre_norm", "--heldout", "0", "--json")
    assert code == 0
    assert json.loads(out)["num_records"] == 3
    back = type(run)(tmp_path / "back")
    assert same_states(states_of(back), states_of(run))


def test_a_peer_that_cannot_take_the_states_is_exit_12(tmp_path: Path) -> None:
    tiny = save_tiny_target(tmp_path / "tiny")
    run = captured(tiny, tmp_path / "run", lengths=(5,), heldout=(), final_state=False)
    code, out, err = call("export", str(run.root), str(tmp_path / "out"), "--to", "deepspec")
    assert (code, out) == (12, "")
    assert "final_state" in err
    assert call("export", str(run.root), str(tmp_path / "out"), "--to", "torchspec")[0] == 2
    assert not (tmp_path / "out").exists()
