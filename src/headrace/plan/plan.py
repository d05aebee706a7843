"""One plan, from inputs to recommendation.

In: `PlanInputs`. Out: a `Plan`: sizes, rates, times, what fits, every option with its cost, and what to do. Reads files
(a config.json, a prepared set, chats, the catalogue) and nothing else; imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.codec.spec import gentlest, is_auto
from headrace.errors import PlanError
from headrace.plan import arithmetic
from headrace.plan.arithmetic import BreakEven, Fit
from headrace.plan.basis import Basis, read_basis
from headrace.plan.catalogue import Catalogue, Devices
from headrace.plan.codecs import CodecSize, codec_size, default_codecs, framing_bytes
from headrace.plan.drafter import DrafterSize, with_features
from headrace.plan.geometry import Geometry
from headrace.plan.inputs import PlanInputs
from headrace.plan.options import WAYS, Option, Placement, Situation, evaluate_option
from headrace.plan.quantity import Figure, parse_bytes
from headrace.plan.recommend import Recommendation, recommend
from headrace.plan.tokens import TokenCount
from headrace.taps import Tap


@dataclass(frozen=True)
class Site:
    """GPUs at one placement, with what fits and how fast they are there."""

    placement: Placement
    capture: Devices
    train: Devices
    target_fit: Fit
    drafter_fit: Fit
    prefill: Figure | None
    training: Figure | None
    together: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that a plan says. `figures` by name, in the order people read them."""

    inputs: PlanInputs
    catalogue: Catalogue
    target: Geometry
    taps: tuple[Tap, ...]
    tokens: TokenCount
    codec: CodecSize
    codecs: tuple[CodecSize, ...]
    drafter: DrafterSize
    anchors: float
    sites: tuple[Site, ...]
    figures: dict[str, Figure]
    sizes: dict[str, Figure]
    options: tuple[Option, ...]
    break_even: BreakEven
    recommendation: Recommendation
    notes: tuple[str, ...]

    def of_codec(self, name: str) -> tuple[Option, ...]:
        """The options of one codec."""
        return tuple(o for o in self.options if o.codec == name)


def make_plan(inputs: PlanInputs) -> Plan:
    """Compute a plan. Raises: PlanError saying what is missing, unknown or out of range, and what is known."""
    try:
        return _computed(inputs)
    except ArithmeticError as exc:
        hint = "look for a zero, or a number far too large, in the target's config.json and in the catalogue"
        raise PlanError("sizes and rates that can be computed with", str(exc), hint) from exc


def _computed(inputs: PlanInputs) -> Plan:
    basis = read_basis(inputs)
    names = inputs.codecs or list(default_codecs(basis.target.hidden_size))
    width = (len(basis.taps), basis.target.hidden_size, inputs.dtype)
    codec = codec_size(_codec_name(inputs, basis), *width)
    codecs = tuple({c.name: c for c in (*(codec_size(n, *width) for n in names), codec)}.values())
    sites_of = {c.name: _sites(basis, c) for c in codecs}  # a narrow codec makes a smaller fc, which may fit
    sites = sites_of[codec.name]
    sizes = {c.name: _stored(basis.tokens, c) for c in codecs}
    options = tuple(
        evaluate_option(way, situation, inputs.max_hours, inputs.max_usd)
        for c in codecs
        for site in sites_of[c.name]
        for situation in [_situation(basis, site, c, sizes[c.name])]
        for way in WAYS
    )
    figures = _figures(basis, codec, sizes[codec.name], sites)
    return Plan(
        inputs=inputs,
        catalogue=basis.catalogue,
        target=basis.target,
        taps=basis.taps,
        tokens=basis.tokens,
        codec=codec,
        codecs=codecs,
        drafter=with_features(basis.drafter, codec.num_features),
        anchors=basis.anchors,
        sites=sites,
        figures=figures,
        sizes=sizes,
        options=options,
        break_even=_break_even(basis, sites, sizes[codec.name]),
        recommendation=recommend(basis, codec, codecs, sizes, sites[-1].train, options),
        notes=(*basis.notes, f"codec auto is {codec.setting}") if is_auto(inputs.codec) else basis.notes,
    )


def _codec_name(inputs: PlanInputs, basis: Basis) -> str:
    """The codec that is named; of `auto` the one that a capture would choose. Raises: PlanError when none fits."""
    if not is_auto(inputs.codec):
        return inputs.codec
    room = inputs.store_bytes
    if room is None:
        if inputs.disk_budget is None:
            hint = "set store.max_bytes in the run file, or give --disk-budget"
            raise PlanError("room for the store, with codec auto", "none", hint)
        room = int(parse_bytes(inputs.disk_budget))
    width = (len(basis.taps), basis.target.hidden_size, inputs.dtype)
    name, size, fits = gentlest(width[1], room, lambda one: _stored(basis.tokens, codec_size(one, *width)).value)
    if fits:
        return name
    hint = "more room, fewer samples, or a smaller latent by name"
    raise PlanError(f"states within {room:,} bytes", f"{size:,.0f} by {name}, the smallest that auto takes", hint)


def _sites(basis: Basis, codec: CodecSize) -> tuple[Site, ...]:
    """The placements there are: apart if there are two sets of GPUs, and in turns on those that train."""
    together = basis.train or basis.capture
    sites = [_site(basis, codec, "in turns", together, together)]
    if basis.train is not None:
        sites.insert(0, _site(basis, codec, "apart", basis.capture, basis.train))
    return tuple(sites)


def _site(basis: Basis, codec: CodecSize, placement: Placement, capture: Devices, train: Devices) -> Site:
    inputs, assumed = basis.inputs, basis.catalogue.assumptions
    drafter = with_features(basis.drafter, codec.num_features)
    target_fit = arithmetic.target_fit(basis.target, inputs.target_dtype, capture, assumed)
    drafter_fit = arithmetic.drafter_fit(drafter, basis.tokens.longest, basis.anchors, train, assumed)
    together: tuple[str, ...] = ()
    if target_fit.usable_bytes is not None and target_fit.fits and drafter_fit.fits:
        share = target_fit.needed.value / target_fit.cards
        if share + drafter_fit.needed.value > target_fit.usable_bytes:
            together = ("target and trainer do not fit on one card together",)
    return Site(
        placement=placement,
        capture=capture,
        train=train,
        target_fit=target_fit,
        drafter_fit=drafter_fit,
        prefill=_prefill(basis, capture, target_fit),
        training=_training(basis, drafter, train),
        together=together,
    )


def _prefill(basis: Basis, capture: Devices, fit: Fit) -> Figure | None:
    measured = basis.inputs.measured
    if measured is not None and measured.capture_tokens_s is not None:
        return Figure(measured.capture_tokens_s, "tokens/s", f"measured on {measured.machine}, {measured.date}")
    if not fit.fits:
        return None
    return arithmetic.prefill_rate(basis.target, basis.tokens.mean, basis.inputs.target_dtype, capture, fit.cards)


def _training(basis: Basis, drafter: DrafterSize, train: Devices) -> Figure | None:
    measured = basis.inputs.measured
    if measured is not None and measured.train_tokens_s is not None:
        return Figure(measured.train_tokens_s, "tokens/s", f"measured on {measured.machine}, {measured.date}")
    if train.gpu is None:
        return None
    return arithmetic.train_rate(drafter, basis.tokens, basis.anchors, train, basis.catalogue.assumptions)


def _stored(tokens: TokenCount, codec: CodecSize) -> Figure:
    payload = arithmetic.total_bytes(tokens.num_samples, tokens.mean, codec.value)
    framing = framing_bytes(tokens.num_samples, tokens.num_tokens, codec.value)
    return Figure(
        payload.value + framing.value, "B", f"{payload.formula} + {framing.formula}", codec.bytes_per_token.modelled
    )


def _situation(basis: Basis, site: Site, codec: CodecSize, size: Figure) -> Situation:
    inputs, tokens, disk = basis.inputs, basis.tokens, basis.catalogue.disk(basis.inputs.disk)
    apart = site.placement == "apart"
    link_s = size.value / basis.catalogue.link_bytes_s(inputs.link) if apart and inputs.link is not None else 0.0
    blocked = []
    if site.prefill is None:
        blocked.append(f"the target does not fit on {site.capture} ({site.target_fit.text()})")
    if not site.drafter_fit.fits:
        blocked.append(f"training does not fit on {site.train} ({site.drafter_fit.text()})")
    measured = inputs.measured
    return Situation(
        codec=codec.name,
        placement=site.placement,
        epochs=inputs.epochs,
        size_bytes=size.value,
        disk_bytes=_disk_room(inputs, basis.catalogue),
        ram_bytes=parse_bytes(inputs.ram_budget),
        prefill_s=tokens.num_tokens / site.prefill.value if site.prefill else math.inf,
        link_s=link_s,
        train_s=_train_tokens(tokens) / site.training.value if site.training else math.inf,
        read_s=size.value / (disk.read_gb_s.value * 1e9),
        capture_usd_h=site.capture.usd_per_hour,
        train_usd_h=site.train.usd_per_hour,
        keep_usd=_keep_usd(inputs, basis.catalogue, size.value),
        capture_fixed_s=measured.capture_fixed_s if measured else 0.0,
        train_fixed_s=measured.train_fixed_s if measured else 0.0,
        blocked=tuple(blocked),
        blocked_together=site.together,
    )


def _train_tokens(tokens: TokenCount) -> float:
    return tokens.num_tokens * (1 - tokens.heldout_share)


def _disk_room(inputs: PlanInputs, catalogue: Catalogue) -> float:
    if inputs.disk_budget is None:
        return math.inf
    return parse_bytes(inputs.disk_budget) * (1 - catalogue.assumptions.disk_reserve_share.value)


def _keep_usd(inputs: PlanInputs, catalogue: Catalogue, size_bytes: float) -> float:
    """Price of keeping everything: rent for the months planned, or a disk of that size unless one is there already."""
    disk = catalogue.disk(inputs.disk)
    if disk.usd_per_gb_month is not None:
        return size_bytes / 1e9 * disk.usd_per_gb_month.value * inputs.months
    if inputs.disk_budget is not None or disk.usd_per_tb is None:
        return 0.0
    return size_bytes / 1e12 * disk.usd_per_tb.value


def _break_even(basis: Basis, sites: Sequence[Site], size: Figure) -> BreakEven:
    site = next((s for s in sites if s.prefill is not None), None)
    disk = basis.catalogue.disk(basis.inputs.disk)
    month = None if disk.usd_per_gb_month is None else size.value / 1e9 * disk.usd_per_gb_month.value
    if site is None or site.prefill is None or site.capture.usd_per_hour is None:
        return BreakEven(None, None, None, None)
    hours = basis.tokens.num_tokens / site.prefill.value / 3600
    return arithmetic.break_even(
        hours * site.capture.usd_per_hour, _keep_usd(basis.inputs, basis.catalogue, size.value), month
    )


def _figures(basis: Basis, codec: CodecSize, size: Figure, sites: Sequence[Site]) -> dict[str, Figure]:
    tokens, inputs, site = basis.tokens, basis.inputs, sites[0]
    figures = {
        "bytes_per_token": codec.bytes_per_token,
        "bytes_per_sample": Figure(codec.value * tokens.mean, "B", f"{codec.value:,.6g} B x {tokens.mean:,.6g} tokens"),
        "total_bytes": arithmetic.total_bytes(tokens.num_samples, tokens.mean, codec.value),
        "stored_bytes": size,
        "link_bytes_s_per_1000_tokens_s": arithmetic.link_needed(1000, codec.value),
    }
    if inputs.link is not None:
        figures["link_tokens_s"] = arithmetic.link_tokens_s(basis.catalogue.link_bytes_s(inputs.link), codec.value)
    if site.prefill is not None:
        figures["capture_tokens_s"] = site.prefill
        figures["capture_s"] = _seconds(
            tokens.num_tokens, site.prefill, inputs.measured.capture_fixed_s if inputs.measured else 0
        )
    figures.update(_decode_figures(basis, site))
    if site.training is not None:
        figures["train_tokens"] = Figure(
            _train_tokens(tokens) * inputs.epochs,
            "tokens",
            f"{_train_tokens(tokens):,.0f} tokens that are not held out x {inputs.epochs} epochs",
        )
        figures["train_tokens_s"] = site.training
        figures["train_link_bytes_s"] = arithmetic.link_needed(site.training.value, codec.value)
        fixed = inputs.measured.train_fixed_s if inputs.measured else 0
        figures["train_s"] = _seconds(_train_tokens(tokens) * inputs.epochs, site.training, fixed)
    drafter = with_features(basis.drafter, codec.num_features)
    figures["target_bytes"] = arithmetic.weight_bytes(basis.target, inputs.target_dtype)
    figures["drafter_params"] = Figure(
        drafter.params,
        "parameters",
        f"{drafter.num_layers} layers x {drafter.layer_params / 1e6:,.1f} M"
        f" + {drafter.fc_params / 1e6:,.1f} M in fc + norms",
    )
    figures["trainer_gpu_bytes"] = site.drafter_fit.needed
    figures["trainer_ram_bytes"] = arithmetic.trainer_ram(tokens, codec.value, codec.num_features, inputs.read_ahead)
    figures["move_bytes"] = arithmetic.move_bytes(4 * tokens.num_tokens, basis.drafter.params)
    return figures


def _decode_figures(basis: Basis, site: Site) -> dict[str, Figure]:
    tokens, inputs, measured = basis.tokens, basis.inputs, basis.inputs.measured
    if tokens.answer_tokens is None:
        return {}
    if inputs.decode_tokens_s is not None:
        rate = Figure(
            inputs.decode_tokens_s * inputs.num_streams,
            "tokens/s",
            f"{inputs.decode_tokens_s:g} x {inputs.num_streams} streams, as given",
        )
    elif measured is not None and measured.decode_tokens_s is not None:
        rate = Figure(measured.decode_tokens_s, "tokens/s", f"measured on {measured.machine}, {measured.date}")
    elif site.capture.gpu is not None and site.target_fit.fits:
        rate = arithmetic.decode_rate(
            basis.target, tokens, inputs.target_dtype, site.capture, site.target_fit, basis.catalogue.assumptions
        )
    else:
        return {}
    return {
        "decode_tokens_s": rate,
        "decode_s": replace(arithmetic.decode_time(tokens.answer_tokens, rate.value), modelled=rate.modelled),
    }


def _seconds(num_tokens: float, rate: Figure, fixed_s: float) -> Figure:
    formula = f"{num_tokens:,.0f} tokens / {rate.value:,.6g} tokens/s" + (f" + {fixed_s:g} s" if fixed_s else "")
    return Figure(num_tokens / rate.value + fixed_s, "s", formula, rate.modelled)
