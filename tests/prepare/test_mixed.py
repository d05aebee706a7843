"""Sets from several sources and layouts, and the options of masks, through the whole of prepare."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import PrepareError
from headrace.prepare.build import build_prompts
from headrace.progress import Silent
from tests.prepare.test_build import Bench, qa
from tests.prepare.test_turns import CALLS, END, TOOL_CHAT
from tests.prepare.tiny import WORDS, byte_tokenizer


def test_sources_of_many_kinds_make_one_set_with_rows_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"), qa("you", "no"))
    pq.write_table(pa.Table.from_pylist([{"instruction": "me", "input": "", "output": "ok"}]), tmp_path / "b.parquet")
    turns = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "cat"}]
    (tmp_path / "c.json").write_text(json.dumps([{"conversations": turns}]))
    (tmp_path / "test.jsonl").write_text(json.dumps(qa("two", "four")) + "\n")
    data = [str(bench.path), {"path": str(tmp_path / "b.parquet"), "name": "alpaca"}, str(tmp_path / "c.json")]
    heldout = [{"path": str(tmp_path / "test.jsonl"), "name": "exam"}]
    summary, prepared = bench.build(data=data, heldout_data=heldout, heldout_fraction=0.0)
    assert summary["sources"] == {"alpaca": 1, "c": 1, "chats": 2, "exam": 1}
    assert prepared.rows(source="alpaca").tolist() == [2]
    assert prepared.rows(source="exam").tolist() == prepared.rows(heldout=True).tolist() == [4]
    assert prepared.rows(source="chats", heldout=False).tolist() == [0, 1]
    with pytest.raises(PrepareError, match="a source among"):
        prepared.rows(source="exams")


def test_ids_with_their_mask_are_taken_and_cannot_be_regenerated(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write({"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]})
    prepared = bench.build()[1]
    assert prepared.sample(0).input_ids.tolist() == [7, 8, 9]
    assert prepared.sample(0).loss_mask.tolist() == [0, 1, 1]
    with pytest.raises(PrepareError, match=r"regenerate\.enabled=false"):
        build_prompts(bench.cfg(), bench.folder, bench.model, Silent())


def test_chats_with_images_are_counted_and_left_out_whole(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    parts = [{"type": "image", "image": "x"}, {"type": "text", "text": "what is me"}]
    bench.write(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "cat"}]}, qa("hi", "ok")
    )
    assert bench.build()[0]["dropped"] == {"has_image": 1}


def tool_bench(root: Path) -> Bench:
    bench = Bench(root)
    byte_tokenizer(CALLS, END).save_pretrained(bench.model)
    bench.write({"messages": TOOL_CHAT, "tools": [{"name": "add", "parameters": {}}]})
    return bench


def test_the_options_of_masks_reach_the_stored_mask(tmp_path: Path) -> None:
    trained = {}
    for name, options in {
        "all": {}, "last": {"train_turns": "last"}, "no arguments": {"train_tool_arguments": False}
    }.items():  # fmt: skip
        prepared = tool_bench(tmp_path / name).build(**options)[1]
        trained[name] = (int(prepared.lengths[0]), int(prepared.trained_tokens[0]))
    assert len({length for length, _ in trained.values()}) == 1
    assert trained["last"][1] == len("yes") + 1
    assert trained["all"][1] - trained["no arguments"][1] == 2 * len('"a": 12, "b": "cat"')


def test_prompts_hold_the_tools(tmp_path: Path) -> None:
    bench = tool_bench(tmp_path)
    summary = build_prompts(bench.cfg(), bench.folder, bench.model, Silent())
    assert summary["num_samples"] == 1
    plain = Bench(tmp_path / "plain")
    plain.path.write_text(bench.path.read_text())
    with pytest.raises(PrepareError, match="1 as template_leaves_out_tools"):
        build_prompts(plain.cfg(), plain.folder, plain.model, Silent())


def test_shuffled_rows_mix_sources_and_are_the_same_again(tmp_path: Path) -> None:
    def sources(name: str) -> list[str]:
        bench = Bench(tmp_path / name)
        bench.write(*(qa(word, "yes the cat") for word in WORDS))
        other = tmp_path / name / "other.jsonl"
        other.write_text("".join(json.dumps(qa(f"{word} you", "no")) + "\n" for word in WORDS))
        data: list[Any] = [str(bench.path), str(other)]
        return bench.build(data=data, shuffle=True)[1].sources()

    first = sources("a")
    assert first == sources("b")
    assert len(set(first[: len(WORDS)])) == 2
