import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import StoreError
from headrace.record import Record, segment_from_message
from headrace.store.shard import (
    INDEX_DTYPE,
    SIDECAR_DTYPE,
    TAIL_BYTES,
    ShardWriter,
    open_path,
    parse_shard_name,
    read_provenance,
    read_sidecar,
    read_trailer,
    shard_name,
    sidecar_path,
)
from headrace.testing.states import fake_record, same_records


def write_shard(path: Path, num_records: int = 4) -> list[Record]:
    records = [fake_record(row, 1, num_segments=1 + row % 2) for row in range(num_records)]
    writer = ShardWriter(path, {"engine": "fake"})
    for record in records:
        for segment in record.segments:
            writer.add(segment)
    writer.seal()
    return records


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / shard_name(1, 0)
    write_shard(path)
    return path


def test_names_carry_generation_and_number() -> None:
    assert shard_name(3, 41) == "000003-000041.arrow"
    assert parse_shard_name("000003-000041.arrow") == (3, 41)
    assert parse_shard_name(shard_name(1_234_567, 0)) == (1_234_567, 0)
    for other in ("000003-000041.arrow.open", "3-41.arrow", "000003-000041.arrow.tmp", "x"):
        assert parse_shard_name(other) is None


def test_index_and_sidecar_rows_are_packed() -> None:
    assert (INDEX_DTYPE.itemsize, SIDECAR_DTYPE.itemsize) == (80, 88)


def test_a_stock_arrow_reader_reads_the_batches(shard: Path) -> None:
    with pa.OSFile(str(shard)) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    assert table.column("row").to_pylist() == [0, 1, 1, 2, 3, 3]
    assert table.column("segment").to_pylist() == [0, 0, 1, 0, 0, 1]


def test_the_index_finds_every_segment(tmp_path: Path) -> None:
    path = tmp_path / shard_name(1, 0)
    records = write_shard(path)
    content = path.read_bytes()
    segments = []
    for row in read_trailer(path):
        message = content[int(row["offset"]) : int(row["offset"] + row["length"])]
        segments.append(segment_from_message(message, bytes(row["digest"])))
        assert (row["tokens"], row["trained"]) == (segments[-1].num_tokens, segments[-1].loss_mask.sum())
    for record in records:
        assert same_records(record, Record(tuple(s for s in segments if s.row == record.row)))


def test_nothing_is_listed_before_it_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / shard_name(1, 0)
    writer = ShardWriter(path, {})
    writer.add(fake_record(0, 1).segments[0])
    assert not path.exists()
    assert open_path(path).exists()
    writer.seal()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_every_flip_in_schema_index_and_tail_is_noticed(shard: Path) -> None:
    content = shard.read_bytes()
    rows = read_trailer(shard)
    first, last = int(rows["offset"][0]), int(rows["offset"][-1] + rows["length"][-1])
    for position in [*range(first), *range(last, len(content))]:
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        shard.write_bytes(flipped)
        with pytest.raises(StoreError, match=shard.name):
            read_trailer(shard)


def test_every_flip_in_a_message_is_noticed(shard: Path) -> None:
    content = shard.read_bytes()
    row = read_trailer(shard)[1]
    message = content[int(row["offset"]) : int(row["offset"] + row["length"])]
    for position in range(len(message)):
        flipped = bytearray(message)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(StoreError):
            segment_from_message(bytes(flipped), bytes(row["digest"]))


def test_a_shard_cut_anywhere_is_never_taken_for_whole(shard: Path) -> None:
    content = shard.read_bytes()
    sizes = {0, 1, TAIL_BYTES - 1, TAIL_BYTES, len(content) - 1, *random.Random(0).sample(range(len(content)), 60)}
    for size in sizes:
        shard.write_bytes(content[:size])
        with pytest.raises(StoreError, match=shard.name):
            read_trailer(shard)


def test_bytes_after_the_tail_are_noticed(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + b"\0" * 16)
    with pytest.raises(StoreError):
        read_trailer(shard)


def test_an_absent_shard_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        read_trailer(tmp_path / shard_name(1, 0))


def test_the_provenance_travels_with_the_shard(shard: Path) -> None:
    assert read_provenance(shard) == {"engine": "fake"}


def test_a_torn_sidecar_gives_its_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / shard_name(1, 0)
    writer = ShardWriter(path, {})
    for row in range(3):
        writer.add(fake_record(row, 1).segments[0])
    writer.close()
    sidecar = sidecar_path(path)
    content = sidecar.read_bytes()
    size = SIDECAR_DTYPE.itemsize
    for cut in range(len(content) + 1):
        sidecar.write_bytes(content[:cut])
        assert read_sidecar(sidecar)["row"].tolist() == list(range(cut // size))
    flipped = bytearray(content)
    flipped[size + 3] ^= 4
    sidecar.write_bytes(flipped)
    assert read_sidecar(sidecar)["row"].tolist() == [0]
    assert len(read_sidecar(tmp_path / "absent")) == 0


def test_a_sample_of_no_tokens_can_be_stored(tmp_path: Path) -> None:
    path = tmp_path / shard_name(1, 0)
    writer = ShardWriter(path, {})
    writer.add(fake_record(0, 1, num_tokens=0).segments[0])
    assert np.array_equal(writer.seal(), read_trailer(path))
