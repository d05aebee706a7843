"""Every layout is brought to one form, and nothing is dropped on the way."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import PrepareError
from headrace.kinds import DataSource
from headrace.prepare.chats import read_chats
from headrace.prepare.layouts import LAYOUTS, UnknownLayout, read_row

USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def read(row: dict[str, Any], layout: str = "auto", **roles: str) -> list[dict[str, Any]]:
    return read_row(row, "x:1", layout, roles).messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, SAID]},
        {"prompt": "hi", "messages": [USER, SAID]},
        {"conversations": [USER, SAID]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": "hi", "response": "yes"},
        {"prompt": "hi", "completion": "yes"},
        {"prompt": "hi", "completion": [SAID]},
        {"instruction": "hi", "input": "", "output": "yes"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, SAID]},
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, SAID]},
    ],
)
def test_layouts_are_told_apart(row: dict[str, Any]) -> None:
    assert read(row) == [USER, SAID]


def test_an_input_stands_below_its_instruction_and_a_system_text_first() -> None:
    row = {"instruction": "add", "input": "1 and 2", "output": "3", "system": "be short"}
    assert [m["content"] for m in read(row)] == ["be short", "add\n\n1 and 2", "3"]


def test_a_layout_that_is_told_is_the_one_that_is_read() -> None:
    row = {"prompt": "hi", "response": "yes", "conversations": [USER]}
    assert read(row, "conversations") == [USER]
    assert read(row, "prompt") == [USER, SAID]
    with pytest.raises(UnknownLayout, match="name the layout"):
        read(row)
    for name in LAYOUTS:
        with pytest.raises(UnknownLayout, match=r"keys \['text'\]"):
            read({"text": "hi"}, name)


def test_calls_results_and_thinking_are_kept() -> None:
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert read({"messages": [USER, said, result, SAID]}) == [USER, said, result, SAID]


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"name": "f", "arguments": {"a": 1}},
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    ],
)
def test_arguments_become_a_mapping_however_a_call_is_written(call: dict[str, Any]) -> None:
    found = read({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert found[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_arguments_that_are_no_json_stay_as_they_were_written() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": '}}
    found = read({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert found[1]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_turns_of_calls_and_observations_are_read() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "yes"},
        ],
        "tools": '[{"name": "f", "parameters": {}}]',
    }
    found = read_row(row, "x:1", "auto", {})
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"] == [CALL]
    assert found.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    row["conversations"][1] = {"from": "function_call", "value": "f(1)"}  # type: ignore[index]
    with pytest.raises(PrepareError, match="x:1"):
        read_row(row, "x:1", "auto", {})


def test_roles_are_renamed_only_where_it_is_said() -> None:
    row = {"messages": [{"role": "human", "content": "hi"}, {"role": "bot", "content": "yes"}]}
    with pytest.raises(UnknownLayout, match="'human'"):
        read(row)
    assert read(row, human="user", bot="assistant") == [USER, SAID]


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_a_chat_with_images_or_sound_is_refused_whole(kind: str) -> None:
    part = {"type": kind, kind: "x"}
    found = read_row(
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "hi"}]}]}, "x", "auto", {}
    )
    assert found.refused.startswith("has_")
    assert not found.messages
    assert read_row({"prompt": "<image> what?", "images": ["a.png"]}, "x", "auto", {}).refused == "has_image"


def test_thinking_in_parts_is_thinking() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = read({"messages": [USER, {"role": "assistant", "content": parts}]})
    assert found[1] == {"role": "assistant", "content": "a\nb", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    ],
)
def test_ids_with_a_mask_are_taken_as_they_are(row: dict[str, Any]) -> None:
    found = read_row(row, "x:1", "auto", {})
    assert (found.input_ids, found.loss_mask) == ([5, 6, 7], [0, 1, 1])


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6], "loss_mask": [1]},
        {"input_ids": [5, -6], "loss_mask": [0, 1]},
        {"input_ids": [5, True], "loss_mask": [0, 1]},
        {"input_ids": [5, 6], "loss_mask": [0, 2]},
        {"input_ids": [5, 6], "labels": [6, -100]},
        {"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [0, 1]},
    ],
)
def test_ids_that_do_not_fit_their_mask_are_named(row: dict[str, Any]) -> None:
    with pytest.raises(PrepareError, match="x:1"):
        read_row(row, "x:1", "ids", {})


def test_an_error_lists_all_that_was_found_in_the_source(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [{"prompt": "hi"}, {"text": "a"}, {"text": "b"}, {"body": "c"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(PrepareError, match=r"chats\.jsonl:2.*keys \['text'\] in 2, keys \['body'\] in 1 rows"):
        list(read_chats([str(path)], 0))


def test_weights_and_caps_choose_by_content_and_keep_what_they_chose(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"

    def taken(number: int, **how: Any) -> list[str]:
        path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(number)))
        return [chat.messages[0]["content"] for chat in read_chats([DataSource(path=str(path), **how)], 0)]

    fewer, more = taken(200, weight=0.25), taken(400, weight=0.25)
    assert 30 < len(fewer) < 70
    assert more[: len(fewer)] == fewer
    assert taken(200, max_chats=7) == [f"p{i}" for i in range(7)]
