import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.codec.spec import CodecSpec
from headrace.errors import StoreError
from headrace.record import digest
from headrace.store.merge import merge
from headrace.store.objects import IN_FLIGHT, Objects
from headrace.store.reader import StoreReader
from headrace.store.remote import open_reader
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter
from headrace.store.shard import read_trailer
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records
from tests.store.conftest import S3
from tests.store.test_remote import flip, write


def make(root: Path, *rows: int, openings: int = 1, seed: int = 0, **changes) -> Path:
    for _ in range(openings - 1):
        StoreWriter(root, fake_manifest(**changes), 1 << 30, 1e9).close()
        with StoreWriter(root, fake_manifest(**changes), 1 << 30, 1e9) as writer:
            writer.add(fake_record(99, writer.generation))
    with StoreWriter(root, fake_manifest(**changes), 1 << 30, 1e9) as writer:
        for row in rows:
            writer.add(fake_record(row, writer.generation, num_segments=2, seed=seed))
    return root


def payload(root: Path, row: int) -> bytes:
    record = StoreReader(root).read(row, fake_sample(row).id)
    return b"".join(segment.payload for segment in record.segments)


def of(row: int, generation: int) -> bytes:
    return b"".join(segment.payload for segment in fake_record(row, generation, num_segments=2).segments)


def damage(root: Path, row: int) -> None:
    (shard,) = (root / "shards").glob("*.arrow")
    index = read_trailer(shard)
    content = bytearray(shard.read_bytes())
    content[int(index["offset"][index["row"] == row][0]) + 400] ^= 1
    shard.write_bytes(content)


def test_every_row_comes_over_once_and_the_highest_generation_wins(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0, 1, 2), make(tmp_path / "b", 2, 3, openings=2)
    seen: list[tuple[int, int]] = []
    done = merge([a, b], tmp_path / "out", 4000, 1e9, lambda *at: seen.append(at))
    assert (done.num_records, done.damaged) == (5, ())
    assert seen[-1] == (5, 5)
    assert StoreReader(tmp_path / "out").rows.tolist() == [0, 1, 2, 3, 99]
    assert payload(tmp_path / "out", 2) == of(2, 2)
    assert payload(tmp_path / "out", 1) == of(1, 1)
    assert verify(tmp_path / "out") == []


def test_a_merge_goes_on_where_it_was_left(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0, 1), make(tmp_path / "b", 2, 3)
    merge([a], tmp_path / "out", 1 << 30, 1e9)
    assert merge([a, b], tmp_path / "out", 1 << 30, 1e9).num_records == 4
    assert StoreReader(tmp_path / "out").generations.tolist() == [1, 1, 2, 2]


def test_a_damaged_record_is_taken_from_elsewhere_or_told(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0, 1, 2), make(tmp_path / "b", 1)
    damage(a, 1)
    assert merge([a, b], tmp_path / "out", 1 << 30, 1e9).damaged == ()
    assert payload(tmp_path / "out", 1) == of(1, 1)
    damage(b, 1)
    done = merge([a, b], tmp_path / "again", 1 << 30, 1e9)
    assert (done.num_records, done.damaged) == (2, (1,))
    assert StoreReader(tmp_path / "again").rows.tolist() == [0, 2]


def test_failures_without_a_record_anywhere_come_over(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0), make(tmp_path / "b", 1)
    with StoreWriter(a, fake_manifest(), 1 << 30, 1e9) as writer:
        writer.fail(fake_sample(1).id, 1, "not finite", permanent=True)
        writer.fail(fake_sample(7).id, 7, "not finite", permanent=True)
        writer.fail(fake_sample(8).id, 8, "time-out", permanent=False)
    assert merge([a, b], tmp_path / "out", 1 << 30, 1e9).num_failures == 1
    assert set(StoreReader(tmp_path / "out").failures) == {7}


def test_other_identities_other_ids_and_the_same_folder_are_refused(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0), make(tmp_path / "b", 1, prepared="other")
    with pytest.raises(StoreError, match="prepared 'other'"):
        merge([a, b], tmp_path / "out", 1 << 30, 1e9)
    with pytest.raises(StoreError, match="one id of row 0"):
        merge([a, make(tmp_path / "c", 0, seed=3)], tmp_path / "out", 1 << 30, 1e9)
    with pytest.raises(StoreError, match="another place"):
        merge([a], tmp_path / "a", 1 << 30, 1e9)


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_stores_at_addresses_are_merged_into_a_folder_or_an_address(s3: S3, tmp_path: Path, kind: str) -> None:
    far, out = (s3.address().replace("s3://", f"{kind}://") for _ in range(2))
    write(far, tmp_path / "staging", num_records=4)
    near = make(tmp_path / "near", 3, 4, 5, openings=2)
    with StoreWriter(near, fake_manifest(), 1 << 30, 1e9) as writer:
        writer.fail(fake_sample(7).id, 7, "not finite", permanent=True)
    for to in (out, tmp_path / "out"):
        done = merge([far, near], to, 1 << 30, 1e9)
        assert (done.num_records, done.damaged, done.num_failures) == (7, (), 1)
        reader = open_reader(to)
        assert reader.rows.tolist() == [0, 1, 2, 3, 4, 5, 99]
        assert b"".join(s.payload for s in reader.read(3, fake_sample(3).id).segments) == of(3, 2)
        assert same_records(reader.read(0, fake_sample(0).id), fake_record(0, 1, num_segments=3))
        assert set(reader.failures) == {7}  # what failed at the address has a record in the folder
    assert verify_objects(out) == []
    assert verify(tmp_path / "out") == []


def test_a_merge_into_an_address_goes_on_where_it_was_left(s3: S3, tmp_path: Path) -> None:
    out = s3.address().replace("s3://", "memory://")
    a, b = make(tmp_path / "a", 0, 1), make(tmp_path / "b", 2, 3)
    merge([a], out, 1 << 30, 1e9)
    assert merge([a, b], out, 1 << 30, 1e9).num_records == 4
    assert open_reader(out).generations.tolist() == [1, 1, 2, 2]


KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.store.merge import merge
from headrace.store.objects import Objects

created, real = [], Objects.create


def create(self, key, content):
    done = real(self, key, content)
    created.append(key)
    if len([key for key in created if key.startswith(sys.argv[3])]) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return done


Objects.create = create
merge([Path(sys.argv[1])], sys.argv[2], 1000, 1e9)
"""


@pytest.mark.parametrize("killed_at", ["shards", "commits"])
def test_a_merge_into_an_address_that_is_killed_goes_on(s3: S3, tmp_path: Path, killed_at: str) -> None:
    out, folder = s3.address(), make(tmp_path / "a", 0, 1, 2, 3)
    words = [sys.executable, "-c", KILLED, str(folder), out, killed_at]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run(words, env=environment, check=False).returncode == -signal.SIGKILL
    assert open_reader(out).rows.tolist() == [0, 1]
    Objects(out).remove(Objects(out).sizes("leases"))  # instead of the minute in which it runs out
    assert merge([folder], out, 1000, 1e9).num_records == 4
    reader = open_reader(out)
    assert (reader.rows.tolist(), len(reader.entries())) == ([0, 1, 2, 3], 8)
    for row in range(4):
        assert b"".join(s.payload for s in reader.read(row, fake_sample(row).id).segments) == of(row, 1)
    assert verify_objects(out) == []
    assert len(Objects(out).sizes("shards")) == 4


def test_a_fitted_basis_comes_over(s3: S3, tmp_path: Path) -> None:
    basis = b"a basis"
    codec = CodecSpec("latent", 0, 2, 8, "float32", {"basis": digest(basis).hex(), "groups": [[8, 4]]})
    far, out = (s3.address().replace("s3://", "memory://") for _ in range(2))
    with RemoteWriter(far, tmp_path / "staging", fake_manifest(codec=codec), 1 << 30, 1e9) as writer:
        (tmp_path / "staging" / "basis.safetensors").write_bytes(basis)
        writer.add(fake_record(0, writer.generation))
    for to in (out, tmp_path / "out"):
        merge([far], to, 1 << 30, 1e9)
        assert (open_reader(to).root / "basis.safetensors").read_bytes() == basis
    assert verify_objects(out) == []


def test_records_at_an_address_are_read_many_at_once(s3: S3, tmp_path: Path) -> None:
    far = write(s3.address(), tmp_path / "staging", num_records=2 * IN_FLIGHT)
    s3.ask(meet=[IN_FLIGHT, "/shards/"])  # a read is answered only when so many wait
    assert merge([far], tmp_path / "out", 1 << 30, 1e9).num_records == 2 * IN_FLIGHT


def test_damage_at_an_address_is_told_and_an_address_is_not_merged_into_itself(s3: S3, tmp_path: Path) -> None:
    far = write(s3.address().replace("s3://", "memory://"), tmp_path / "staging")
    flip(far, "shards/000001-000001.arrow", 3000)
    done = merge([far], tmp_path / "out", 1 << 30, 1e9)
    assert (done.num_records, done.damaged, done.num_failures) == (5, (3,), 1)
    with pytest.raises(StoreError, match="another place"):
        merge([far], far + "/", 1 << 30, 1e9)
    assert len(Objects(far).sizes("leases")) == 1
