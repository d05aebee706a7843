"""Layouts that are read, and errors that name what was found."""

import json
from pathlib import Path

import pytest

from headrace.errors import PrepareError
from headrace.prepare.chats import read_chats, written

NESTED: list[object] = []
for _ in range(200):
    NESTED = [NESTED]


def read(tmp_path: Path, *lines: object) -> list[tuple[str, ...]]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return [tuple(m["role"] for m in chat.messages) for chat in read_chats([str(path)], 0)]


def test_messages_and_prompt_response_rows_are_read(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "hi", "response": "yes"},
        {"prompt": "hi"},
    ]
    assert read(tmp_path, *rows) == [("user",), ("user", "assistant"), ("user",)]


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path, "", {"prompt": "hi"}, "  ") == [("user",)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"prompt": "hi"', "chats.jsonl:2"),
        ("[1]", "a list"),
        ({"text": "hi"}, r"keys \['text'\]"),
        ({"messages": []}, r"keys \['messages'\]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "'wizard'"),
        ({"messages": ["hi"]}, "'hi'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"chats\.jsonl:2: \['user'\]"),
        ({"messages": [{"role": {}, "content": "x"}]}, r"chats\.jsonl:2: \{\}"),
        ({"messages": [{"content": "x"}]}, r"chats\.jsonl:2: None"),
        ({"prompt": "\ud83d"}, r"chats\.jsonl:2: .*surrogates"),
        ({"prompt": "hi", "source": "\ud83d"}, r"chats\.jsonl:2: .*surrogates"),
        ({"messages": [{"role": "user", "content": "x", "\udc00": 1}]}, r"chats\.jsonl:2: .*surrogates"),
        ("[" * 5000, r"chats\.jsonl:2: .*recursion"),
        ({"prompt": "hi", "more": NESTED}, r"chats\.jsonl:2: more than 64 levels"),
        ({"messages": [{"role": "user", "content": 3}]}, "int"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, found: str) -> None:
    with pytest.raises(PrepareError, match=found):
        read(tmp_path, {"prompt": "hi"}, line)


def test_no_file_an_empty_file_and_other_encodings_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="No such file"):
        list(read_chats([str(tmp_path / "none.jsonl")], 0))
    with pytest.raises(PrepareError, match="is empty"):
        read(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(PrepareError, match="UTF-8"):
        list(read_chats([str(tmp_path / "latin.jsonl")], 0))


def test_bytes_that_are_not_utf8_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"prompt": "hi"}\n' * 3000 + b'{"prompt": "caf\xe9"}\n' + b'{"prompt": "hi"}\n' * 3000)
    with pytest.raises(PrepareError, match=r"UTF-8 text, found .*chats\.jsonl:3001: "):
        list(read_chats([str(path)], 0))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "hi"}\r\n{"prompt": "you \xf0\x9f\x98\x80"}\r\n')
    assert [chat.messages[0]["content"] for chat in read_chats([str(path)], 0)] == ["hi", "you 😀"]


def test_the_demo_stands_for_its_prompts() -> None:
    assert len(list(read_chats(["demo"], 12))) == 12


def test_the_tools_of_a_chat_are_kept(tmp_path: Path) -> None:
    user = {"role": "user", "content": "hi"}
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": [user]}, {"messages": [user], "tools": [{"name": "f"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrapped = {"type": "function", "function": {"name": "f"}}
    assert [chat.tools for chat in read_chats([str(path)], 0)] == [(), (wrapped,)]


def test_thinking_in_a_field_of_its_own_counts_as_written() -> None:
    assert written({"role": "assistant", "content": " ", "reasoning_content": "hm"}) == "hm"
    assert written({"role": "assistant", "content": "\n"}) == ""
    assert "f" in written({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]})
