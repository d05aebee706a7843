"""The folder that `datasets` saves: written, read, refused where it is not one."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import ConfigError
from headrace.interchange.arrow_folder import DATA, STATE, ArrowFolder, write_arrow_folder
from headrace.testing.states import fake_sample


def test_what_is_written_is_read(tmp_path: Path) -> None:
    samples = [fake_sample(row, 3 + row % 7) for row in (5, 0, *range(100, 2300))]
    assert write_arrow_folder(tmp_path / "out", iter(samples)) == len(samples)
    folder = ArrowFolder(tmp_path / "out")
    assert len(folder) == len(samples)
    for number in (0, 1, 999, 1000, 1001, len(samples) - 1):
        ids, mask = folder.sample(number)
        assert (ids.dtype, mask.dtype) == (np.int32, np.uint8)
        assert np.array_equal(ids, samples[number].input_ids)
        assert np.array_equal(mask, samples[number].loss_mask)
        assert folder.row(number) == samples[number].row


def foreign(folder: Path, columns: dict[str, pa.Array], files: int = 1) -> None:
    folder.mkdir()
    table = pa.table(columns)
    each = -(-len(table) // files)
    names = [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
    for n, name in enumerate(names):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table.slice(n * each, each))
    (folder / STATE).write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_several_files_of_other_types_are_read_and_rows_are_numbers(tmp_path: Path) -> None:
    ids = pa.array([[1, 2], [3], [4, 5, 6]], pa.large_list(pa.int32()))
    mask = pa.array([[False, True], [True], [False, True, True]], pa.list_(pa.bool_()))
    foreign(tmp_path / "in", {"input_ids": ids, "loss_mask": mask, "more": pa.array(["a", "b", "c"])}, files=2)
    folder = ArrowFolder(tmp_path / "in")
    assert [folder.row(number) for number in range(3)] == [0, 1, 2]
    assert folder.sample(2)[0].tolist() == [4, 5, 6]
    assert folder.sample(2)[1].tolist() == [0, 1, 1]


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prepare-data"):
        ArrowFolder(tmp_path)
    foreign(tmp_path / "columns", {"text": pa.array(["a"])})
    with pytest.raises(ConfigError, match="input_ids, loss_mask"):
        ArrowFolder(tmp_path / "columns")
    write_arrow_folder(tmp_path / "cut", [fake_sample(row) for row in range(50)])
    path = tmp_path / "cut" / DATA
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(ConfigError, match="saved data set"):
        ArrowFolder(tmp_path / "cut")
    (tmp_path / "cut" / STATE).write_text("{}")
    with pytest.raises(ConfigError, match="_data_files"):
        ArrowFolder(tmp_path / "cut")


@pytest.mark.parametrize(
    ("ids", "mask"), [([-1, 2], [0, 1]), ([2**31, 2], [0, 1]), ([1, 2], [0, 2]), ([1, 2], [0, -1])]
)
def test_numbers_that_are_no_ids_or_no_mask_are_refused(ids: list[int], mask: list[int], tmp_path: Path) -> None:
    foreign(tmp_path / "in", {"input_ids": pa.array([ids]), "loss_mask": pa.array([mask])})
    with pytest.raises(ConfigError, match="sample 0"):
        ArrowFolder(tmp_path / "in").sample(0)
