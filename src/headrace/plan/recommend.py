"""What to do, why, and the run-file lines that do it.

In: every option, feasible or not. Out: one of them: among those within a tenth of the cheapest, the one whose codec
risks least, and of these the fastest. What this version can do already is chosen apart. Where nothing is possible:
what would be.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.plan import arithmetic
from headrace.plan.basis import Basis
from headrace.plan.catalogue import Devices
from headrace.plan.codecs import CodecSize
from headrace.plan.options import AVAILABLE_WAYS, WAYS, Option
from headrace.plan.quantity import HOUR_S, Figure, bytes_text, money_text, si_text, time_text

NEAR = 1.1  # costs closer than the error of a model do not decide


@dataclass(frozen=True)
class Recommendation:
    """The option to take (None: none is possible), the one this version offers, reasons, and what else would help."""

    best: Option | None
    now: Option | None
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    run_file: str


def recommend(
    basis: Basis,
    codec: CodecSize,
    codecs: Sequence[CodecSize],
    sizes: Mapping[str, Figure],
    train: Devices,
    options: Sequence[Option],
) -> Recommendation:
    """Choose, and say why.

    Args: codec: the one that was asked for; sizes: what a store takes, by codec; train: the GPUs that train.
    """
    known = {c.name: c for c in codecs}
    best = choose(options, known)
    now = choose([o for o in options if o.way in AVAILABLE_WAYS], known)
    if best is None:
        remedies = (*_capture_elsewhere(basis, sizes, options), *_smaller_drafter(basis, train))
        reasons = tuple(dict.fromkeys(reason for o in options for reason in o.blocked))
        return Recommendation(None, None, reasons, remedies, run_lines(basis, None, codec))
    lines = run_lines(basis, now or best, known[(now or best).codec])
    return Recommendation(best, now, _reasons(best, now, options, known), (), lines)


def choose(options: Sequence[Option], sizes: dict[str, CodecSize]) -> Option | None:
    """Cheapest, then gentlest, then fastest; by money if every feasible option has a price, else by time."""
    feasible = [o for o in options if o.feasible]
    if not feasible:
        return None
    priced = all(o.usd is not None for o in feasible)

    def cost(option: Option) -> float:
        return option.usd if priced and option.usd is not None else option.times.wall_s

    least = min(cost(o) for o in feasible)
    near = [o for o in feasible if cost(o) <= NEAR * least]
    gentlest = min(sizes[o.codec].loss for o in near)
    return min(
        (o for o in near if sizes[o.codec].loss == gentlest),
        key=lambda o: (o.times.wall_s, cost(o), -sizes[o.codec].value),
    )


def _reasons(
    best: Option, now: Option | None, options: Sequence[Option], sizes: dict[str, CodecSize]
) -> tuple[str, ...]:
    found = [f"{best.text()}: {best.times.formula}"]
    if best.way == "store":
        found.append(f"{bytes_text(best.kept_bytes)} are kept, and made once instead of in every epoch")
    elif best.way == "cache":
        passes = f"{best.capture_passes:.2f} capture passes"
        found.append(f"{bytes_text(best.kept_bytes)} kept serve {best.saved_share:.1%} of all reads; {passes}")
    else:
        found.append(f"states are made {best.capture_passes:g} times; nothing is kept")
    if best.codec != "raw":
        same = (best.way, best.placement)
        found += [f"with raw states, {o.text()}" for o in options if o.codec == "raw" and (o.way, o.placement) == same]
    for other in WAYS:
        rivals = [o for o in options if o.way == other and o.way != best.way and o.feasible]
        rival = choose(rivals, sizes)
        if rival is not None:
            found.append(f"instead, {rival.text()}")
    codec = sizes[best.codec]
    if codec.loss:
        found.append(f"{codec.name} loses something: {codec.evidence}; prove it on a slice first")
    if now != best:
        planned = f"{best.way} with {codec.name} is planned, not in this version"
        found.append(f"{planned}; until then: {now.text()}" if now else f"{planned}, which can only store raw states")
    return tuple(found)


def _capture_elsewhere(basis: Basis, sizes: Mapping[str, Figure], options: Sequence[Option]) -> tuple[str, ...]:
    """Where one capture pass could be rented, cheapest first; only if the target is what does not fit."""
    if not any("the target does not fit" in reason for o in options for reason in o.blocked):
        return ()
    offers = sorted(offer for name in basis.catalogue.gpus for offer in _offer(basis, name))
    if not offers:
        weights = bytes_text(arithmetic.weight_bytes(basis.target, basis.inputs.target_dtype).value)
        return (f"no single card of the catalogue that has a price holds {weights}: name several",)
    listed = "; ".join(f"{title}: {money_text(usd)}, {hours:.1f} h" for usd, hours, title in offers[:3])
    carried = ", ".join(f"{name} {si_text(size.value)}B" for name, size in sizes.items())
    return (
        f"capture elsewhere, once, and bring the states over. One rented card, one pass: {listed}",
        f"what has to come over and be kept: {carried}",
    )


def _offer(basis: Basis, name: str) -> list[tuple[float, float, str]]:
    """Cost, hours and title of one capture pass on one card; empty if it does not fit or has no price."""
    gpu, dtype = basis.catalogue.gpus[name], basis.inputs.target_dtype
    devices = Devices(name, 1, gpu)
    fit = arithmetic.target_fit(basis.target, dtype, devices, basis.catalogue.assumptions)
    if not fit.fits or gpu.usd_per_hour is None or arithmetic.prefill_gain(gpu, dtype) is None:
        return []
    rate = arithmetic.prefill_rate(basis.target, basis.tokens.mean, dtype, devices, fit.cards)
    hours = basis.tokens.num_tokens / rate.value / HOUR_S
    return [(hours * gpu.usd_per_hour.value, hours, gpu.title)]


def _smaller_drafter(basis: Basis, train: Devices) -> tuple[str, ...]:
    """The deepest drafter, and the most anchors, whose training one card holds; only if training does not fit."""
    assumed, tokens, drafter = basis.catalogue.assumptions, basis.tokens, basis.drafter
    if train.gpu is None or arithmetic.drafter_fit(drafter, tokens.longest, basis.anchors, train, assumed).fits:
        return ()
    width = min(drafter.num_features, drafter.hidden_size)
    for layers in range(drafter.num_layers, 0, -1):
        for anchors in (a for a in (512, 256, 128, 64) if a <= basis.anchors):
            smaller = replace(drafter, num_layers=layers, num_features=width)
            fit = arithmetic.drafter_fit(smaller, tokens.longest, anchors, train, assumed)
            if fit.fits:
                rate = arithmetic.train_rate(smaller, tokens, anchors, train, assumed)
                hours = time_text(basis.inputs.epochs * tokens.num_tokens / rate.value)
                shape = f"{layers} layers, {anchors} anchors, a latent of {width} coordinates"
                return (
                    f"train a smaller drafter here: {shape}: {fit.text()}; {basis.inputs.epochs} epochs take {hours}",
                    f"its memory: {fit.needed.formula}",
                )
    return ("no drafter of this target trains on one of these cards in float32 with AdamW",)


def run_lines(basis: Basis, option: Option | None, codec: CodecSize) -> str:
    """The part of a run file that realises an option; what this version cannot set yet is a comment."""
    inputs, drafter = basis.inputs, basis.drafter
    lines = ["target:"]
    if inputs.model is not None:
        lines.append(f"  model: {json.dumps(inputs.model)}")
    lines.append(f"  taps: {json.dumps([str(tap) for tap in basis.taps])}")
    setting = codec.setting if codec.setting == codec.name else json.dumps(codec.setting)
    lines += ["capture:", f"  codec: {setting}"]
    lines += ["drafter:", f"  num_layers: {drafter.num_layers}", f"  block_size: {drafter.block_size}"]
    lines += [f"  {key}: {drafter.__dict__[key]}" for key in ("intermediate_size", "num_heads", "num_kv_heads")]
    lines += ["train:", f"  epochs: {inputs.epochs}", f"  anchors: {inputs.anchors}"]
    if option is not None and option.way not in AVAILABLE_WAYS:
        lines.append(f"# states by {option.way}: planned")
    return "\n".join(lines) + "\n"
