"""SpecForge's `.ckpt`: what a safe load finds in ours, and what we make of theirs."""

import gzip
import io
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import RunFolder
from headrace.errors import ConfigError, ExportError
from headrace.interchange.incoming import Said
from headrace.interchange.outgoing import Outgoing
from headrace.interchange.peers import export_run, import_run
from headrace.interchange.specforge import file_name
from headrace.prepare.model_files import load_config
from headrace.progress import Silent
from headrace.target.head import load_head
from tests.interchange.runs import LENGTHS, same_states, states_of


def sent(run: RunFolder, out: Path, **chosen: Any) -> dict[str, Any]:
    return export_run("specforge", run, out, Silent(), **chosen)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    found = torch.load(path, weights_only=True)
    assert isinstance(found, dict)
    return found


def test_a_safe_load_gives_the_same_numbers(run: RunFolder, tmp_path: Path) -> None:
    summary = sent(run, tmp_path / "out")
    assert summary["target_layer_ids"] == [0, 2]  # z-lab's numbers
    outgoing, states = Outgoing(run), states_of(run)
    for number, row in enumerate(outgoing.rows):
        found, sample = loaded(tmp_path / "out" / file_name(number)), outgoing.prepared.sample(row)
        assert set(found) == {"input_ids", "loss_mask", "hidden_states"}
        assert found["input_ids"].tolist() == sample.input_ids.tolist()
        assert found["loss_mask"].tolist() == sample.loss_mask.tolist()
        assert found["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(found["hidden_states"], states[sample.id][:, :-1].flatten(1)[None])


def test_its_own_reader_takes_them(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    folder = os.environ.get("HEADRACE_SPECFORGE")
    if not folder:
        pytest.skip("HEADRACE_SPECFORGE names no folder with specforge's package")
    sys.path.insert(0, folder)
    try:
        from specforge.algorithms.common.dflash_family_data import normalize_dspark_offline_sample
        from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
    finally:
        sys.path.remove(folder)
    sent(run, tmp_path / "out", final=True, target=tiny)
    keys = ("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states")
    refs = OfflineManifestReader(str(tmp_path / "out"), feature_keys=keys, validate_files=True).read()
    assert sorted(ref.num_tokens for ref in refs) == sorted(LENGTHS)
    raw = loaded(tmp_path / "out" / file_name(0))
    found = normalize_dspark_offline_sample(raw, 4096)
    assert found["hidden_states"].shape == (1, LENGTHS[0], 64)
    assert found["target_last_hidden_states"].shape == (1, LENGTHS[0], 32)


def test_out_and_in_again_keeps_every_bit(run_without_final: RunFolder, tiny: Path, tmp_path: Path) -> None:
    sent(run_without_final, tmp_path / "out")
    to = RunFolder(tmp_path / "back")
    found = import_run("specforge", tmp_path / "out", to, Said(tiny, "zlab:0,2"), Silent())
    assert found["num_records"] == len(LENGTHS)
    assert same_states(states_of(to), states_of(run_without_final))


def test_the_last_state_is_normed_with_the_target_s_own_norm(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--target"):
        sent(run, tmp_path / "out", final=True)
    assert not (tmp_path / "out").exists()
    sent(run, tmp_path / "out", final=True, target=tiny)
    head, outgoing = load_head(tiny, load_config(tiny)), Outgoing(run)
    before = states_of(run)[outgoing.prepared.sample_id(outgoing.rows[0])][:, -1]
    last = loaded(tmp_path / "out" / file_name(0))["target_last_hidden_states"]
    assert torch.equal(last[0], head.normed(before).to(torch.bfloat16))
    assert not torch.equal(last[0], before)
    to = RunFolder(tmp_path / "back")
    with pytest.raises(ConfigError, match="--final"):
        import_run("specforge", tmp_path / "out", to, Said(tiny, "zlab:0,2"), Silent())
    found = import_run("specforge", tmp_path / "out", to, Said(tiny, "zlab:0,2", "post_norm"), Silent())
    assert found["taps"] == ["after_block:0", "after_block:2", "final:post_norm"]


def test_another_target_s_norm_is_refused(run: RunFolder, tmp_path: Path) -> None:
    from headrace.testing.tiny_target import save_tiny_target

    other = save_tiny_target(tmp_path / "other", "qwen3", seed=1)
    with pytest.raises(ExportError, match="weights"):
        sent(run, tmp_path / "out", final=True, target=other)


def written(folder: Path, number: int, content: Any, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    out = io.BytesIO()
    torch.save(content, out)
    path = folder / f"data_{number}.ckpt{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(out.getvalue()) if packed else out.getvalue())


def sample(seed: int, num_tokens: int = 6) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(3, 64, (num_tokens,), generator=random),
        "loss_mask": torch.ones(num_tokens, dtype=torch.long),
        "hidden_states": torch.randn(num_tokens, 64, generator=random).bfloat16(),
    }


def test_packed_files_and_numbers_beyond_nine_are_read_in_order(tiny: Path, tmp_path: Path) -> None:
    samples = [sample(number) for number in (0, 2, 10)]
    for number, own in zip((0, 2, 10), samples, strict=True):
        written(tmp_path / "in" / "rows_0-2000", number, own, packed=number == 2)
    to = RunFolder(tmp_path / "to")
    import_run("specforge", tmp_path / "in", to, Said(tiny, "zlab:0,2", heldout_fraction=0.0), Silent())
    found = list(states_of(to).values())
    assert [torch.equal(a.flatten(1), b["hidden_states"]) for a, b in zip(found, samples, strict=True)] == [True] * 3


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_a_file_that_holds_code_is_refused_and_runs_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "data_0.ckpt").write_bytes(pickle.dumps({"input_ids": Bomb()}))
    written(tmp_path / "in", 1, {"input_ids": Bomb()})
    with pytest.raises(ConfigError, match=r"data_0\.ckpt"):
        import_run("specforge", tmp_path / "in", RunFolder(tmp_path / "to"), Said(tiny, "zlab:0,2"), Silent())
    (tmp_path / "in" / "data_0.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"data_1\.ckpt"):
        import_run("specforge", tmp_path / "in", RunFolder(tmp_path / "to"), Said(tiny, "zlab:0,2"), Silent())
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_states": torch.zeros(5, 64).bfloat16()}, "6 tokens"),
        ({"hidden_states": torch.zeros(6, 63).bfloat16()}, "multiple of 32"),
        ({"hidden_states": torch.zeros(6, 32).bfloat16()}, "alike"),
        ({"hidden_states": torch.zeros(6, 64)}, "alike"),
        ({"hidden_states": None}, "EAGLE-3"),
        ({"input_ids": torch.full((6,), 64)}, "0 to 63"),
        ({"loss_mask": torch.full((6,), 2)}, "mask"),
    ],
)
def test_files_that_do_not_fit_are_named(change: dict[str, Any], word: str, tiny: Path, tmp_path: Path) -> None:
    from headrace.errors import HeadraceError

    written(tmp_path / "in", 0, sample(0))
    written(tmp_path / "in", 1, {**sample(1), **change})
    to = RunFolder(tmp_path / "to")
    with pytest.raises(HeadraceError, match=word):
        import_run("specforge", tmp_path / "in", to, Said(tiny, "zlab:0,2"), Silent())
    assert not to.root.exists()


def test_a_truncated_file_is_named(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    path = tmp_path / "out" / file_name(5)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match="data_5"):
        import_run("specforge", tmp_path / "out", RunFolder(tmp_path / "to"), Said(tiny, "zlab:0,2"), Silent())


def test_a_killed_export_goes_on(run: RunFolder, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    stage = tmp_path / "out" / "stage.json"
    stage.write_text(json.dumps({**json.loads(stage.read_text()), "finished": False, "summary": {}}))
    path = tmp_path / "out" / file_name(0)
    path.unlink()
    sent(run, tmp_path / "out")
    assert set(loaded(path)) == {"input_ids", "loss_mask", "hidden_states"}
