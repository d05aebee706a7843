"""DeepSpec's target cache, both ways: `manifest.json` (version 2), `samples.idx`, `shard-00000.bin` and on.

In: a run, or such a folder. Out: the other. A sample is int32 ids, uint8 attention mask, uint8 loss mask, bfloat16
states [T, taps*H] and bfloat16 last state [T, H] after the final norm, one after the other in a shard; 56 bytes in the
index say where. Source: DeepSpec `data/target_cache_dataset.py`.
"""

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import ConfigError
from headrace.files import fsync_folder, read_json, write_json
from headrace.interchange.outgoing import Outgoing, Sent
from headrace.progress import Progress
from headrace.taps import FINAL_POST_NORM, to_zlab

MANIFEST, INDEX = "manifest.json", "samples.idx"
VERSION = 2
ENTRY = struct.Struct("<QIIQQQQQ")  # sample, shard, tokens, offsets: ids, attention mask, loss mask, states, last state
SHARD_BYTES = 64 * 1024**3
SYNC_BYTES = 256 * 1024**2  # the index names nothing that is not on the disk
_FIXED = {"version": VERSION, "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": ENTRY.size}
_HINT = "give the folder that DeepSpec's prepare_target_cache.py wrote"


def export(
    outgoing: Outgoing, out: Path, progress: Progress, shard_bytes: int = SHARD_BYTES, sync_bytes: int = SYNC_BYTES
) -> dict[str, Any]:
    """Write a target cache, training samples first, the manifest last; a killed export goes on.

    Returns: num_samples, num_heldout (the last ones), num_shards, target_layer_ids (z-lab's numbers).
    Raises: ExportError for states that do not lead to final:post_norm, which every sample of a cache has.
    """
    outgoing.check_final(FINAL_POST_NORM, "DeepSpec")
    ids = [to_zlab(tap, outgoing.num_blocks) for tap in outgoing.feature_taps]
    stage = outgoing.stage(out, "deepspec", shard_bytes=shard_bytes)
    if stage.state() == "done":
        progress.note("export: done before, kept")
        return stage.summary()
    stage.begin()
    if outgoing.codec.spec.dtype != "bfloat16":
        progress.note(f"export: states in {outgoing.codec.spec.dtype} are rounded to bfloat16, the cache's only dtype")
    cache = _Cache(out, outgoing.hidden_size, shard_bytes, sync_bytes)
    try:
        for _, row in outgoing.told(progress, outgoing.rows, cache.num_samples):
            cache.add(outgoing.sent(row, FINAL_POST_NORM))
        cache.sync()
    finally:
        cache.close()
    shards = [{"shard_id": n, "file_name": _shard_name(n)} for n in range(cache.shard + 1)]
    provenance = outgoing.manifest.provenance
    told = {"target_model_name_or_path": str(provenance.get("model", "")), "chat_template": "", "source": "headrace"}
    head = {**_FIXED, "num_samples": cache.num_samples, "num_shards": len(shards), "target_layer_ids": ids}
    sizes = {"hidden_size": outgoing.hidden_size, "hidden_dtype": "bfloat16"}
    write_json(out / MANIFEST, {**head, **sizes, "shards": shards, **told})
    summary = {
        "num_samples": cache.num_samples,
        "num_heldout": outgoing.num_heldout,
        "num_shards": len(shards),
        "target_layer_ids": ids,
    }
    stage.finish(summary)
    return summary


class _Cache:
    """Shards and index that grow together; what the index does not name is cut off when it is opened again."""

    def __init__(self, out: Path, hidden_size: int, shard_bytes: int, sync_bytes: int) -> None:
        self._out, self._shard_bytes, self._sync_bytes = out, shard_bytes, sync_bytes
        self._index = open(out / INDEX, "ab+")  # noqa: SIM115 (closed by close)
        whole = self._index.tell() // ENTRY.size
        self._index.truncate(whole * ENTRY.size)
        self.num_samples, self.shard, self._end = whole, 0, 0
        if whole:
            self._index.seek((whole - 1) * ENTRY.size)
            _, self.shard, tokens, *offsets = ENTRY.unpack(self._index.read(ENTRY.size))
            self._end = offsets[-1] + tokens * hidden_size * 2
        self._pending: list[bytes] = []
        self._unsynced = 0
        self._file: BinaryIO = self._open(self._end)

    def add(self, sent: Sent) -> None:
        assert sent.final_TH is not None
        ids = sent.sample.input_ids.astype("<i4").tobytes()
        ones = np.ones(sent.sample.num_tokens, np.uint8).tobytes()
        mask = sent.sample.loss_mask.astype(np.uint8).tobytes()
        parts = [ids, ones, mask, _bytes(sent.features_TLH), _bytes(sent.final_TH)]
        size = sum(map(len, parts))
        if self._end and self._end + size > self._shard_bytes:
            self.sync()
            self._file.close()
            self.shard, self._end = self.shard + 1, 0
            self._file = self._open(0)
        offsets = np.cumsum([self._end, *map(len, parts[:-1])]).tolist()
        self._file.write(b"".join(parts))
        self._pending.append(ENTRY.pack(self.num_samples, self.shard, sent.sample.num_tokens, *offsets))
        self._end, self._unsynced, self.num_samples = self._end + size, self._unsynced + size, self.num_samples + 1
        if self._unsynced >= self._sync_bytes:
            self.sync()

    def sync(self) -> None:
        """Make samples durable, then name them in the index."""
        _flush(self._file)
        self._index.write(b"".join(self._pending))
        _flush(self._index)
        self._pending, self._unsynced = [], 0

    def close(self) -> None:
        self._file.close()
        self._index.close()

    def _open(self, end: int) -> BinaryIO:
        path = self._out / _shard_name(self.shard)
        file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        file.truncate(end)
        file.seek(end)
        fsync_folder(self._out)
        return file


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes(states: torch.Tensor) -> bytes:
    return states.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


class DeepspecFolder:
    """A target cache, its index checked against its shards: implements `incoming.Peer`."""

    kind = "deepspec"
    has_final = True
    dtype = "bfloat16"

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigError for another version or dtype, shards that are short, and an index that does not fit."""
        told = read_json(folder / MANIFEST, _HINT)
        wrong = {
            key: told.get(key)
            for key, value in {**_FIXED, "hidden_dtype": self.dtype}.items()
            if told.get(key) != value
        }
        if wrong:
            raise ConfigError(f"{_FIXED} and hidden_dtype {self.dtype} in {folder / MANIFEST}", str(wrong), _HINT)
        try:
            self.hidden_size = int(told["hidden_size"])
            self.listed: tuple[int, ...] | None = tuple(int(number) for number in told["target_layer_ids"])
            names = {int(shard["shard_id"]): str(shard["file_name"]) for shard in told["shards"]}
            count = int(told["num_samples"])
            content = (folder / INDEX).read_bytes()
            self._shards = [np.memmap(folder / names[n], np.uint8, "r") for n in range(len(names))]
        except (KeyError, TypeError, ValueError, OSError) as exc:
            raise ConfigError(f"a whole target cache in {folder}", f"{type(exc).__name__}: {exc}", _HINT) from exc
        self.num_slots = len(self.listed)
        if not self.num_slots or self.hidden_size < 1 or len(content) != count * ENTRY.size:
            found = f"{len(content)} bytes, {self.num_slots} layers, width {self.hidden_size}"
            raise ConfigError(f"{count} index records of {ENTRY.size} bytes in {folder / INDEX}", found, _HINT)
        self._folder = folder
        self._entries = list(ENTRY.iter_unpack(content))
        for number in range(len(self)):
            self._check(number)

    def __len__(self) -> int:
        return len(self._entries)

    def where(self, number: int) -> str:
        """Its number in the cache."""
        return f"sample {number} of {self._folder}"

    def sample(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Ids and mask."""
        _, shard, tokens, ids, _, mask, _, _ = self._entries[number]
        found = self._shards[shard][ids : ids + 4 * tokens].tobytes()
        own = self._shards[shard][mask : mask + tokens].tobytes()
        return np.frombuffer(found, "<i4").astype(np.int32), np.frombuffer(own, np.uint8)

    def states(self, number: int) -> torch.Tensor:
        """[T, slots, H], the last state as the last slot."""
        _, shard, tokens, _, _, _, states, last = self._entries[number]
        parts = []
        for offset, slots in ((states, self.num_slots), (last, 1)):
            size = tokens * slots * self.hidden_size * 2
            content = bytearray(self._shards[shard][offset : offset + size].tobytes())
            parts.append(torch.frombuffer(content, dtype=torch.bfloat16).view(tokens, slots, self.hidden_size))
        return torch.cat(parts, 1)

    def _check(self, number: int) -> None:
        sample, shard, tokens, *offsets = self._entries[number]
        wide = tokens * self.hidden_size * 2
        sizes = (4 * tokens, tokens, tokens, wide * self.num_slots, wide)
        end = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
        if sample != number or tokens < 1 or shard >= len(self._shards) or end > len(self._shards[shard]):
            found = f"sample {sample}, shard {shard}, {tokens} tokens up to byte {end}"
            raise ConfigError(f"record {number} of {self._folder / INDEX} within its shard", found, _HINT)
