"""What the slots of another program's files are, in the words of whoever made them.

In: what a person says of them (tap names, or numbers with the convention they are in; whether the final norm was
applied), and what the files themselves list. Out: taps by name. Most of these files say neither, and a wrong guess
shows in no loss curve, so nothing here is guessed.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from headrace.errors import ConfigError
from headrace.taps import (
    FINAL_POST_NORM,
    FINAL_PRE_NORM,
    Tap,
    from_sglang,
    from_speculators,
    from_transformers,
    from_vllm,
    from_zlab,
    parse_taps,
    to_zlab,
)

Final = Literal["pre_norm", "post_norm", "drop"]

CONVENTIONS: dict[str, Callable[[int, int], Tap]] = {
    "vllm": from_vllm,
    "speculators": from_speculators,
    "zlab": from_zlab,
    "sglang": from_sglang,
    "transformers": from_transformers,
}
_HINT = (
    "say --taps with one tap a slot: names (after_block:1,after_block:16), numbers in a convention (vllm:2,17), "
    "or, where the files list numbers, the convention alone; conventions: "
    f"{', '.join(CONVENTIONS)} (docs/formats/taps.md)"
)


def said_taps(said: str | None, num_slots: int, num_blocks: int, listed: Sequence[int] | None) -> tuple[Tap, ...]:
    """The taps of slots, the last state left out.

    Args:
        said: `after_block:1,...`; `CONVENTION:1,...`; or `CONVENTION`, for numbers that the files list.
        listed: numbers the files list, in a convention they do not name; None where they list none.
    Raises: ConfigError when nothing was said, for another count than slots, a layer the target does not have, and
    names that are not what the files list (read as z-lab's, which DeepSpec's own code writes).
    """
    if not said:
        found = f"{num_slots} slots" + ("" if listed is None else f" with the numbers {list(listed)}")
        raise ConfigError("the tap of each slot, which the files do not say", found, _HINT)
    convention, _, numbers = said.partition(":")
    if convention in CONVENTIONS:
        given = _numbers(numbers, said) if numbers else listed
        if given is None:
            raise ConfigError("numbers beside the convention, for these files list none", said, _HINT)
        if listed is not None and list(given) != list(listed):
            raise ConfigError(f"the numbers that the files list, {list(listed)}", said, _HINT)
        names = [str(CONVENTIONS[convention](number, num_blocks)) for number in given]
        taps = parse_taps(names, num_blocks)
    else:
        taps = parse_taps([name.strip() for name in said.split(",")], num_blocks)
        if listed is not None and [to_zlab(tap, num_blocks) for tap in taps] != list(listed):
            expected = f"the taps that the files list, {list(listed)} in z-lab's numbers"
            raise ConfigError(expected, said, "if the numbers are in another convention, say --taps with its name")
    if len(taps) != num_slots:
        raise ConfigError(f"{num_slots} taps, one a slot", f"{len(taps)}: {said}", _HINT)
    return taps


def said_final(said: str | None, has_final: bool) -> Tap | None:
    """The tap of the last state: None where there is none, or where it is to be dropped.

    Raises: ConfigError when the files have one and nobody says whether the final norm was applied; and for a word
    that is none of pre_norm, post_norm, drop.
    """
    if said is not None and said not in ("pre_norm", "post_norm", "drop"):
        raise ConfigError("--final pre_norm, post_norm or drop", said, "say which the last state is")
    if not has_final:
        if said in ("pre_norm", "post_norm"):
            raise ConfigError("files without a last state to need no --final", said, "leave --final out")
        return None
    if said is None:
        hint = "say --final pre_norm or post_norm (whether the target's final norm was applied), or --final drop"
        raise ConfigError("the norm state of the last state, which the files do not say", "no --final", hint)
    return {"pre_norm": FINAL_PRE_NORM, "post_norm": FINAL_POST_NORM, "drop": None}[said]


def _numbers(text: str, said: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as exc:
        raise ConfigError("whole numbers with commas after the convention", said, _HINT) from exc
