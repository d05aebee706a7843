"""From chats, or from the target's answers, to the sets that later stages read."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from headrace.config import RunFile, RunFolder, load_run_file
from headrace.errors import ConfigError, PrepareError
from headrace.prepare.build import build_prepared, build_prompts, held_out
from headrace.prepare.prepared import Draft, PreparedSet
from headrace.progress import Silent
from tests.prepare.tiny import BOS, NEEDS_A_USER, PLAIN, THINKS_IN_THE_LAST_TURN, WORDS, tokenizer


class Bench:
    """A tiny model folder, a run folder, and chats written to a file."""

    def __init__(self, root: Path, template: str = PLAIN) -> None:
        self.model = root / "model"
        self.folder = RunFolder(root / "run")
        self.path = root / "chats.jsonl"
        tokenizer(template).save_pretrained(self.model)

    def cfg(self, **prepare: Any) -> RunFile:
        flags = [f"prepare.{k}={json.dumps(v)}" for k, v in {"data": [str(self.path)], **prepare}.items()]
        return load_run_file(None, flags).run

    def write(self, *rows: object) -> None:
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def has_positions(self, number: int) -> None:
        LlamaConfig(max_position_embeddings=number).save_pretrained(self.model)

    def build(self, **prepare: Any) -> tuple[dict[str, Any], PreparedSet]:
        summary = build_prepared(self.cfg(**prepare), self.folder, self.model, Silent())
        return summary, PreparedSet.open(self.folder.prepared)


def qa(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


def test_what_is_dropped_is_counted_by_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(
        qa("hi", "yes the cat"), qa("hi", "yes the cat"), qa("you", " "), {"prompt": "me"}, qa("a", "cat " * 40),
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": ""}]},
    )  # fmt: skip
    summary, prepared = bench.build(max_tokens=30)
    assert prepared.num_samples == 1
    assert summary["dropped"] == {"duplicate": 1, "empty_answer": 2, "no_assistant_turn": 1, "too_long": 1}


def test_what_the_target_has_no_positions_for_is_dropped_and_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.has_positions(17)  # a prompt of 9, an answer of 7, its end
    bench.write(qa("hi", "yes"), qa("hi", "cat " * 7), qa("hi", "cat " * 8), qa("hi", "cat " * 50))
    summary, prepared = bench.build(max_tokens=40)
    assert summary["dropped"] == {"beyond_target_positions": 1, "too_long": 1}
    assert prepared.lengths.max() == 17


def test_a_prompt_leaves_room_for_its_answer_or_is_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.has_positions(21)
    bench.write(qa("hi", "yes"), qa("hi hi hi", "yes"))
    cfg = load_run_file(None, [f"prepare.data=[{bench.path}]", "regenerate.max_new_tokens=12"]).run
    summary = build_prompts(cfg, bench.folder, bench.model, Silent())
    assert PreparedSet.open(bench.folder.prompts).lengths.tolist() == [9]
    assert summary["dropped"] == {"beyond_target_positions": 1}
    longer = load_run_file(None, [f"prepare.data=[{bench.path}]", "regenerate.max_new_tokens=13"]).run
    with pytest.raises(ConfigError, match=r"same regenerate\.max_new_tokens"):
        build_prompts(longer, bench.folder, bench.model, Silent())
    with pytest.raises(PrepareError, match="9 tokens where there is room for 8"):
        build_prompts(longer, RunFolder(tmp_path / "other"), bench.model, Silent())


def test_another_number_of_positions_is_another_set(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.has_positions(40)
    bench.write(qa("hi", "yes"))
    bench.build()
    bench.has_positions(41)
    with pytest.raises(ConfigError, match="same target positions"):
        bench.build()


def test_a_one_token_answer_is_dropped_only_when_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"), qa("you", "yes the cat"))
    assert bench.build()[0]["num_samples"] == 2
    other = Bench(tmp_path / "other")
    other.write(qa("hi", "yes"), qa("you", "yes the cat"))
    assert other.build(min_trained_tokens=3)[0]["dropped"] == {"too_few_trained_tokens": 1}


def test_trained_tokens_are_the_assistants_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hello you", "yes the cat"))
    summary, prepared = bench.build()
    assert summary["roles"]["assistant"] == {"tokens": 4, "trained": 4}
    assert summary["roles"]["prompt and template"]["trained"] == 0
    assert prepared.trained_tokens.tolist() == [4]


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    whole = b'{"prompt": "hi", "response": "yes"}\n'
    for last in (
        b'{"prompt"', b'{"prompt": "\\ud83d", "response": "yes"}', b'{"prompt": "\xff"}', b"[" * 5000,
        b'{"prompt": "hi", "response": "yes", "source": "\\ud83d"}', b'{"messages": [{"role": ["user"]}]}',
    ):  # fmt: skip
        bench.path.write_bytes(whole + last)
        for build in (build_prepared, build_prompts):
            with pytest.raises(PrepareError, match=r"chats\.jsonl:2"):
                build(bench.cfg(), bench.folder, bench.model, Silent())
        assert not bench.folder.root.exists()
    for content in ("", '{"prompt": "hi"}\n'):
        bench.path.write_text(content)
        with pytest.raises(PrepareError):
            bench.build()
        assert not bench.folder.root.exists()
    bench.path.unlink()
    with pytest.raises(PrepareError):
        bench.build()
    assert not bench.folder.prepared.exists()


def test_a_template_without_marks_trains_nothing_and_that_is_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, PLAIN.replace("<|end|>", ""))
    bench.write(qa("hi", "yes"))
    with pytest.raises(PrepareError, match=r"1 as boundary_unclear \(.*chats.jsonl:1: "):
        bench.build()
    assert not bench.folder.prepared.exists()


def test_a_chat_the_template_refuses_is_counted_and_the_others_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, NEEDS_A_USER)
    odd = {"messages": [{"role": r, "content": r} for r in ("system", "user", "assistant")]}
    bench.write(odd, qa("hi", "yes"))
    assert bench.build()[0]["dropped"] == {"template_refused": 1}
    summary = build_prompts(bench.cfg(), bench.folder, bench.model, Silent())
    assert (summary["num_samples"], summary["dropped"]) == (1, {"template_refused": 1})


def test_an_assistant_who_only_opens_and_a_chat_with_tools_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(
        {"messages": [{"role": "assistant", "content": "hello"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}], "tools": [{}]},
        qa("hi", "yes"),
    )
    assert bench.build()[0]["dropped"] == {"no_assistant_turn": 1, "template_leaves_out_tools": 1}


def test_a_rewriting_template_gives_one_sample_a_turn_in_the_same_split(tmp_path: Path) -> None:
    bench = Bench(tmp_path, THINKS_IN_THE_LAST_TURN)
    turns = [("user", "hi"), ("assistant", "<think> a </think> yes"), ("user", "ok"), ("assistant", "no")]
    bench.write({"messages": [{"role": role, "content": content} for role, content in turns]})
    _, prepared = bench.build(heldout_fraction=0.999)
    assert prepared.num_samples == 2
    assert len(set(prepared.heldout.tolist())) == 1


def test_reordered_data_keeps_each_samples_side_of_the_split(tmp_path: Path) -> None:
    rows = [qa(f"{a} {b}", "yes the cat") for a in WORDS for b in WORDS[:4]]

    def split(name: str, rows: list[dict[str, str]]) -> dict[bytes, bool]:
        bench = Bench(tmp_path / name)
        bench.write(*rows)
        _, prepared = bench.build(heldout_fraction=0.3)
        return {prepared.sample_id(row): bool(prepared.heldout[row]) for row in range(prepared.num_samples)}

    forward = split("forward", rows)
    assert 0 < sum(forward.values()) < len(forward)
    assert split("backward", rows[::-1]) == forward


def test_a_prompt_of_the_held_out_file_is_not_trained_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"), qa("me", "dog"))
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps(qa("me", "the cat")) + "\n")
    summary, prepared = bench.build(heldout_data=[str(test)], heldout_fraction=0.0)
    assert summary["dropped"] == {"prompt_held_out": 1}
    assert prepared.heldout.tolist() == [False, True]


def test_the_same_inputs_are_not_prepared_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"))
    bench.build()
    before = (bench.folder.prepared / "samples.arrow").stat().st_mtime_ns
    bench.build()
    assert (bench.folder.prepared / "samples.arrow").stat().st_mtime_ns == before


def test_a_moved_project_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"))
    (tmp_path / "test.jsonl").write_text(json.dumps(qa("me", "the cat")) + "\n")
    fingerprints = set()
    elsewhere = Path(os.path.relpath(tmp_path, tmp_path.parent))
    for folder, start in (
        (tmp_path, "."),
        (Path("."), tmp_path),
        (Path("./."), tmp_path),
        (elsewhere, tmp_path.parent),
    ):
        monkeypatch.chdir(start)
        data, test = f"{folder}/chats.jsonl", f"{folder}/test.jsonl"
        fingerprints.add(bench.build(data=[data], heldout_data=[test])[1].fingerprint)
    assert len(fingerprints) == 1


def test_a_template_argument_that_is_not_a_number_is_the_same_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"))
    for _ in range(2):
        cfg = load_run_file(None, [f"prepare.data=[{bench.path}]", "prepare.template_args={a: .nan}"]).run
        build_prepared(cfg, bench.folder, bench.model, Silent())


@pytest.mark.parametrize("change", ["template", "data", "options", "tokenizer"])
def test_a_changed_input_never_meets_old_output(tmp_path: Path, change: str) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"))
    fingerprint = bench.build()[1].fingerprint
    options: dict[str, Any] = {}
    if change == "template":
        tokenizer(BOS).save_pretrained(bench.model)
    elif change == "data":
        bench.write(qa("hi", "no"))
    elif change == "tokenizer":
        other = tokenizer()
        other.add_tokens(["zebra"])
        other.save_pretrained(bench.model)
    else:
        options = {"max_tokens": 99}
    with pytest.raises(ConfigError, match=f"the same {change}"):
        bench.build(**options)
    fresh = RunFolder(tmp_path / "fresh")
    build_prepared(bench.cfg(**options), fresh, bench.model, Silent())
    assert PreparedSet.open(fresh.prepared).fingerprint != fingerprint


def test_changed_demo_prompts_never_meet_old_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    cfg = bench.cfg(data=["demo"], num_demo_prompts=12)
    build_prompts(cfg, bench.folder, bench.model, Silent())
    other = [{"messages": [{"role": "user", "content": "hi"}], "source": "s"}]
    for room in ("build", "chats"):
        monkeypatch.setattr(f"headrace.prepare.{room}.demo_prompts", lambda num: other)
    with pytest.raises(ConfigError, match="the same data"):
        build_prompts(cfg, bench.folder, bench.model, Silent())


def test_what_is_held_out_depends_on_the_prompts_ids_alone() -> None:
    def draft(prompt: int, answer: list[int], source: str) -> Draft:
        ids = np.array([7, prompt, *answer], dtype=np.int32)
        return Draft(b"", ids, (np.arange(len(ids)) >= 2).astype(np.uint8), source, heldout=False)

    held = [held_out(draft(i, [], "a"), 0.2) for i in range(400)]
    assert held == [held_out(draft(i, [i, 2], "b"), 0.2) for i in range(400)]
    assert 50 < sum(held) < 110
    assert not any(held_out(draft(i, [], "a"), 0.0) for i in range(400))


@pytest.mark.parametrize("space", ["hi {}  you", " hi {} you", "hi {} you "])
def test_prompts_of_equal_ids_are_on_the_same_side(tmp_path: Path, space: str) -> None:
    bench = Bench(tmp_path)
    bench.write(
        *(qa(text.format(word), answer) for word in WORDS for text, answer in (("hi {} you", "no"), (space, "ok")))
    )
    _, prepared = bench.build(heldout_fraction=0.3)
    sides: dict[bytes, set[bool]] = {}
    for row in range(prepared.num_samples):
        prompt = prepared.sample(row).input_ids[: prepared.prompt_tokens[row]].tobytes()
        sides.setdefault(prompt, set()).add(bool(prepared.heldout[row]))
    assert len(sides) == len(WORDS) < prepared.num_samples
    assert all(len(side) == 1 for side in sides.values())
    assert {True, False} == set(prepared.heldout.tolist())


def test_a_training_prompt_with_the_ids_of_a_held_out_one_is_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"), qa("me  cat ", "dog"))
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps(qa("me cat", "the cat")) + "\n")
    summary, prepared = bench.build(heldout_data=[str(test)], heldout_fraction=0.0)
    assert summary["dropped"] == {"prompt_held_out": 1}
    assert prepared.heldout.tolist() == [False, True]
    cfg = bench.cfg(heldout_data=[str(test)], heldout_fraction=0.0)
    summary = build_prompts(cfg, bench.folder, bench.model, Silent())
    assert summary["dropped"] == {"prompt_held_out": 1}
    assert PreparedSet.open(bench.folder.prompts).heldout.tolist() == [False, True]


def test_a_held_out_prompt_without_an_answer_is_not_trained_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"), qa("me cat", "dog"))
    test = tmp_path / "test.jsonl"
    test.write_text('{"prompt": "me cat"}\n')
    summary, prepared = bench.build(heldout_data=[str(test)], heldout_fraction=0.0)
    assert summary["dropped"] == {"no_assistant_turn": 1, "prompt_held_out": 1}
    assert prepared.heldout.tolist() == [False]


def test_a_later_turn_that_equals_a_held_out_prompt_is_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path, THINKS_IN_THE_LAST_TURN)
    turns = [("user", "hi"), ("assistant", "<think> a </think>"), ("user", "ok"), ("assistant", "no")]
    bench.write({"messages": [{"role": role, "content": content} for role, content in turns]})
    test = tmp_path / "test.jsonl"
    turns[1] = ("assistant", "")
    test.write_text(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n")
    summary, prepared = bench.build(heldout_data=[str(test)], heldout_fraction=0.0)
    assert summary["dropped"] == {"prompt_held_out": 1}
    assert prepared.heldout.tolist() == [False, True]


def test_a_held_out_file_is_held_out_whole(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hi", "yes"), qa("you", "no"))
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps(qa("me", "the cat")) + "\n")
    _, prepared = bench.build(heldout_data=[str(test)], heldout_fraction=0.0)
    assert prepared.heldout.tolist() == [False, False, True]
    assert prepared.sample(2).source == "test"


def answers(path: Path, *rows: tuple[list[int], list[int], str]) -> Path:
    keys = ("prompt_ids", "answer_ids", "finish_reason")
    lines = [
        {"row": i, "source": "s", "heldout": False, "messages": [], **dict(zip(keys, row, strict=True))}
        for i, row in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    return path


def test_answers_are_joined_as_ids_in_row_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path = answers(tmp_path / "answers.jsonl", ([1, 7], [8, 9, 2], "stop"), ([1, 8], [10, 11], "length"))
    build_prepared(bench.cfg(), bench.folder, bench.model, Silent(), answers=path)
    prepared = PreparedSet.open(bench.folder.prepared)
    assert prepared.sample(0).input_ids.tolist() == [1, 7, 8, 9, 2]
    assert prepared.sample(0).loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert prepared.num_samples == 2


def test_cut_answers_can_be_dropped_and_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path = answers(tmp_path / "answers.jsonl", ([1, 7], [8, 9, 2], "stop"), ([1, 8], [10, 11], "length"))
    cfg = load_run_file(None, ["regenerate.drop_cut=true"]).run
    summary = build_prepared(cfg, bench.folder, bench.model, Silent(), answers=path)
    assert summary["dropped"] == {"cut": 1}


def test_an_empty_answer_is_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path = answers(tmp_path / "answers.jsonl", ([1, 7], [8, 2], "stop"), ([1, 8], [], "stop"))
    summary = build_prepared(bench.cfg(), bench.folder, bench.model, Silent(), answers=path)
    assert summary["dropped"] == {"empty_answer": 1}


def test_an_answer_without_a_prompt_would_train_every_token_and_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path = answers(tmp_path / "answers.jsonl", ([], [8, 9, 2], "stop"))
    with pytest.raises(PrepareError, match="trained on every token"):
        build_prepared(bench.cfg(), bench.folder, bench.model, Silent(), answers=path)


@pytest.mark.parametrize("line", [b'{"row": 3, "pro', b'{"row": 3}', b"[]", b'{"row": "\xff"}', b"[" * 5000])
def test_a_broken_answer_is_named_and_leaves_nothing_behind(tmp_path: Path, line: bytes) -> None:
    bench = Bench(tmp_path)
    path = answers(tmp_path / "answers.jsonl", ([1, 7], [8, 9, 2], "stop"))
    with path.open("ab") as out:
        out.write(line)
    with pytest.raises(PrepareError, match=r"answers\.jsonl:2"):
        build_prepared(bench.cfg(), bench.folder, bench.model, Silent(), answers=path)
    assert not bench.folder.prepared.exists()


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path = answers(tmp_path / "answers.jsonl", ([1, 7], [8, 999, 2], "stop"))
    with pytest.raises(PrepareError, match="999"):
        build_prepared(bench.cfg(), bench.folder, bench.model, Silent(), answers=path)
    assert not bench.folder.prepared.exists()


def test_prompts_leave_out_the_answer_that_will_be_replaced(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(qa("hello you", "yes"), {"prompt": "hi"}, {"messages": [{"role": "assistant", "content": "yes"}]})
    summary = build_prompts(bench.cfg(), bench.folder, bench.model, Silent())
    prompts = PreparedSet.open(bench.folder.prompts)
    assert summary["dropped"] == {"no_prompt": 1}
    assert prompts.trained_tokens.tolist() == [0, 0]
    assert prompts.messages(0) == [{"role": "user", "content": "hello you"}]
