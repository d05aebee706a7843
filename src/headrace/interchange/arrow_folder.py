"""The folder that Hugging Face `datasets` saves a data set to, as speculators reads and writes it.

In: ids, masks and rows. Out: one Arrow IPC stream, `dataset_info.json` and, last, `state.json`; and the same folders
read again, whoever wrote them. Three files of plain Arrow: written here, so that `datasets` (which asks for an older
fsspec and brings pandas) is not needed. Needs no torch.
"""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import ConfigError
from headrace.files import fsync_folder, read_json, write_json
from headrace.record import Sample

DATA, INFO, STATE = "data-00000-of-00001.arrow", "dataset_info.json", "state.json"
ROWS = 1000
COLUMNS = ("input_ids", "loss_mask")
_HINT = "give the folder that `speculators prepare-data` or `headrace store export` wrote"
_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("loss_mask", pa.list_(pa.int64())),
        pa.field("seq_len", pa.int64()),
        pa.field("row", pa.int64()),
    ]
)


class ArrowFolder:
    """A saved data set, mapped; `row(i)` is the row of the prepared set that sample i is."""

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigError when the folder, its files or the columns `input_ids` and `loss_mask` are not there."""
        state = read_json(folder / STATE, _HINT)
        try:
            names = [str(entry["filename"]) for entry in state["_data_files"]]
            tables = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
            self._table = pa.concat_tables(tables)
        except (KeyError, TypeError, OSError, pa.ArrowInvalid) as exc:
            raise ConfigError(f"a saved data set in {folder}", f"{type(exc).__name__}: {exc}", _HINT) from exc
        missing = [name for name in COLUMNS if name not in self._table.column_names]
        if missing:
            found = f"{', '.join(self._table.column_names)}"
            raise ConfigError(f"the columns {', '.join(COLUMNS)} in {folder}", found, _HINT)
        self.folder = folder
        self._columns = {name: self._table.column(name) for name in COLUMNS}
        named = "row" in self._table.column_names
        self._rows = self._table.column("row").to_numpy() if named else np.arange(len(self))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, number: int) -> int:
        """Row of the prepared set: as headrace wrote it, else the number itself."""
        return int(self._rows[number])

    def sample(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Ids and mask. Raises: ConfigError for numbers that are no ids or no mask."""
        found = [np.asarray(self._columns[name][number].values.to_numpy(zero_copy_only=False)) for name in COLUMNS]
        ids, mask = (values.astype(np.int64) for values in found)
        if ids.size and (ids.min() < 0 or ids.max() >= 2**31 or mask.min() < 0 or mask.max() > 1):
            where = f"sample {number} of {self.folder}"
            raise ConfigError(f"ids in 31 bits and a mask of 0 and 1 in {where}", "others", "prepare the data again")
        return ids.astype(np.int32), mask.astype(np.uint8)


def write_arrow_folder(folder: Path, samples: Iterable[Sample]) -> int:
    """Save a data set; `state.json` last, so that a folder with one is whole. Returns: samples written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    temporary, count, source = folder / (DATA + ".tmp"), 0, iter(samples)
    with open(temporary, "wb") as out:
        with pa.ipc.new_stream(out, _SCHEMA) as writer:
            while group := list(islice(source, ROWS)):
                writer.write_batch(_batch(group))
                count += len(group)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(folder / DATA)
    fsync_folder(folder)
    whole, values = {"dtype": "int64", "_type": "Value"}, ("seq_len", "row")
    features: dict[str, Any] = {name: {"feature": whole, "_type": "List"} for name in COLUMNS}
    features.update(dict.fromkeys(values, whole))
    write_json(folder / INFO, {"citation": "", "description": "", "features": features, "homepage": "", "license": ""})
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA}],
        "_fingerprint": f"headrace{count:08x}",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(folder / STATE, state)
    return count


def _batch(samples: list[Sample]) -> pa.RecordBatch:
    columns = (
        pa.array([s.input_ids.astype(np.int64) for s in samples], pa.list_(pa.int64())),
        pa.array([s.loss_mask.astype(np.int64) for s in samples], pa.list_(pa.int64())),
        pa.array([s.num_tokens for s in samples], pa.int64()),
        pa.array([s.row for s in samples], pa.int64()),
    )
    return pa.RecordBatch.from_arrays(list(columns), schema=_SCHEMA)
