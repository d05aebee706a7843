import random
import shutil
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.shard import read_trailer, shard_name
from headrace.store.verify import verify


def test_a_sound_store_has_no_damage(make_store) -> None:
    seen: list[tuple[int, int]] = []
    root = make_store(6)
    assert verify(root, lambda done, total: seen.append((done, total))) == []
    total = sum(path.stat().st_size for path in (root / "shards").iterdir())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)
    assert len(seen) == 3


def test_a_flip_anywhere_in_any_file_is_found(make_store) -> None:
    root = make_store(4)
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name not in ("lock", "manifest.json"))
    assert len(files) == 3
    rng = random.Random(3)
    for path in files:
        content = path.read_bytes()
        for position in {0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(60))}:
            flipped = bytearray(content)
            flipped[position] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            assert [d.path for d in verify(root)][:1] == [path.name], f"{path.name} at {position}"
        path.write_bytes(content)


def test_damage_names_the_row_and_the_offset(make_store) -> None:
    root = make_store(4)
    shard = root / "shards" / shard_name(1, 1)
    row = read_trailer(shard)[0]
    content = bytearray(shard.read_bytes())
    content[int(row["offset"]) + 200] ^= 1
    shard.write_bytes(content)
    (damage,) = verify(root)
    assert (damage.path, damage.offset, damage.row) == (shard.name, int(row["offset"]), int(row["row"]))


def test_a_shard_that_is_gone_is_told_for_each_record(make_store) -> None:
    root = make_store(4)
    (root / "shards" / shard_name(1, 0)).unlink()
    assert {d.row for d in verify(root)} == {0, 1}


def test_a_folder_without_a_manifest_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        verify(tmp_path)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_store_without_its_folder_of_shards_cannot_be_judged(make_store, is_file: bool) -> None:
    root = make_store(4)
    shutil.rmtree(root / "shards")
    if is_file:
        (root / "shards").write_text("")
    with pytest.raises(StoreError, match="shards"):
        verify(root)


@pytest.mark.parametrize("name", ["index.journal", "failures.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_damage(make_store, name: str) -> None:
    root = make_store(2)
    (root / name).unlink(missing_ok=True)
    (root / name).mkdir()
    assert [d.path for d in verify(root)] == [name]
