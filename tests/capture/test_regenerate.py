import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.capture.regenerate import ANSWERS, chunks, read_answers, regenerate
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError, ConfigError
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.target.base import Generated
from headrace.target.transformers_target import TransformersTarget
from tests.capture.conftest import LENGTHS


class Stopping(Silent):
    """Interrupts after so many reports."""

    def __init__(self, reports: int) -> None:
        self._left = reports

    def advance(self, done: int, **figures: float | int | str) -> None:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt


def test_every_prompt_is_answered_as_ids_with_what_it_came_from(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    summary = regenerate(cfg, folder, target, Silent())
    prompts = PreparedSet.open(folder.prompts)
    rows = {answer["row"]: answer for answer in read_answers(folder.answers / ANSWERS)}
    assert sorted(rows) == list(range(len(LENGTHS)))
    for row, answer in rows.items():
        sample = prompts.sample(row)
        assert answer["prompt_id"] == sample.id.hex()
        assert answer["prompt_ids"] == sample.input_ids.tolist()
        assert answer["messages"] == [{"role": "user", "content": str(row)}]
        assert (answer["source"], answer["heldout"]) == ("kind", row % 4 == 0)
        assert answer["finish_reason"] == ("stop" if answer["answer_ids"][-1] in target.stop_ids else "length")
        assert 1 <= len(answer["answer_ids"]) <= 6
    assert summary["num_answers"] == len(LENGTHS) == summary["stopped"] + summary["cut"]
    assert summary["answer_tokens"] == sum(len(answer["answer_ids"]) for answer in rows.values())


def test_an_interrupted_run_ends_with_the_same_lines(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.capture.regenerate.CHUNK_BATCHES", 2)
    regenerate(cfg, folder, target, Silent())
    path = folder.answers / ANSWERS
    undisturbed = path.read_bytes()
    for torn in (0, 10, len(undisturbed) // 2, len(undisturbed) - 1):
        path.write_bytes(undisturbed[:torn])
        _unfinish(folder)
        with pytest.raises(KeyboardInterrupt):
            regenerate(cfg, folder, target, Stopping(1))
        regenerate(cfg, folder, target, Silent())
        assert path.read_bytes() == undisturbed


def _unfinish(folder: RunFolder) -> None:
    path = folder.answers / "stage.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": False}))


def test_done_answers_are_kept(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    first = regenerate(cfg, folder, target, Silent())

    class Deaf:
        spec = target.spec

        def states(self, *_: Any) -> Any:
            raise AssertionError

        def generate(
            self,
            prompts: Sequence[Sequence[int]],
            max_new_tokens: int,
            temperature: float,
            top_p: float,
            seed: int,
            *,
            batch_size: int = 64,
            told: Callable[[int], None] | None = None,
        ) -> list[Generated]:
            raise AssertionError

    assert regenerate(cfg, folder, Deaf(), Silent()) == first


@pytest.mark.parametrize("change", ["cut", "surplus", "torn", "absent"])
def test_done_answers_with_lines_missing_or_surplus_are_refused(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, change: str
) -> None:
    regenerate(cfg, folder, target, Silent())
    path = folder.answers / ANSWERS
    lines = path.read_bytes().splitlines(keepends=True)
    num = len(LENGTHS)
    content = {"cut": lines[:-2], "surplus": [*lines, lines[0]], "torn": [*lines[:-1], lines[-1][:9]]}
    found = {"cut": num - 2, "surplus": num + 1, "torn": num - 1, "absent": 0}[change]
    if change == "absent":
        path.unlink()
    else:
        path.write_bytes(b"".join(content[change]))
    with pytest.raises(CaptureError, match=rf"{num} lines in .*answers\.jsonl, found {found}"):
        regenerate(cfg, folder, target, Silent())


def test_a_line_that_stands_twice_is_refused_before_the_stage_is_done(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    regenerate(cfg, folder, target, Silent())
    path = folder.answers / ANSWERS
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[0])
    _unfinish(folder)
    with pytest.raises(CaptureError, match=f"found {len(LENGTHS) + 1}"):
        regenerate(cfg, folder, target, Silent())


def test_other_settings_are_refused_and_named(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    regenerate(cfg, folder, target, Silent())
    longer = cfg.model_copy(update={"regenerate": cfg.regenerate.model_copy(update={"max_new_tokens": 7})})
    with pytest.raises(ConfigError, match=r"same regenerate\.max_new_tokens"):
        regenerate(longer, folder, target, Silent())
    drop = cfg.model_copy(update={"regenerate": cfg.regenerate.model_copy(update={"drop_cut": True})})
    regenerate(drop, folder, target, Silent())


@pytest.mark.parametrize("line", [b"{half\n", b"[]\n", b"{}\n", b"\xff\n", b"[" * 5000 + b"\n"])
def test_a_damaged_line_is_named(cfg: RunFile, folder: RunFolder, target: TransformersTarget, line: bytes) -> None:
    regenerate(cfg, folder, target, Silent())
    path = folder.answers / ANSWERS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line, *lines[2:]]))
    _unfinish(folder)
    with pytest.raises(CaptureError, match=r"answers\.jsonl:2"):
        regenerate(cfg, folder, target, Silent())


@given(st.lists(st.integers(1, 99), max_size=40), st.integers(1, 9))
def test_chunks_hold_every_row_once_longest_first(lengths: list[int], size: int) -> None:
    made = [row for chunk in chunks(lengths, size) for row in chunk]
    assert sorted(made) == list(range(len(lengths)))
    assert [lengths[row] for row in made] == sorted(lengths, reverse=True)
    assert all(len(chunk) <= size for chunk in chunks(lengths, size))


def test_no_answers_file_means_no_answers(folder: RunFolder) -> None:
    assert list(read_answers(folder.answers / ANSWERS)) == []
