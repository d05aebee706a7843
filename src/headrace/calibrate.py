"""Fit a codec on states that were captured raw, and say what it would lose.

In: a run's prepared set and its states (raw, lossless or fp8), and, for directions that `fc` reads, an exported
drafter. Out: a folder with `codec.json` and `basis.safetensors`, which `capture.codec` names; and the share of energy
that is lost on held-out samples, by tap and by source. Samples are taken from all sources in turn, training rows to
fit, held-out rows to judge.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from headrace.codec.base import Codec, record_states
from headrace.codec.fit import fit_latent, measure_moments
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.registry import chosen_spec, open_codec, save_codec
from headrace.codec.spec import CodecSpec
from headrace.config import RunFolder
from headrace.drafter.stock import load_stock
from headrace.errors import CodecError
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.store.remote import open_reader, read_ahead

REPORTED_TOKENS = 20_000


@dataclass(frozen=True)
class Wish:
    """What to fit: r directions of so many bits; those that a drafter's fc reads, or the strongest."""

    rank: int
    bits: float
    drafter: Path | None = None
    scheme: Literal["rotate", "water"] = "rotate"
    max_tokens: int = 400_000


def in_turn(prepared: PreparedSet, rows: Iterable[int], max_tokens: int) -> list[int]:
    """Of some rows those that make up about `max_tokens` tokens, one of each source after the other."""
    by_source: dict[str, list[int]] = {}
    for row in rows:
        by_source.setdefault(prepared.sample(row).source, []).append(row)
    turns = itertools.zip_longest(*(by_source[source] for source in sorted(by_source)))
    chosen, num_tokens = [], 0
    for row in itertools.chain.from_iterable(turns):
        if row is not None and num_tokens < max_tokens:
            chosen.append(row)
            num_tokens += int(prepared.lengths[row])
    return chosen


class Slice:
    """Samples of a store, sources in turn, up to a number of tokens; gone through as often as one likes."""

    def __init__(self, folder: RunFolder, heldout: bool, max_tokens: int, at: str | None = None) -> None:
        """Args: at: where the states are, if not in the folder.

        Raises: CodecError when the states are not whole, or none are there.
        """
        self._place = at or folder.states
        self.prepared, self.reader = PreparedSet.open(folder.prepared), open_reader(self._place)
        self.codec = open_codec(self.reader.manifest.codec, folder.states)
        if not self.codec.spec.of_taps:
            raise CodecError("states as they were captured", f"the codec {self.codec.spec.name}", "capture raw")
        eligible = [row for row in np.flatnonzero(self.prepared.heldout == heldout).tolist() if row in self.reader]
        self.rows = in_turn(self.prepared, eligible, max_tokens)
        if not self.rows:
            raise CodecError(f"{'held-out' if heldout else 'training'} rows with states", "none", "capture first")

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Source and states [T, L, H] of each sample, in the dtype they were stored in."""
        samples = map(self.prepared.sample, self.rows)
        for sample, record in read_ahead(self._place, lambda s: self.reader.read(s.row, s.id), samples):
            yield sample.source, record_states(record, self.codec)


def fit_codec(folder: RunFolder, wish: Wish, out: Path, progress: Progress, at: str | None = None) -> dict[str, Any]:
    """Fit, save, and judge on held-out rows.

    Args: at: where the states are, if not in the folder.
    Returns: folder, num_features, bytes_per_token, ratio (to raw), and the figures of `judge`.
    Raises: CodecError as the fit does, and for a drafter of other taps.
    """
    fitted_on = Slice(folder, False, wish.max_tokens, at)
    raw = fitted_on.codec.spec
    progress.note(f"codec: fitting on {len(fitted_on.rows)} samples")
    moments = measure_moments(fitted_on)
    fc_HW = None if wish.drafter is None else _fc(wish.drafter, raw.width)
    told = {"manifest": str(fitted_on.reader.manifest.prepared), "drafter": str(wish.drafter or "")}
    spec, basis = fit_latent(moments, raw, wish.rank, wish.bits, fc_HW, wish.scheme, told=told)
    named = save_codec(spec, basis, out)
    codec = QuantisedCodec(named, basis)
    heldout = Slice(folder, bool(fitted_on.prepared.heldout.any()), REPORTED_TOKENS, at)
    return {
        "folder": str(out),
        "num_features": codec.num_features,
        **_size(named),
        **basis.told,
        **judge(codec, heldout, fc_HW),
    }


def compare_codecs(folder: RunFolder, names: Sequence[str], at: str | None = None) -> list[dict[str, Any]]:
    """`judge` for each of some codecs, by short name or folder, with its bytes.

    Args: at: where the states are, if not in the folder.
    Raises: CodecError for an unknown one.
    """
    states = Slice(folder, True, REPORTED_TOKENS, at)
    raw = states.codec.spec
    found = []
    for name in names:
        spec, fitted = chosen_spec(name, raw.num_taps, raw.hidden_size, raw.dtype)
        found.append({"codec": name, **_size(spec), **judge(open_codec(spec, fitted), states)})
    return found


def _size(spec: CodecSpec) -> dict[str, float]:
    """Bytes of a token, and how many times less than 16-bit states."""
    size = spec.bytes_per_token()
    return {"bytes_per_token": round(size, 1), "ratio": round(spec.width * 2 / size, 2)}


def judge(codec: Codec, states: Slice, fc_HW: torch.Tensor | None = None) -> dict[str, Any]:
    """What a codec loses of samples, quantising included, escaped tokens left out.

    Returns: `lost_by_tap`, `lost_by_source` and `lost` (shares of the energy of taps divided by their RMS), `lost_fc`
    (share of what fc reads, with `fc_HW`), `escaped` (share of tokens), `encode_tokens_s`, `decode_tokens_s`.
    """
    lost_L = energy_L = torch.zeros(codec.spec.num_taps)
    fc_lost = fc_energy = 0.0
    by_source: dict[str, list[float]] = {}
    spent, num_tokens, num_escaped = [0.0, 0.0], 0, 0
    for source, own in states():
        began = time.perf_counter()
        payload = codec.encode(own)
        between = time.perf_counter()
        features_TF = codec.features(payload, len(own))
        spent = [spent[0] + between - began, spent[1] + time.perf_counter() - between]
        away_T = codec.escaped(own) if isinstance(codec, QuantisedCodec) else torch.zeros(len(own), dtype=torch.bool)
        x, back = own[~away_T].float(), codec.reconstruct(features_TF.float())[~away_T]
        scale_L1 = _scale(codec, x)
        lost = ((back - x) * scale_L1).square().sum((0, 2))
        energy = (x * scale_L1).square().sum((0, 2))
        lost_L, energy_L = lost_L + lost, energy_L + energy
        own_sums = by_source.setdefault(source, [0.0, 0.0])
        own_sums[0], own_sums[1] = own_sums[0] + float(lost.sum()), own_sums[1] + float(energy.sum())
        num_tokens, num_escaped = num_tokens + len(own), num_escaped + int(away_T.sum())
        if fc_HW is not None:
            read = x.flatten(1) @ fc_HW.T
            fc_lost += float((read - back.flatten(1) @ fc_HW.T).square().sum())
            fc_energy += float(read.square().sum())
    share_L = lost_L / energy_L
    found: dict[str, Any] = {
        "lost": round(float(lost_L.sum() / energy_L.sum()), 6),
        "lost_by_tap": [round(share, 6) for share in share_L.tolist()],
        "lost_by_source": {source: round(a / b, 6) for source, (a, b) in sorted(by_source.items())},
        "escaped": round(num_escaped / num_tokens, 6),
        "encode_tokens_s": round(num_tokens / spent[0], 1),
        "decode_tokens_s": round(num_tokens / spent[1], 1),
    }
    return found if fc_HW is None else {**found, "lost_fc": round(fc_lost / fc_energy, 6)}


def _scale(codec: Codec, x_TLH: torch.Tensor) -> torch.Tensor:
    """One over each tap's RMS, [L, 1]: of the fit, or of these tokens."""
    if isinstance(codec, QuantisedCodec) and codec.basis is not None:
        return codec.basis.inverse_rms_L[:, None]
    return x_TLH.square().mean((0, 2)).sqrt().clamp(min=1e-12).reciprocal()[:, None]


def _fc(drafter: Path, width: int) -> torch.Tensor:
    """The fc of an exported drafter, over raw taps."""
    fc_HW = load_stock(drafter).fc.weight.detach()
    if fc_HW.shape[1] != width:
        raise CodecError(f"a drafter that reads {width} numbers a token", str(fc_HW.shape[1]), "give one of these taps")
    return fc_HW
