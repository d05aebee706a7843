"""DeepSpec's target cache, beside a reader and a writer made from the description of the format alone."""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import RunFolder
from headrace.errors import ConfigError, ExportError
from headrace.interchange import deepspec
from headrace.interchange.incoming import Said
from headrace.interchange.outgoing import Outgoing
from headrace.interchange.peers import export_run, import_run
from headrace.prepare.model_files import load_config
from headrace.progress import Silent
from headrace.target.head import load_head
from tests.interchange.runs import HELDOUT, LENGTHS, same_states, states_of

Sample = dict[str, np.ndarray[Any, Any]]


def read_cache(folder: Path) -> list[Sample]:
    """By the description: 56 bytes a sample, `<QIIQQQQQ`, and five raw arrays at its offsets."""
    told = json.loads((folder / "manifest.json").read_text())
    assert (told["version"], told["index_record_size"]) == (2, 56)
    assert (told["hidden_dtype"], told["token_dtype"], told["mask_dtype"]) == ("bfloat16", "int32", "uint8")
    assert told["target_layer_ids"] == sorted(told["target_layer_ids"])
    assert [shard["shard_id"] for shard in told["shards"]] == list(range(told["num_shards"]))
    layers, width = len(told["target_layer_ids"]), told["hidden_size"]
    index = (folder / "samples.idx").read_bytes()
    assert len(index) == 56 * told["num_samples"]
    found = []
    for number in range(told["num_samples"]):
        sample, shard, length, *offsets = struct.unpack_from("<QIIQQQQQ", index, 56 * number)
        assert sample == number
        with open(folder / told["shards"][shard]["file_name"], "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        kinds = [("<i4", 1), ("u1", 1), ("u1", 1), ("<u2", layers * width), ("<u2", width)]
        names = ("input_ids", "attention_mask", "loss_mask", "states", "last")
        found.append(
            {
                name: np.frombuffer(content, kind, length * each, offset).copy()
                for name, (kind, each), offset in zip(names, kinds, offsets, strict=True)
            }
        )
    return found


def write_cache(folder: Path, samples: list[Sample], layer_ids: list[int], width: int) -> None:
    """As their writer lays it out, on a single shard."""
    folder.mkdir()
    body, index = b"", b""
    for number, sample in enumerate(samples):
        offsets = []
        for name in ("input_ids", "attention_mask", "loss_mask", "states", "last"):
            offsets.append(len(body))
            body += sample[name].tobytes()
        index += struct.pack("<QIIQQQQQ", number, 0, len(sample["input_ids"]), *offsets)
    (folder / "shard-00000.bin").write_bytes(body)
    (folder / "samples.idx").write_bytes(index)
    told = {
        "version": 2,
        "num_samples": len(samples),
        "num_shards": 1,
        "target_layer_ids": layer_ids,
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": width,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
    }
    (folder / "manifest.json").write_text(json.dumps(told, sort_keys=True))


def bits(states: torch.Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = states.contiguous().view(torch.int16).numpy().view("<u2").reshape(-1)
    return found


def test_an_independent_reader_gives_the_same_numbers(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    summary = export_run("deepspec", run, tmp_path / "out", Silent(), target=tiny)
    assert summary["target_layer_ids"] == [0, 2]
    assert summary["num_heldout"] == len(HELDOUT)
    outgoing, states, head = Outgoing(run), states_of(run), load_head(tiny, load_config(tiny))
    found = read_cache(tmp_path / "out")
    assert len(found) == len(LENGTHS)
    for row, own in zip(outgoing.rows, found, strict=True):
        sample = outgoing.prepared.sample(row)
        expected = states[sample.id]
        assert np.array_equal(own["input_ids"], sample.input_ids)
        assert np.array_equal(own["loss_mask"], sample.loss_mask)
        assert own["attention_mask"].all()
        assert np.array_equal(own["states"], bits(expected[:, :-1]))
        assert np.array_equal(own["last"], bits(head.normed(expected[:, -1]).bfloat16()))


def test_an_independent_writer_s_cache_comes_in_with_the_same_bits(
    run_normed: RunFolder, tiny: Path, tmp_path: Path
) -> None:
    outgoing, states = Outgoing(run_normed), states_of(run_normed)
    samples = []
    for row in outgoing.rows:
        sample = outgoing.prepared.sample(row)
        own = states[sample.id]
        parts = {"input_ids": sample.input_ids, "attention_mask": np.ones(len(own), np.uint8)}
        samples.append({**parts, "loss_mask": sample.loss_mask, "states": bits(own[:, :-1]), "last": bits(own[:, -1])})
    write_cache(tmp_path / "cache", samples, [0, 2], 32)
    to = RunFolder(tmp_path / "to")
    found = import_run("deepspec", tmp_path / "cache", to, Said(tiny, "zlab", "post_norm"), Silent())
    assert found["taps"] == ["after_block:0", "after_block:2", "final:post_norm"]
    assert same_states(states_of(to), states)
    back = tmp_path / "again"
    export_run("deepspec", to, back, Silent())
    for a, b in zip(sorted(samples, key=str), sorted(read_cache(back), key=str), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)


def test_shards_are_cut_and_a_killed_export_goes_on(run_normed: RunFolder, tmp_path: Path) -> None:
    outgoing = Outgoing(run_normed)
    whole = tmp_path / "whole"
    summary = deepspec.export(outgoing, whole, Silent(), shard_bytes=6000, sync_bytes=1000)
    assert summary["num_shards"] > 3
    expected = read_cache(whole)
    names = ["manifest.json", "samples.idx", *(path.name for path in whole.glob("shard-*"))]
    for kept in range(len(LENGTHS)):
        out = tmp_path / f"killed-{kept}"
        out.mkdir()
        stage = json.loads((whole / "stage.json").read_text())
        (out / "stage.json").write_text(json.dumps({**stage, "finished": False, "summary": {}}))
        index = (whole / "samples.idx").read_bytes()
        (out / "samples.idx").write_bytes(index[: 56 * kept] + index[56 * kept : 56 * kept + 20])
        for path in whole.glob("shard-*"):  # more reached the disk than the index names, and some of it is garbage
            (out / path.name).write_bytes(path.read_bytes() if kept else b"\xff" * 100)
        last = struct.unpack_from("<QIIQQQQQ", index, 56 * (kept - 1))[1] if kept else 0
        with open(out / f"shard-{last:05d}.bin", "ab") as file:
            file.write(b"\xff" * 999)
        deepspec.export(outgoing, out, Silent(), shard_bytes=6000, sync_bytes=1000)
        assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)
    assert len(expected) == len(LENGTHS)


def test_states_that_lead_to_no_normed_state_are_refused(
    run: RunFolder, run_without_final: RunFolder, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="--target"):
        export_run("deepspec", run, tmp_path / "out", Silent())
    with pytest.raises(ExportError, match="no last state"):
        export_run("deepspec", run_without_final, tmp_path / "out", Silent(), target=tiny)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def cache(run: RunFolder, tiny: Path, tmp_path: Path) -> Path:
    export_run("deepspec", run, tmp_path / "out", Silent(), target=tiny)
    return tmp_path / "out"


def taken(cache: Path, tiny: Path, taps: str | None = "zlab", final: str | None = "post_norm") -> None:
    to = RunFolder(cache.parent / "to")
    try:
        import_run("deepspec", cache, to, Said(tiny, taps, final), Silent())
    except ConfigError:
        assert not to.root.exists()
        raise


def test_the_convention_of_its_numbers_is_said_not_guessed(cache: Path, tiny: Path) -> None:
    for taps, final, word in [
        (None, "post_norm", "numbers \\[0, 2\\]"),
        ("zlab", None, "--final"),
        ("after_block:1,after_block:3", "post_norm", "z-lab"),
        ("zlab:1,3", "post_norm", "list"),
    ]:
        with pytest.raises(ConfigError, match=word):
            taken(cache, tiny, taps, final)
    taken(cache, tiny)


def changed(cache: Path, **fields: Any) -> None:
    told = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**told, **fields}))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"version": 1}, "version"),
        ({"hidden_dtype": "float8_e4m3fn"}, "hidden_dtype"),
        ({"hidden_size": 16}, "width 32"),
        ({"num_samples": 5}, "5 index records"),
        ({"target_layer_ids": []}, "0 layers"),
        ({"shards": [{"shard_id": 0, "file_name": "shard-00009.bin"}]}, "00009"),
    ],
)
def test_another_manifest_is_refused(fields: dict[str, Any], word: str, cache: Path, tiny: Path) -> None:
    changed(cache, **fields)
    with pytest.raises(ConfigError, match=word):
        taken(cache, tiny)


def test_an_index_beyond_its_shard_is_refused(cache: Path, tiny: Path) -> None:
    shard = cache / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="record 7"):
        taken(cache, tiny)
    index = bytearray((cache / "samples.idx").read_bytes())
    struct.pack_into("<Q", index, 56 * 2, 9)
    (cache / "samples.idx").write_bytes(index)
    with pytest.raises(ConfigError, match="record 2"):
        taken(cache, tiny)


def test_float32_states_are_rounded_and_it_is_said(tiny: Path, tmp_path: Path) -> None:
    from tests.interchange.runs import captured

    notes: list[str] = []

    class Noting(Silent):
        def note(self, message: str) -> None:
            notes.append(message)

    run = captured(tiny, tmp_path / "run", dtype="float32", lengths=(6, 9), heldout=())
    export_run("deepspec", run, tmp_path / "out", Noting(), target=tiny)
    assert any("rounded to bfloat16" in note for note in notes)
    outgoing, states = Outgoing(run), states_of(run)
    own = states[outgoing.prepared.sample_id(0)]
    assert np.array_equal(read_cache(tmp_path / "out")[0]["states"], bits(own[:, :-1].bfloat16()))
