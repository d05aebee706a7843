"""Names of taps, and their numbers in other programs.

In: a name such as `after_block:16`, or another program's layer number. Out: the other of the two.
"Layer 16" means two different tensors in two engines, so a number never leaves its engine's adapter;
the name is what headrace stores. Conventions: docs/formats/taps.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

Kind = Literal["embedding", "after_block", "final"]
Norm = Literal["", "pre_norm", "post_norm"]


@dataclass(frozen=True, order=True)
class Tap:
    """A named place in the target.

    `embedding` is the input of block 0; `after_block:i` the residual stream after block i, counted from 0;
    `final:pre_norm` and `final:post_norm` the last block's output before and after the target's final norm.
    """

    kind: Kind
    block: int = -1
    norm: Norm = ""

    def __str__(self) -> str:
        if self.kind == "after_block":
            return f"after_block:{self.block}"
        return f"final:{self.norm}" if self.kind == "final" else "embedding"


EMBEDDING = Tap("embedding")
FINAL_PRE_NORM = Tap("final", norm="pre_norm")
FINAL_POST_NORM = Tap("final", norm="post_norm")
_HINT = "use embedding, after_block:I (I from 0), final:pre_norm or final:post_norm"


def parse_tap(name: str) -> Tap:
    """Read a tap's name. Raises ConfigError for anything else, a bare number above all."""
    fixed = {"embedding": EMBEDDING, "final:pre_norm": FINAL_PRE_NORM, "final:post_norm": FINAL_POST_NORM}
    if name in fixed:
        return fixed[name]
    kind, _, number = name.partition(":")
    if kind == "after_block" and number.isdecimal() and number.isascii():
        return Tap("after_block", int(number))
    raise ConfigError("the name of a tap", repr(name), _HINT)


def parse_taps(names: Iterable[str], num_blocks: int) -> tuple[Tap, ...]:
    """Read tap names, in the order given, and check them against a target of `num_blocks` blocks.

    Raises ConfigError: no tap, a tap twice, a block beyond the target's depth.
    """
    taps = tuple(parse_tap(name) for name in names)
    if not taps:
        raise ConfigError("at least one tap", "an empty list", _HINT)
    if len(set(taps)) != len(taps):
        raise ConfigError("each tap once", ", ".join(map(str, taps)), "remove the repeated tap")
    for tap in taps:
        if tap.kind == "after_block" and tap.block >= num_blocks:
            raise ConfigError(
                f"a block from 0 to {num_blocks - 1}", str(tap), f"this target has {num_blocks} blocks, counted from 0"
            )
    return taps


def default_taps(num_blocks: int, num_taps: int = 5) -> tuple[Tap, ...]:
    """Space taps evenly from block 1 to the fourth-to-last index, num_blocks - 3; one tap sits in the middle.

    Source: z-lab's rule, round(1 + i (N - 4) / (n - 1)), DFlash (arXiv 2602.06036) section 4.1.
    Raises: ConfigError when the target is too shallow for so many distinct taps.
    """
    if num_taps < 1:
        raise ConfigError("at least one tap", str(num_taps), "set target.num_taps to 1 or more")
    if num_taps == 1:
        return (Tap("after_block", num_blocks // 2),)
    blocks = [round(1 + i * (num_blocks - 4) / (num_taps - 1)) for i in range(num_taps)]
    if num_blocks < 4 or len(set(blocks)) != num_taps:
        raise ConfigError(
            f"a target deep enough for {num_taps} distinct taps",
            f"{num_blocks} blocks, which the default rule maps to {blocks}",
            "name the taps yourself (target.taps: [after_block:0, ...]) or ask for fewer (target.num_taps)",
        )
    return tuple(Tap("after_block", block) for block in blocks)


def _last_block(tap: Tap, num_blocks: int) -> int:
    """The block whose output the tap is; -1 for the embedding."""
    return num_blocks - 1 if tap.kind == "final" else tap.block


def to_transformers(tap: Tap, num_blocks: int) -> int:
    """Index into `output_hidden_states`: 0 is the embedding, i + 1 block i, the last entry is after the final norm.

    Raises: ConfigError for the last block's output before the norm, which that tuple does not hold.
    """
    if tap == FINAL_PRE_NORM or (tap.kind == "after_block" and tap.block == num_blocks - 1):
        raise ConfigError(
            "a tap that output_hidden_states holds", str(tap), "hook the last block; its entry there is after the norm"
        )
    return num_blocks if tap == FINAL_POST_NORM else tap.block + 1


def from_transformers(index: int, num_blocks: int) -> Tap:
    """The tap at an index of `output_hidden_states`, for models whose last entry is normed (Llama, Qwen)."""
    _check(index, 0, num_blocks, "output_hidden_states")
    return FINAL_POST_NORM if index == num_blocks else _after(index - 1)


def to_vllm(tap: Tap, num_blocks: int) -> int:
    """vLLM's `eagle_aux_hidden_state_layer_ids`: the input of layer i; `num_blocks` is the final state before the norm.

    Raises: ConfigError for the normed final state, which vLLM does not hand out.
    """
    if tap == FINAL_POST_NORM:
        raise ConfigError("a tap that vLLM captures", str(tap), "take final:pre_norm and apply the target's norm")
    return _last_block(tap, num_blocks) + 1


def from_vllm(number: int, num_blocks: int) -> Tap:
    """The tap of a vLLM layer number, 0 to num_blocks."""
    _check(number, 0, num_blocks, "vLLM")
    return FINAL_PRE_NORM if number == num_blocks else _after(number - 1)


# speculators passes vLLM's numbers through unchanged (`aux_hidden_state_layer_ids`).
to_speculators = to_vllm
from_speculators = from_vllm


def to_zlab(tap: Tap, num_blocks: int) -> int:
    """z-lab's `dflash_config.target_layer_ids`: the output of block i; -1 is the embedding (DeepSpec).

    Raises: ConfigError for the normed final state.
    """
    if tap == FINAL_POST_NORM:
        raise ConfigError("a tap that z-lab's numbering has", str(tap), "take final:pre_norm")
    return _last_block(tap, num_blocks)


def from_zlab(number: int, num_blocks: int) -> Tap:
    """The tap of a z-lab layer id, -1 (embedding) to num_blocks - 1."""
    _check(number, -1, num_blocks - 1, "z-lab")
    return _after(number)


# SGLang's DFlash entry takes z-lab's ids and adds one itself (`set_dflash_layers_to_capture`).
to_sglang = to_zlab
from_sglang = from_zlab


def check_engine_order(taps: Sequence[Tap], num_blocks: int) -> None:
    """Engines return columns in ascending depth whatever was asked. Raises ConfigError unless `taps` ascend."""
    depths = [_last_block(tap, num_blocks) for tap in taps]
    if depths != sorted(set(depths)):
        raise ConfigError("taps in ascending depth", ", ".join(map(str, taps)), "sort them; engines sort them silently")


def _after(block: int) -> Tap:
    return EMBEDDING if block < 0 else Tap("after_block", block)


def _check(number: int, low: int, high: int, where: str) -> None:
    if not low <= number <= high:
        raise ConfigError(f"a {where} layer number from {low} to {high}", str(number), "check the target's depth")


def feature_taps(taps: Sequence[Tap]) -> tuple[Tap, ...]:
    """The taps that a drafter reads: all but a last state at the end, which only a loss reads."""
    return tuple(taps[:-1]) if taps and taps[-1] == FINAL_PRE_NORM else tuple(taps)
