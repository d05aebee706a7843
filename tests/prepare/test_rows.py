"""Rows are the same whatever holds them."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import PrepareError
from headrace.kinds import DataSource
from headrace.prepare.rows import content_digest, hash_file, read_rows, source_name

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "thinking": "hm"}]},
    {"messages": [{"role": "user", "content": "you"}]},
]


def rows(path: Path, **how: Any) -> list[dict[str, Any]]:
    return [row for row, _ in read_rows(DataSource(path=str(path), **how))]


def written(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"chats.{kind}"
    table = pa.Table.from_pylist(ROWS)
    if kind in ("jsonl", "lines.json"):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text("\n " + json.dumps(ROWS, indent=1))
    elif kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    else:
        path = folder / "chats.arrow"
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "lines.json", "json", "parquet", "arrow", "arrow file"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    assert rows(written(tmp_path, kind)) == ROWS


def test_a_folder_is_its_files_in_order_of_their_names(tmp_path: Path) -> None:
    for name, text in (("b", "two"), ("a", "one")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    (tmp_path / "README.md").write_text("not chats")
    assert [row["prompt"] for row in rows(tmp_path)] == ["one", "two"]
    before = content_digest(DataSource(path=str(tmp_path)))
    (tmp_path / "c.jsonl").write_text('{"prompt": "three"}\n')
    assert content_digest(DataSource(path=str(tmp_path))) != before


def save_dataset(folder: Path) -> None:
    """As `datasets` saves one: an Arrow stream and state.json."""
    written(folder, "arrow").rename(folder / "data-00000-of-00001.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def test_a_saved_dataset_and_its_splits_are_read_by_name(tmp_path: Path) -> None:
    save_dataset(tmp_path / "one")
    assert rows(tmp_path / "one") == ROWS
    for split in ("train", "test"):
        save_dataset(tmp_path / "two" / split)
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert rows(tmp_path / "two", split="test") == ROWS
    with pytest.raises(PrepareError, match=r"a split among \['test', 'train'\], found None"):
        rows(tmp_path / "two")
    with pytest.raises(PrepareError, match="with splits"):
        rows(tmp_path / "one", split="test")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.parquet", b"PAR1 and no more", "a readable Parquet"),
        ("a.arrow", b"ARROW1\0\0", "a readable Parquet or Arrow"),
        ("a.json", b'[{"prompt": "hi"}, ', r"a\.json"),
        ("a.json", b"[1]", "a int"),
        ("a.json", b"[]", "is empty"),
        ("a.jsonl", b'{"prompt": "hi"}\n{"prompt"', r"a\.jsonl:2"),
    ],
)
def test_a_file_that_is_damaged_is_named(tmp_path: Path, name: str, content: bytes, found: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PrepareError, match=found):
        rows(tmp_path / name)


def test_a_folder_without_chats_lists_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(PrepareError, match=r"notes\.txt"):
        rows(tmp_path)
    with pytest.raises(PrepareError, match="No such file"):
        rows(tmp_path / "none.jsonl")
    with pytest.raises(PrepareError, match="No such file"):
        hash_file(tmp_path / "none.jsonl")


def test_the_hub_is_asked_by_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    class Splits(dict[str, Any]):
        pass

    asked: list[Any] = []

    def load(name: str, subset: str | None, split: str | None) -> Any:
        asked.append((name, subset, split))
        if name == "a/gone":
            raise FileNotFoundError("no such data set")
        return ROWS if split else Splits(train=ROWS, test=ROWS[:1])

    fake = types.ModuleType("datasets")
    fake.load_dataset = load  # type: ignore[attr-defined]
    fake.DatasetDict = Splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = DataSource(path="hub:a/b", subset="en", split="test")
    assert [row for row, _ in read_rows(source)] == ROWS
    assert asked == [("a/b", "en", "test")]
    assert source_name(source) == "a/b"
    assert content_digest(source) == content_digest(source)
    with pytest.raises(PrepareError, match=r"a split among \['test', 'train'\]"):
        list(read_rows(DataSource(path="hub:a/b")))
    with pytest.raises(PrepareError, match="no such data set"):
        list(read_rows(DataSource(path="hub:a/gone")))


def test_without_the_package_the_hub_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PrepareError, match="pip install datasets"):
        list(read_rows(DataSource(path="hub:a/b")))


def test_a_name_given_is_the_name_counted() -> None:
    assert source_name(DataSource(path="x/chats.jsonl")) == "chats"
    assert source_name(DataSource(path="x/chats.jsonl", name="mine")) == "mine"
