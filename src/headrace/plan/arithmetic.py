"""The planner's arithmetic: bytes, links, prefill, decoding, training.

In: sizes of target, drafter and data, and figures of the catalogue. Out: figures, each with the formula that made it.
Prefill (capturing given answers) and decoding (writing answers) are two things: they differ by a factor of hundreds.
"""

from dataclasses import dataclass

from headrace.errors import PlanError
from headrace.plan.catalogue import Assumptions, Devices, Gpu
from headrace.plan.drafter import DrafterSize
from headrace.plan.geometry import Geometry
from headrace.plan.quantity import Figure, bytes_text, time_text
from headrace.plan.tokens import TokenCount

# Bytes of a weight; nvfp4 carries one scale byte for every 16 weights.
WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}


def total_bytes(num_samples: float, mean_tokens: float, bytes_per_token: float) -> Figure:
    """Payload of a whole data set."""
    formula = f"{num_samples:,.0f} samples x {mean_tokens:,.6g} tokens x {bytes_per_token:,.6g} B"
    return Figure(num_samples * mean_tokens * bytes_per_token, "B", formula)


def link_tokens_s(link_bytes_s: float, bytes_per_token: float) -> Figure:
    """Tokens whose states a link carries in a second."""
    formula = f"{link_bytes_s / 1e6:,.6g} MB/s / {bytes_per_token:,.6g} B"
    return Figure(link_bytes_s / bytes_per_token, "tokens/s", formula)


def link_needed(tokens_s: float, bytes_per_token: float) -> Figure:
    """Rate at which states of so many tokens a second move."""
    formula = f"{tokens_s:,.6g} tokens/s x {bytes_per_token:,.6g} B"
    return Figure(tokens_s * bytes_per_token, "B/s", formula)


def decode_time(answer_tokens: float, tokens_s: float, num_streams: int = 1) -> Figure:
    """Time to write answers with streams that each write `tokens_s`."""
    if tokens_s <= 0 or num_streams < 1:
        raise PlanError(
            "a positive rate and at least one stream", f"{tokens_s} tokens/s, {num_streams}", "check --decode-rate"
        )
    streams = f" / {num_streams} streams" if num_streams > 1 else ""
    formula = f"{answer_tokens:,.0f} answer tokens / {tokens_s:,.6g} tokens/s{streams}"
    return Figure(answer_tokens / tokens_s / num_streams, "s", formula)


def move_bytes(token_bytes: float, drafter_params: float) -> Figure:
    """What has to move if neither states nor target do: the tokens there, the served drafter back."""
    formula = f"{token_bytes / 1e9:.2f} GB of tokens + {drafter_params / 1e9:.2f} G parameters x 2 B"
    return Figure(token_bytes + 2 * drafter_params, "B", formula)


def weight_bytes(target: Geometry, dtype: str) -> Figure:
    """The target in memory: blocks in `dtype`, embedding and head in bfloat16."""
    rest = target.params - target.block_params
    value = target.block_params * WEIGHT_BYTES[dtype] + 2.0 * rest
    blocks = f"{target.block_params / 1e9:.2f} G in blocks x {WEIGHT_BYTES[dtype]:g} B"
    formula = f"{blocks} + {rest / 1e9:.2f} G in embedding and head x 2 B"
    return Figure(value, "B", formula)


@dataclass(frozen=True)
class Fit:
    """Whether something fits into the memory of a card, or of `cards` cards together."""

    needed: Figure
    usable_bytes: float | None
    cards: int
    fits: bool

    def text(self) -> str:
        """In words."""
        if self.usable_bytes is None:
            return f"{bytes_text(self.needed.value)} needed, memory not known"
        on = "one card" if self.cards == 1 else f"{self.cards} cards"
        room = bytes_text(self.usable_bytes)
        return (
            f"{bytes_text(self.needed.value)} {'fit' if self.fits else 'do not fit'}: {room} usable on each; needs {on}"
        )


def target_fit(target: Geometry, dtype: str, devices: Devices, assumed: Assumptions) -> Fit:
    """Whether the target fits, split over as few cards as hold its weights."""
    needed = weight_bytes(target, dtype)
    usable = _usable(devices, assumed)
    if usable is None:
        return Fit(needed, None, 1, True)
    cards = max(1, -(-int(needed.value) // int(usable)))
    return Fit(needed, usable, cards, cards <= devices.count)


def drafter_fit(drafter: DrafterSize, longest: float, anchors: float, devices: Devices, assumed: Assumptions) -> Fit:
    """Whether one card holds the drafter's training: states of a rank are not split over cards."""
    needed = drafter.train_memory(longest, anchors)
    usable = _usable(devices, assumed)
    return Fit(needed, usable, 1, usable is None or needed.value <= usable)


def _usable(devices: Devices, assumed: Assumptions) -> float | None:
    memory = devices.memory_bytes
    return None if memory is None else memory * assumed.usable_memory_share.value


def prefill_flops(target: Geometry, mean_tokens: float) -> Figure:
    """Work on one token of a forward pass without the head: two for each weight at work, and attention."""
    attention = target.attention_flops(mean_tokens)
    formula = f"2 x {target.active_block_params / 1e9:.2f} G weights at work + {attention / 1e9:.2f} GFLOP of attention"
    return Figure(2.0 * target.active_block_params + attention, "FLOP/token", formula)


def prefill_gain(gpu: Gpu, dtype: str) -> float | None:
    """How much faster than in bfloat16 a quantised target prefills; None where the catalogue does not say."""
    if dtype == "bfloat16":
        return 1.0
    known = {"fp8": gpu.fp8_prefill_gain, "nvfp4": gpu.nvfp4_prefill_gain}[dtype]
    return None if known is None else known.value


def prefill_rate(target: Geometry, mean_tokens: float, dtype: str, devices: Devices, cards: int) -> Figure:
    """Tokens a second of capture, all cards together; cards that do not make up a whole replica stay idle.

    Raises: PlanError where the catalogue does not say how a quantised target runs on this card.
    """
    gpu = devices.gpu
    if gpu is None:
        raise PlanError("a GPU of the catalogue, or measured rates", devices.name, "name a GPU, or use --measure")
    gain = prefill_gain(gpu, dtype)
    if gain is None:
        hint = "measure it, and overlay your figure with --catalogue"
        raise PlanError(f"the gain of {dtype} on {gpu.title} in the catalogue", "none", hint)
    gain_text = "" if dtype == "bfloat16" else f" x {gain:g} ({dtype})"
    busy = devices.count // cards * cards
    work = prefill_flops(target, mean_tokens)
    value = busy * gpu.bf16_tflops.value * 1e12 * gpu.prefill_share.value * gain / work.value
    formula = (
        f"{busy} x {gpu.bf16_tflops.value:g} TFLOP/s x {gpu.prefill_share.value:g}{gain_text}"
        f" / {work.value / 1e9:.2f} GFLOP a token"
    )
    return Figure(value, "tokens/s", formula, gpu.prefill_share.modelled)


def decode_rate(
    target: Geometry, tokens: TokenCount, dtype: str, devices: Devices, fit: Fit, assumed: Assumptions
) -> Figure:
    """Answer tokens a second of all replicas, each answering as many texts at a time as its memory holds.

    A step reads the weights at work and every text's cache once; it is bound by memory rate, or by arithmetic.
    """
    gpu = devices.gpu
    if gpu is None or fit.usable_bytes is None or not fit.fits:
        raise PlanError("a GPU that holds the target", str(devices), "name another GPU, or give --decode-rate")
    cache = target.kv_bytes(tokens.mean)
    room = fit.usable_bytes * fit.cards - fit.needed.value
    most = int(assumed.decode_batch.value)
    batch = max(1, min(most, int(room / cache)) if cache else most)
    share = min(1.0, batch * target.active_params / target.params)
    read = fit.needed.value * share + batch * cache
    rate = fit.cards * gpu.memory_tb_s.value * 1e12 * assumed.decode_bandwidth_share.value
    work = 2.0 * target.active_params * batch / (fit.cards * gpu.bf16_tflops.value * 1e12 * gpu.prefill_share.value)
    step = max(read / rate, work)
    replicas = devices.count // fit.cards
    formula = (
        f"{replicas} replicas x {batch} texts at a time / {step * 1e3:.1f} ms a step"
        f" ({read / 1e9:.1f} GB read, or {work * 1e3:.1f} ms of arithmetic)"
    )
    return Figure(replicas * batch / step, "tokens/s", formula, True)


def anchors_drawn(anchors: int, tokens: TokenCount) -> float:
    """Blocks that a sample gives at most: an anchor and its first slot are answer tokens."""
    mean = tokens.mean_answer if tokens.mean_answer is not None else tokens.mean
    return min(float(anchors), max(1.0, mean - 1))


def train_rate(
    drafter: DrafterSize, tokens: TokenCount, anchors: float, devices: Devices, assumed: Assumptions
) -> Figure:
    """Tokens of training samples a second, all cards together."""
    gpu = devices.gpu
    if gpu is None:
        raise PlanError("a GPU of the catalogue, or measured rates", devices.name, "name a GPU, or use --measure")
    work = drafter.sample_flops(tokens.mean, anchors)
    share = assumed.train_share
    value = devices.count * gpu.bf16_tflops.value * 1e12 * share.value / work.value * tokens.mean
    formula = (
        f"{devices.count} x {gpu.bf16_tflops.value:g} TFLOP/s x {share.value:g} / {work.value / 1e12:.1f} TFLOP"
        f" x {tokens.mean:,.6g} tokens of a sample, which is {work.formula}"
    )
    return Figure(value, "tokens/s", formula, True)


def trainer_ram(tokens: TokenCount, bytes_per_token: float, num_features: int, read_ahead: int) -> Figure:
    """Host memory of the records read ahead of the step, encoded and as 16-bit features."""
    value = read_ahead * tokens.mean * (bytes_per_token + 2.0 * num_features)
    formula = (
        f"{read_ahead} samples x {tokens.mean:,.6g} tokens x ({bytes_per_token:,.6g} B + {num_features} features x 2 B)"
    )
    return Figure(value, "B", formula)


@dataclass(frozen=True)
class BreakEven:
    """When keeping states is cheaper than making them again."""

    pass_usd: float | None
    keep_usd: float | None
    passes: float | None
    rent_days: float | None

    def text(self) -> str:
        """In words."""
        if self.pass_usd is None:
            return "no price of a capture pass is known here"
        parts = [f"one capture pass costs ${self.pass_usd:,.2f}"]
        if self.keep_usd == 0:
            parts.append("the disk is there already: keeping pays from the second epoch")
        elif self.keep_usd is not None and self.passes is not None:
            parts.append(f"keeping costs ${self.keep_usd:,.2f}: it pays from {self.passes:.1f} passes")
        if self.rent_days is not None:
            parts.append(f"rented storage costs one pass every {time_text(self.rent_days * 86400)}")
        return "; ".join(parts)


def break_even(pass_usd: float | None, keep_usd: float | None, usd_per_month: float | None) -> BreakEven:
    """Passes from which keeping is cheaper: the first one is needed either way."""
    known = pass_usd is not None and keep_usd is not None and pass_usd > 0
    passes = 1 + keep_usd / pass_usd if known and pass_usd and keep_usd is not None else None
    days = pass_usd / usd_per_month * 30 if pass_usd and usd_per_month else None
    return BreakEven(pass_usd, keep_usd, passes, days)
