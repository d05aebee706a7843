"""Stores written by every version since 1, as they lie in tests/store/golden, are read and mended by this one."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.store.journal import BLOCK_DTYPE, HEADER, ROW_BYTES
from headrace.store.manifest import VERSION
from headrace.store.reader import StoreReader
from headrace.store.repair import repair
from headrace.store.shard import MAGIC, TAIL_BYTES, read_provenance
from headrace.store.verify import verify

GOLDEN = sorted((Path(__file__).parent / "golden").glob("v*"))


def check(states: Path, expected: dict) -> None:
    reader = StoreReader(states)
    assert reader.rows.tolist() == [record["row"] for record in expected["records"]]
    for wanted in expected["records"]:
        record = reader.read(wanted["row"], bytes.fromhex(wanted["id"]))
        assert record.generation == wanted["generation"]
        assert record.input_ids.tolist() == wanted["input_ids"]
        assert record.loss_mask.tolist() == wanted["loss_mask"]
        assert [segment.payload.hex() for segment in record.segments] == wanted["payloads"]
    assert {str(row): failure.reason for row, failure in reader.failures.items()} == expected["failures"]
    assert reader.manifest.identity() == expected["identity"]
    assert verify(states) == []


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_a_store_of_an_earlier_version_is_read(golden: Path, tmp_path: Path) -> None:
    expected = json.loads((golden / "expected.json").read_text())
    check(golden / "states", expected)
    states = tmp_path / "states"
    shutil.copytree(golden / "states", states)
    (states / "index.journal").unlink()
    assert repair(states).rows == ()
    check(states, expected)


def test_this_version_has_its_golden_store() -> None:
    assert f"v{VERSION}" in [path.name for path in GOLDEN]


def test_stock_arrow_reads_a_shard() -> None:
    for shard in (GOLDEN[-1] / "states" / "shards").glob("*.arrow"):
        with pa.OSFile(str(shard)) as file, pa.ipc.open_stream(file) as stream:
            table = stream.read_all()
        assert table.num_rows >= 1
        assert table.schema.metadata[b"headrace"] == b"record-1"
        assert read_provenance(shard)["engine"] == "fake"


def test_constants_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats" / f"store-{VERSION}.md").read_text()
    for text in (f"`{MAGIC.decode()}`", f"`{HEADER[:8].decode()}`", f"{TAIL_BYTES} bytes", f"{ROW_BYTES} bytes"):
        assert text in page, text
    assert f"{BLOCK_DTYPE.itemsize} bytes" in page
