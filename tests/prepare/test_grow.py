"""A prepared set grows without moving a row, or refuses."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.capture.regenerate import grown_chunks
from headrace.errors import ConfigError
from headrace.files import Stage, read_json
from headrace.prepare.build import build_prompts
from headrace.prepare.grow import Growth, adopt, chain
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from tests.prepare.test_build import Bench, qa
from tests.prepare.tiny import WORDS

ROOT = Path(__file__).parents[2]


def ids(prepared: PreparedSet) -> list[bytes]:
    return [prepared.sample_id(row) for row in range(prepared.num_samples)]


def chats(words: list[str]) -> list[dict[str, str]]:
    return [qa(f"{word} you", "yes the cat") for word in words]


def test_an_appended_file_and_an_appended_source_keep_every_row(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:6]))
    first = bench.build()[1]
    before, fingerprint = ids(first), first.fingerprint
    bench.write(*chats(WORDS[:9]))
    summary, second = bench.build()
    assert ids(second)[:6] == before
    assert summary["num_samples"] == second.num_samples == 9
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(qa("me me", "no")) + "\n")
    third = bench.build(data=[str(other), str(bench.path)])[1]
    assert ids(third)[:9] == ids(second)
    assert third.sample(9).source == "other"
    assert [rows for _, rows in chain(third)] == [6, 9, 10]
    assert chain(third)[0][0] == fingerprint
    assert len({one for one, _ in chain(third)}) == 3
    assert sorted(path.name for path in bench.folder.prepared.glob("samples*")) == ["samples-2.arrow"]
    again = bench.build(data=[str(other), str(bench.path)])[1]
    assert again.fingerprint == third.fingerprint


def test_each_row_keeps_its_side_of_the_split(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:12]))
    first = bench.build(heldout_fraction=0.4)[1].heldout.tolist()
    assert 0 < sum(first) < 12
    bench.write(*chats(WORDS))
    assert bench.build(heldout_fraction=0.4)[1].heldout.tolist()[:12] == first


@pytest.mark.parametrize("change", ["removed", "edited", "moved"])
def test_removing_editing_and_moving_are_refused_and_change_nothing(tmp_path: Path, change: str) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:6]))
    before = ids(bench.build(heldout_fraction=0.0)[1])
    rows: list[Any] = chats(WORDS[:8])
    more: dict[str, Any] = {}
    if change == "removed":
        del rows[2]
    elif change == "edited":
        rows[2] = qa(f"{WORDS[2]} you", "no the cat")
    else:
        test = tmp_path / "test.jsonl"
        test.write_text(json.dumps(rows.pop(2)) + "\n")
        more = {"heldout_data": [str(test)]}
    bench.write(*rows)
    what = "moved between training and held out" if change == "moved" else "removed or edited"
    with pytest.raises(ConfigError, match=rf"1 of its 6 samples {what} \(1 of chats\)"):
        bench.build(heldout_fraction=0.0, **more)
    assert ids(PreparedSet.open(bench.folder.prepared)) == before


def test_other_settings_make_another_set_as_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:6]))
    bench.build()
    bench.write(*chats(WORDS[:9]))
    with pytest.raises(ConfigError, match="the same"):
        bench.build(max_tokens=99)


KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.files import Stage
from headrace.prepare import build, prepared
from tests.prepare.test_grow import Bench

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

stop = {"before": (build, "write_prepared"), "samples": (prepared, "write_json"), "manifest": (Stage, "finish")}
setattr(*stop[sys.argv[2]], die)
Bench(Path(sys.argv[1])).build()
"""


@pytest.mark.parametrize("stop", ["before", "samples", "manifest"])
def test_a_growth_that_was_killed_is_done_again(tmp_path: Path, stop: str) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:6]))
    before = ids(bench.build()[1])
    bench.write(*chats(WORDS[:9]))
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), stop], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert ids(PreparedSet.open(bench.folder.prepared))[:6] == before
    grown = bench.build()[1]
    assert ids(grown)[:6] == before
    assert [rows for _, rows in chain(grown)] == [6, 9]


def test_a_set_built_at_once_is_not_the_one_that_grew(tmp_path: Path) -> None:
    bench, other = Bench(tmp_path / "a"), Bench(tmp_path / "b")
    bench.write(*chats(WORDS[3:6]))
    bench.build()
    for one in (bench, other):
        one.write(*chats(WORDS[:9]))
    grown, whole = bench.build()[1], other.build()[1]
    assert sorted(ids(grown)) == sorted(ids(whole))
    assert ids(grown) != ids(whole)
    assert grown.fingerprint != whole.fingerprint


def test_prompts_grow_and_their_chunks_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:5]))
    build_prompts(bench.cfg(), bench.folder, bench.model, Silent())
    before = grown_chunks(PreparedSet.open(bench.folder.prompts), 2)
    bench.write(*chats(WORDS[:9]))
    build_prompts(bench.cfg(), bench.folder, bench.model, Silent())
    after = grown_chunks(PreparedSet.open(bench.folder.prompts), 2)
    assert after[: len(before)] == before
    assert sorted(row for chunk in after for row in chunk) == list(range(9))


def test_a_stage_of_a_smaller_set_is_adopted_and_of_another_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:6]))
    first = bench.build()[1].fingerprint
    for name, made_from in (("mine", first), ("other", "f")):
        stage = Stage(tmp_path / name, name, {"prepared": made_from, "seed": 1})
        stage.begin()
        stage.finish({})
    bench.write(*chats(WORDS[:9]))
    grown = bench.build()[1]
    assert adopt(tmp_path / "mine", "prepared", grown) == first
    assert adopt(tmp_path / "other", "prepared", grown) is None
    assert adopt(tmp_path / "none", "prepared", grown) is None
    stored = read_json(tmp_path / "mine" / "stage.json", "")
    assert (stored["identity"], stored["finished"]) == ({"prepared": grown.fingerprint, "seed": 1}, False)


def test_only_a_finished_set_with_other_data_grows(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(*chats(WORDS[:3]))
    bench.build()
    identity = read_json(bench.folder.prepared / "stage.json", "")["identity"]
    assert Growth.of(bench.folder.prepared, "prepare", identity) is None
    assert Growth.of(bench.folder.prepared, "prepare", {**identity, "data": {}}) is not None
    assert Growth.of(bench.folder.prepared, "prepare", {**identity, "data": {}, "options": {}}) is None
    assert Growth.of(tmp_path / "none", "prepare", identity) is None
