"""Numbers with their unit and the formula they came from.

In: texts such as `4 TB` or `1 Gbit/s` from a person, floats from the arithmetic. Out: bytes, bytes a second and
seconds; and texts in SI and binary units both, because 37.4 TB and 34.0 TiB of the same data look like two sizes.
"""

import re
from dataclasses import dataclass

from headrace.errors import PlanError

_SI = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_SIZE = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[0-9]+)?)\s*([kmgtp]i?)?(b|bit|bits|bytes?)?\s*", re.IGNORECASE)
GiB = 2**30
HOUR_S = 3600.0
DAY_S = 86400.0


@dataclass(frozen=True)
class Figure:
    """One number of a plan: value, unit, and the formula with its numbers filled in.

    `modelled` says that a figure of the catalogue that nobody measured went into it.
    """

    value: float
    unit: str
    formula: str
    modelled: bool = False


def parse_bytes(text: str | float) -> float:
    """Read a size: `4 TB`, `1.5TiB`, `500 GB`, or plain bytes. Raises: PlanError."""
    if isinstance(text, int | float):
        return _positive(float(text), "a size", str(text))
    match = _SIZE.fullmatch(text)
    if match is None:
        raise PlanError("a size such as 4 TB or 3.6 TiB", repr(text), "units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    number, prefix, unit = match[1].replace(",", "").replace("_", ""), (match[2] or "").lower(), match[3] or "B"
    bits = unit.lower().startswith("bit") or unit == "b"
    if bits and (prefix or match[3]):
        raise PlanError("bytes (B)", repr(text), "write B for bytes; bits are for links (Gbit/s)")
    return _positive(float(number) * {**_SI, **_BINARY}[prefix], "a size", text)


def parse_rate(text: str | float) -> float:
    """Read a rate in bytes a second: `1 Gbit/s`, `15 MB/s`, or plain bytes a second. Raises: PlanError."""
    if isinstance(text, int | float):
        return _rate(float(text), str(text))
    head, slash, per = text.strip().partition("/")
    if not slash and head.lower().endswith("ps"):
        head, per = head[:-2], "s"
    match = _SIZE.fullmatch(head)
    if match is None or per.strip().lower() not in ("s", "sec", "second"):
        raise PlanError("a rate such as 1 Gbit/s or 15 MB/s", repr(text), "B is bytes, b or bit is bits")
    unit = match[3] or "B"
    number = float(match[1].replace(",", "").replace("_", "")) * {**_SI, **_BINARY}[(match[2] or "").lower()]
    bits = unit.lower().startswith("bit") or unit == "b"
    return _rate(number / 8 if bits else number, text)


def bytes_text(value: float) -> str:
    """A size in SI and binary units: `37.43 TB (34,858 GiB)`."""
    if value < 10_000:
        return f"{value:,.0f} B"
    return f"{si_text(value)}B ({_binary_text(value)})"


def rate_text(value: float) -> str:
    """A rate in bytes and in bits: `147.1 MB/s (1.18 Gbit/s)`."""
    return f"{si_text(value)}B/s ({si_text(8 * value)}bit/s)"


def time_text(seconds: float) -> str:
    """A time in the units people plan in: `42 s`, `25.0 h`, `1,058 h (44.1 days)`."""
    if seconds < 600:
        return f"{seconds:,.3g} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / 60:,.0f} min"
    hours = f"{seconds / HOUR_S:,.1f} h" if seconds < 1000 * HOUR_S else f"{seconds / HOUR_S:,.0f} h"
    return f"{hours} ({seconds / DAY_S:,.1f} days)" if seconds > 2 * DAY_S else hours


def money_text(usd: float | None) -> str:
    """Dollars, or that nobody said the price."""
    return "no price" if usd is None else f"${usd:,.2f}" if usd < 100 else f"${usd:,.0f}"


def si_text(value: float) -> str:
    """Four significant digits and an SI prefix: `37.43 T`."""
    for prefix in ("P", "T", "G", "M", "k"):
        scale = _SI[prefix.lower()]
        if value >= scale:
            return f"{_four(value / scale)} {prefix}"
    return f"{_four(value)} "


def _binary_text(value: float) -> str:
    for prefix in ("Gi", "Mi", "Ki"):
        scale = _BINARY[prefix.lower()]
        if value >= scale:
            scaled = value / scale
            return f"{scaled:,.0f} {prefix}B" if scaled >= 1000 else f"{_four(scaled)} {prefix}B"
    return f"{value:,.0f} B"


def _four(value: float) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _rate(value: float, text: str) -> float:
    if value == 0:
        raise PlanError("a rate above 0", text, "leave the link out if there is none")
    return _positive(value, "a rate", text)


def _positive(value: float, what: str, text: str) -> float:
    if not value >= 0 or value == float("inf"):
        raise PlanError(f"{what} of 0 or more", text, "give a finite number")
    return value
