"""Rows of a source of chats, whatever holds them.

In: a file (JSONL, JSON, Parquet, Arrow), a folder of such files, a folder that `datasets` saved, or a data set of the
hub. Out: each row as a mapping with the place it stands at, and a digest of the content. Nothing is known of layouts.
`datasets` is imported only for the hub; all else is read by pyarrow and json.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from headrace.errors import ConfigError, PrepareError
from headrace.files import read_json
from headrace.kinds import DataSource
from headrace.record import digest

MOST_LEVELS = 64
HUB = "hub:"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
_CHECK = "check prepare.data"

Rows = Iterator[tuple[dict[str, Any], str]]


def read_rows(source: DataSource) -> Rows:
    """Yield each row of a source with its place, as `chats.jsonl:12`; values that are null are left out.

    Raises: PrepareError for a source that cannot be read, holds nothing, or has a row that is no mapping.
    """
    num_rows = 0
    for row, place in _from_hub(source) if source.path.startswith(HUB) else _from_files(source):
        num_rows += 1
        yield _checked(row, place), place
    if not num_rows:
        raise PrepareError("at least one chat", f"{source.path} is empty", _CHECK)


def source_name(source: DataSource) -> str:
    """What samples of a source are counted under."""
    if source.name is not None:
        return source.name
    return source.path.removeprefix(HUB) if source.path.startswith(HUB) else Path(source.path).stem


def content_digest(source: DataSource) -> str:
    """A digest of all that a source holds: 32 hexadecimal digits. Raises: PrepareError when it cannot be read."""
    if source.path.startswith(HUB):
        hasher = xxhash.xxh3_128()
        for row, _ in _from_hub(source):
            hasher.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        return hasher.hexdigest()
    files = _files(source)
    if files == [Path(source.path)]:
        return hash_file(files[0])
    told = [[file.name, hash_file(file)] for file in files]
    return digest(json.dumps(told).encode()).hex()


def hash_file(path: Path) -> str:
    """xxh3-128 of a file's bytes, as hexadecimal digits. Raises: PrepareError when it cannot be read."""
    hasher = xxhash.xxh3_128()
    try:
        with open(path, "rb") as source:
            while chunk := source.read(1 << 20):
                hasher.update(chunk)
    except OSError as exc:
        raise PrepareError("a readable file", str(exc), _CHECK) from exc
    return hasher.hexdigest()


def _files(source: DataSource) -> list[Path]:
    """The files a path stands for, in order of their names."""
    path = Path(source.path)
    if not path.is_dir():
        if source.split is not None or source.subset is not None:
            raise PrepareError("a `datasets` folder or hub data set, for a split or subset", str(path), _CHECK)
        return [path]
    splits = path / "dataset_dict.json"
    if splits.is_file():
        return _state_files(path / _chosen_split(path, source, _json_object(splits).get("splits", [])))
    if source.split is not None:
        raise PrepareError("a `datasets` folder with splits", f"{path} without dataset_dict.json", _CHECK)
    if (path / "state.json").is_file():
        return _state_files(path)
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not found:
        names = sorted(file.name for file in path.iterdir())[:8]
        raise PrepareError(f"files that end in {', '.join(SUFFIXES)}", f"{path}: {names}", _CHECK)
    return found


def _chosen_split(path: Path, source: DataSource, splits: list[str]) -> str:
    if source.split in splits:
        return str(source.split)
    if source.split is None and len(splits) == 1:
        return splits[0]
    raise PrepareError(f"a split among {sorted(splits)}", f"{source.split} of {path}", "name it as `split`")


def _state_files(folder: Path) -> list[Path]:
    """The Arrow files of a data set that `datasets` saved, in its order."""
    try:
        return [folder / part["filename"] for part in _json_object(folder / "state.json")["_data_files"]]
    except (KeyError, TypeError) as exc:
        raise PrepareError("a folder that `datasets` saved", f"{folder}/state.json: {exc!r}", _CHECK) from exc


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, _CHECK)
    except ConfigError as exc:
        raise PrepareError(*exc.args) from exc


def _from_files(source: DataSource) -> Rows:
    for path in _files(source):
        if path.suffix in (".parquet", ".arrow"):
            yield from _from_arrow(path)
        elif path.suffix == ".json" and _opens_a_list(path):
            yield from _from_json(path)
        else:
            yield from _from_lines(path)


def _opens_a_list(path: Path) -> bool:
    """Files called .json hold one list of rows, or a row on each line."""
    try:
        with open(path, "rb") as source:
            for line in source:
                if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                    return text.startswith(b"[")
    except OSError as exc:
        raise PrepareError("a readable JSON file", str(exc), _CHECK) from exc
    return False


def _from_lines(path: Path) -> Rows:
    try:
        with open(path, "rb") as source:
            for number, line in enumerate(source, 1):
                if line.strip():
                    yield _parsed(line, f"{path}:{number}"), f"{path}:{number}"
    except OSError as exc:
        raise PrepareError("a readable JSONL file", str(exc), _CHECK) from exc


def _from_json(path: Path) -> Rows:
    for number, row in enumerate(_parsed(path.read_bytes(), str(path)), 1):
        yield row, f"{path}:[{number}]"


def _parsed(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeError as exc:
        raise PrepareError("UTF-8 text", f"{place}: {exc}", "mend or remove the line") from exc
    except (ValueError, RecursionError) as exc:
        raise PrepareError("a JSON object on each line", f"{place}: {exc}", "mend or remove the line") from exc


def _from_arrow(path: Path) -> Rows:
    number = 0
    try:
        for batch in _batches(path):
            for row in batch.to_pylist():
                number += 1
                yield _without_nulls(row), f"{path}:[{number}]"
    except (OSError, pa.ArrowException) as exc:
        raise PrepareError("a readable Parquet or Arrow file", f"{path}: {exc}", _CHECK) from exc


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as source:
            yield from source.iter_batches(batch_size=1024)
        return
    with pa.OSFile(str(path), "rb") as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            opened = pa.ipc.open_file(source)
            yield from (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:  # what `datasets` writes
            yield from pa.ipc.open_stream(source)


def _without_nulls(value: Any) -> Any:
    """Columns give every row every key that any row has; a key that is null is one the row does not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _from_hub(source: DataSource) -> Rows:
    try:
        datasets = importlib.import_module("datasets")  # not a dependency: few runs read the hub
    except ImportError as exc:
        hint = "pip install datasets; or download the files and name their folder"
        raise PrepareError(f"the package datasets, to read {source.path}", str(exc), hint) from exc
    name = source.path.removeprefix(HUB)
    try:
        found = datasets.load_dataset(name, source.subset, split=source.split)
    except (OSError, ValueError, RuntimeError) as exc:  # its own errors derive from these
        raise PrepareError("a data set of the hub", f"{name}: {' '.join(str(exc).split())[:300]}", _CHECK) from exc
    if isinstance(found, datasets.DatasetDict):
        found = found[_chosen_split(Path(name), source, list(found))]
    for number, row in enumerate(found, 1):
        yield _without_nulls(row), f"{name}:[{number}]"


def _checked(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise PrepareError("a JSON object on each line", f"{place}: a {type(row).__name__}", "mend or remove the line")
    try:
        _check_levels(row)
        # An escape may stand for half a character, which nothing can hold.
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeError as exc:
        raise PrepareError("UTF-8 text", f"{place}: {exc}", "mend or remove the line") from exc
    except (ValueError, RecursionError) as exc:
        raise PrepareError("a JSON object on each line", f"{place}: {exc}", "mend or remove the line") from exc
    return row


def _check_levels(value: Any, left: int = MOST_LEVELS) -> None:
    """Later code walks a chat deeper in the stack than the reader did."""
    if not left:
        raise ValueError(f"more than {MOST_LEVELS} levels, one inside the other")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_levels(inner, left - 1)
