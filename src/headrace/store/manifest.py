"""The manifest: of what these states are, written before the first of them.

In: a target's identity, taps by name, codec, prepared set. Out: `manifest.json`, read back only if every byte is as
written. Identity decides (a mismatch is refused and names the field); provenance informs (a difference is told).
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headrace
from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError, ConfigError, StoreError
from headrace.files import write_atomic
from headrace.store.digested import dump_digested, load_digested
from headrace.token_rule import ALL_TOKENS, TokenRule

FORMAT = "headrace-store"
VERSION = 1
FILE_NAME = "manifest.json"

# What decides a target's states. Its name and its engine may change (a moved folder, an upgrade): provenance.
TARGET_IDENTITY = (
    "architecture",
    "num_blocks",
    "hidden_size",
    "vocab_size",
    "dtype",
    "quantisation",
    "weights_hash",
    "tokenizer_hash",
    "template_hash",
)


@dataclass(frozen=True)
class Manifest:
    """Identity and provenance of a states folder.

    `target` holds the fields of TARGET_IDENTITY; `norms` says for each tap whether the target's final norm was
    applied (`none` or `final`); `token_rule` which tokens have states (headrace/token_rule.py); `prepared` is the
    fingerprint of the prepared set, whose rows the records are.
    """

    target: Mapping[str, Any]
    taps: tuple[str, ...]
    norms: tuple[str, ...]
    dtype: str
    codec: CodecSpec
    prepared: str
    token_rule: str = "all"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """JSON values, nested one level, that must be equal for two sets of states to mix."""
        return {
            "target": dict(self.target),
            "taps": list(self.taps),
            "norms": list(self.norms),
            "dtype": self.dtype,
            "codec": self.codec.to_json(),
            "token_rule": self.token_rule,
            "prepared": self.prepared,
        }

    def to_json(self) -> dict[str, Any]:
        """The content of manifest.json, without its digest."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity(),
            "provenance": dict(self.provenance),
        }

    def compare(self, other: "Manifest", where: str = "this store") -> None:
        """Refuse another identity. Raises: StoreError naming each field that differs, as (here, there)."""
        mine, theirs = _flat(self.identity()), _flat(other.identity())
        wrong = [f"{key} {theirs.get(key)!r}, not {mine.get(key)!r}" for key in mine if mine[key] != theirs.get(key)]
        wrong += [f"{key} {theirs[key]!r}, not set" for key in theirs if key not in mine]
        if wrong:
            hint = "capture into another folder, or set the run file back to what this store was made with"
            raise StoreError(f"states of the same identity as {where}", "; ".join(wrong), hint)

    def provenance_changes(self, other: "Manifest") -> list[str]:
        """Differences in provenance, one sentence each; the time of making does not count."""
        keys = sorted({*self.provenance, *other.provenance} - {"created"})
        return [
            f"{key} was {self.provenance.get(key)!r} and is now {other.provenance.get(key)!r}"
            for key in keys
            if self.provenance.get(key) != other.provenance.get(key)
        ]

    def write(self, root: Path) -> None:
        """Write `manifest.json` atomically."""
        write_atomic(root / FILE_NAME, self.to_text())

    def to_text(self) -> str:
        """The text of manifest.json."""
        return dump_digested(self.to_json(), indent=1) + "\n"

    @classmethod
    def read(cls, root: Path) -> "Manifest":
        """Read `manifest.json`. Raises: StoreError when it is absent, damaged, or of another format or version."""
        path = root / FILE_NAME
        try:
            content = path.read_bytes()
        except OSError as exc:
            raise StoreError("a states folder", f"no readable {path}", "run capture first, or check the path") from exc
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, path: str) -> "Manifest":
        """Read the text of `manifest.json`, found at `path`. Raises: as `read`."""
        if not content.endswith(b"\n"):
            raise StoreError(f"{path} as headrace wrote it", "its end is missing", "restore it from a copy")
        value = load_digested(content[:-1], path, indent=1)
        if (value.get("format"), value.get("version")) != (FORMAT, VERSION):
            found = f"{value.get('format')} version {value.get('version')}"
            raise StoreError(f"{FORMAT} version {VERSION}", found, "open it with the release that wrote it")
        return cls.from_json(value, path)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> "Manifest":
        """What `to_json` gave, found at `where`. Raises: StoreError for a field that is missing or wrong."""
        try:
            identity = dict(value["identity"])
            return cls(
                target=identity["target"],
                taps=tuple(identity["taps"]),
                norms=tuple(identity["norms"]),
                dtype=identity["dtype"],
                codec=CodecSpec.from_json(identity["codec"]),
                prepared=identity["prepared"],
                token_rule=str(TokenRule.parse(identity["token_rule"])),
                provenance=value["provenance"],
            )
        except (KeyError, TypeError, CodecError, ConfigError) as exc:
            raise StoreError("every field of a manifest", f"{where}: {exc}", "see docs/formats/store-1.md") from exc


def make_manifest(
    target: Mapping[str, Any],
    taps: Sequence[str],
    codec: CodecSpec,
    prepared: str,
    extra: Mapping[str, Any],
    token_rule: TokenRule = ALL_TOKENS,
) -> Manifest:
    """Make the manifest of a capture.

    Args:
        target: the fields of a TargetSpec (`dataclasses.asdict(spec)`).
        prepared: fingerprint of the prepared set.
        extra: further provenance (hardware, threads, ...), JSON values.
    Raises: StoreError when `target` lacks a field that decides its states.
    """
    lacking = [name for name in TARGET_IDENTITY if name not in target]
    if lacking:
        raise StoreError("a target with a full identity", f"no {', '.join(lacking)}", "fill in every TargetSpec field")
    told = {name: value for name, value in target.items() if name not in TARGET_IDENTITY}
    versions = {"headrace": headrace.__version__, "python": platform.python_version(), "machine": platform.machine()}
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Manifest(
        target={name: target[name] for name in TARGET_IDENTITY},
        taps=tuple(taps),
        norms=tuple("final" if tap == "final:post_norm" else "none" for tap in taps),
        dtype=codec.dtype,
        codec=codec,
        prepared=prepared,
        token_rule=str(token_rule),
        provenance={**told, **versions, **extra, "created": created},
    )


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in identity.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": v for inner, v in value.items()})
        else:
            flat[key] = value
    return flat
