"""A raw slice: a few samples of a run captured as they are, and the codec that the run is captured with.

In: a run file, its prepared set and a target. Out: `slice/`, a small run folder with raw states of training and
held-out rows, all sources in turn; and, where `capture.codec` is a latent by its short name, `codec/`, fitted on that
slice; where it is `auto`, the gentlest codec whose store fits `store.max_bytes`. Either is made once and kept.
"""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.calibrate import Wish, fit_codec, in_turn
from headrace.capture.capture import capture, capture_taps
from headrace.codec.spec import SPEC_NAME, gentlest, is_auto, is_latent, short_spec
from headrace.config import RunFile, RunFolder
from headrace.errors import ConfigError
from headrace.files import Stage
from headrace.prepare.prepared import PreparedSet, drafts_of, write_prepared
from headrace.progress import Progress
from headrace.store.budget import expected_bytes
from headrace.target.base import Target

HELDOUT_SHARE = 0.1  # of a slice's tokens, for judging


def capture_slice(cfg: RunFile, folder: RunFolder, target: Target, max_tokens: int, progress: Progress) -> RunFolder:
    """Capture about `max_tokens` tokens raw into `slice/` of the run's folder; a slice that is done is kept.

    Raises: what a capture raises; ConfigError for a slice of other settings.
    """
    prepared = PreparedSet.open(folder.prepared)
    part = RunFolder(folder.root / "slice")
    rows = _rows(prepared, max_tokens)
    # Its own fingerprint: states of a slice are no states of the run.
    fingerprint = f"{prepared.fingerprint} rows {len(rows)}"
    if not (part.prepared / "manifest.json").is_file():
        write_prepared(part.prepared, drafts_of(prepared, rows), {"fingerprint": fingerprint})
    here = cfg.model_copy(update={"store": cfg.store.model_copy(update={"at": None})})  # an address holds one store
    capture(with_setting(here, "raw"), part, target, progress, lent=folder)
    return part


def _rows(prepared: PreparedSet, max_tokens: int) -> list[int]:
    """Training rows, and held-out ones for a tenth of the tokens, all sources in turn."""
    held = in_turn(prepared, np.flatnonzero(prepared.heldout).tolist(), int(HELDOUT_SHARE * max_tokens))
    trained = in_turn(prepared, np.flatnonzero(~np.asarray(prepared.heldout, dtype=bool)).tolist(), max_tokens)
    return sorted({*held, *trained})


def with_codec(cfg: RunFile, folder: RunFolder, target: Callable[[], Target], progress: Progress) -> RunFile:
    """The run file with a `capture.codec` that can encode: `auto` chosen, a latent fitted.

    Args: target: gives the target, which is not needed where the codec is chosen and fitted already.
    Raises: ConfigError for `auto` without `store.max_bytes` or with too few; CodecError as a fit does.
    """
    if is_auto(cfg.capture.codec):
        cfg = chosen_codec(cfg, folder, target(), progress)
    if not is_latent(cfg.capture.codec):
        return cfg
    return with_setting(cfg, str(_fitted(cfg, folder, cfg.capture.codec.strip().lower(), target, progress)))


def chosen_codec(cfg: RunFile, folder: RunFolder, target: Target, progress: Progress) -> RunFile:
    """The run file with `auto` replaced by the gentlest codec that fits. Raises: ConfigError when none does."""
    if not is_auto(cfg.capture.codec):
        return cfg
    name = _chosen(cfg, folder, target)
    progress.note(f"codec: auto is {name}")
    return with_setting(cfg, name)


def with_setting(cfg: RunFile, codec: str) -> RunFile:
    """The run file with another `capture.codec`."""
    return cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"codec": codec})})


def _chosen(cfg: RunFile, folder: RunFolder, target: Target) -> str:
    """The first of the ladder whose store fits."""
    if cfg.store.max_bytes is None:
        raise ConfigError("store.max_bytes with capture.codec auto", "none", "say how many bytes states may take")
    lengths = PreparedSet.open(folder.prepared).lengths.tolist()
    taps, hidden_size = capture_taps(cfg, target.spec.num_blocks), target.spec.hidden_size

    def size_of(name: str) -> int:
        return expected_bytes(lengths, short_spec(name, len(taps), hidden_size, cfg.states_dtype).bytes_per_token())

    name, size, fits = gentlest(hidden_size, cfg.store.max_bytes, size_of)
    if fits:
        return name
    raise ConfigError(
        f"states within store.max_bytes, {cfg.store.max_bytes:,}",
        f"{size:,} bytes by {name}, the smallest that auto takes",
        "raise it, prepare fewer samples, or fit a smaller latent with headrace codec fit",
    )


def _fitted(cfg: RunFile, folder: RunFolder, name: str, target: Callable[[], Target], progress: Progress) -> Any:
    """The folder of the latent, fitted where it is not there."""
    prepared = PreparedSet.open(folder.prepared)
    out = folder.root / "codec"
    made_from = {
        "codec": name,
        "fit_tokens": cfg.capture.fit_tokens,
        "prepared": prepared.fingerprint,
        "target": cfg.target.model,
        "taps": cfg.target.taps or cfg.target.num_taps,
        "dtype": cfg.states_dtype,
    }
    stage = Stage(out, "codec", made_from)
    if stage.state() == "done" and (out / SPEC_NAME).is_file():
        return out
    size, _, bits = name.removeprefix("latent:").partition("x")
    stage.begin()
    part = capture_slice(cfg, folder, target(), cfg.capture.fit_tokens, progress)
    found = fit_codec(part, Wish(int(size), float(bits)), out, progress)
    stage.finish(found)
    shutil.rmtree(part.root)
    progress.note(
        f"codec: {name}, {found['ratio']:g}x smaller than 16-bit states, {found['lost']:.2%} of their energy lost"
    )
    return out
