"""What a plan reads before it computes anything.

In: `PlanInputs`. Out: the target's geometry, the tokens, the taps, the drafter, the GPUs and the catalogue, each
checked, with a note on everything that was assumed.
"""

from dataclasses import dataclass, replace

from headrace.errors import PlanError
from headrace.plan import arithmetic
from headrace.plan.catalogue import Catalogue, Devices, load_catalogue, parse_devices
from headrace.plan.drafter import DrafterChoice, DrafterSize, derive_drafter, read_drafter, with_features
from headrace.plan.geometry import Geometry, plain_geometry, read_geometry
from headrace.plan.inputs import PlanInputs, choose_taps
from headrace.plan.tokens import TokenCount, from_chats, from_numbers, from_prepared
from headrace.taps import Tap

_DEFAULT_GPU = "h100-sxm"


@dataclass(frozen=True)
class Basis:
    """What a plan is computed from. `train` is None where the capture GPUs train too, in turns."""

    inputs: PlanInputs
    catalogue: Catalogue
    target: Geometry
    taps: tuple[Tap, ...]
    tokens: TokenCount
    drafter: DrafterSize
    anchors: float
    capture: Devices
    train: Devices | None
    notes: tuple[str, ...]


def read_basis(inputs: PlanInputs) -> Basis:
    """Read and check everything. Raises: PlanError."""
    catalogue = load_catalogue(inputs.catalogue)
    target = _target(inputs)
    tokens = _tokens(inputs)
    items, published = inputs.taps, None
    if inputs.drafter is not None:
        published, numbers = read_drafter(inputs.drafter, 1)
        items = items or [str(n) for n in numbers] or None
    taps, tap_notes = choose_taps(items, inputs.num_taps, target, inputs.final_state)
    num_features = len(taps) * target.hidden_size
    drafter = (
        with_features(published, num_features) if published else derive_drafter(target, num_features, _choice(inputs))
    )
    if drafter.hidden_size != target.hidden_size:
        raise PlanError(
            f"a drafter of the target's hidden size {target.hidden_size}",
            str(drafter.hidden_size),
            "name the drafter of this target",
        )
    capture, train, gpu_notes = _devices(inputs, catalogue)
    anchors = arithmetic.anchors_drawn(inputs.anchors, tokens)
    notes = [*target.notes, *tap_notes, *drafter.notes, *gpu_notes]
    if not tokens.exact:
        notes.append(f"token counts are an estimate: {tokens.origin}")
    if tokens.answer_tokens is None:
        notes.append(
            "how many tokens are answers was not said: decode time is left out, anchors are bounded by all tokens"
        )
    elif anchors < inputs.anchors:
        notes.append(
            f"{inputs.anchors} anchors were asked for; {tokens.mean_answer:,.0f} answer tokens give {anchors:,.0f}"
        )
    return Basis(inputs, catalogue, target, taps, tokens, drafter, anchors, capture, train, tuple(notes))


def _target(inputs: PlanInputs) -> Geometry:
    plain = (inputs.hidden_size, inputs.num_blocks, inputs.params_billion)
    if inputs.model is not None:
        return read_geometry(inputs.model)
    if inputs.hidden_size is None or inputs.num_blocks is None or inputs.params_billion is None:
        raise PlanError(
            "a model, or a hidden size, blocks and parameters",
            f"{plain}",
            "give --model PATH, or --hidden-size, --blocks and --params",
        )
    active = inputs.active_params_billion
    return plain_geometry(
        inputs.hidden_size, inputs.num_blocks, inputs.params_billion * 1e9, None if active is None else active * 1e9
    )


def _tokens(inputs: PlanInputs) -> TokenCount:
    given = [name for name in ("prepared", "chats", "num_samples") if inputs.__dict__[name] is not None]
    if len(given) != 1:
        found = ", ".join(given) or "none of them"
        raise PlanError(
            "one of a prepared set, a file of chats, or a number of samples",
            found,
            "give --prepared, --chats, or --samples with --mean-tokens",
        )
    if inputs.prepared is not None:
        return from_prepared(inputs.prepared)
    if inputs.chats is not None:
        return replace(from_chats(inputs.chats, inputs.model), heldout_share=inputs.heldout_share)
    counted = from_numbers(inputs.num_samples or 0, inputs.mean_tokens, inputs.mean_prompt, inputs.mean_answer)
    return replace(counted, heldout_share=inputs.heldout_share)


def _choice(inputs: PlanInputs) -> DrafterChoice:
    return DrafterChoice(
        num_layers=inputs.num_layers,
        block_size=inputs.block_size,
        intermediate_size=inputs.intermediate_size,
        num_heads=inputs.num_heads,
        num_kv_heads=inputs.num_kv_heads,
        head_dim=inputs.head_dim,
    )


def _devices(inputs: PlanInputs, catalogue: Catalogue) -> tuple[Devices, Devices | None, tuple[str, ...]]:
    """Capture GPUs, training GPUs (None: the same), and what was assumed."""
    capture, train, measured = inputs.capture_gpu, inputs.train_gpu, inputs.measured
    if capture is None and train is None:
        if measured is not None:
            return (
                Devices(measured.machine, 1, None),
                None,
                (f"rates are measured on {measured.machine}, {measured.date}",),
            )
        note = f"no GPU was named: one {_DEFAULT_GPU} captures and one trains"
        default = parse_devices(_DEFAULT_GPU, catalogue)
        return default, default, (note,)
    first = parse_devices(capture or train or "", catalogue)
    second = parse_devices(train, catalogue) if capture is not None and train is not None else None
    return first, second, ()
