"""JSON that carries its own digest, for files that people read too.

In: a JSON object. Out: its text with a last key `digest`, xxh3-128 over the compact text of all the others. A text is
accepted only if it is, byte for byte, what this module would write for the object in it, so every flip is noticed.
"""

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import StoreError
from headrace.record import digest

HINT = "it was damaged or edited; restore it, or capture into a new folder"


def dump_digested(value: Mapping[str, Any], indent: int | None = None) -> str:
    """The object as one line (or indented), its digest last; no newline at the end."""
    sealed = {**value, "digest": digest(_compact(value).encode()).hex()}
    return _compact(sealed) if indent is None else json.dumps(sealed, indent=indent, ensure_ascii=False)


def load_digested(content: bytes, where: str, indent: int | None = None, hint: str = HINT) -> dict[str, Any]:
    """Read what `dump_digested` wrote with the same `indent`, without the digest.

    Raises: StoreError naming `where` for anything else; `hint` says what to do about it.
    """
    try:
        value = json.loads(content.decode("utf-8"))
        if not isinstance(value, dict) or "digest" not in value:
            raise _damaged(where, "no digest in it", hint)
        found = value.pop("digest")
        if dump_digested(value, indent).encode() != content:
            raise _damaged(where, f"digest {found} does not belong to this text", hint)
    except ValueError as exc:
        raise _damaged(where, f"text that is not JSON: {exc}", hint) from exc
    return value


def _compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _damaged(where: str, found: str, hint: str) -> StoreError:
    return StoreError(f"{where} as headrace wrote it", found, hint)
