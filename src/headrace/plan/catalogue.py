"""GPUs, disks, object storage and links that plans start from.

In: the package's `catalogue.yaml`, and a user's own file laid over it. Out: typed entries, found by name; each figure
keeps its kind, date and source, so that a plan can say which of its numbers nobody measured.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ConfigDict, Field, ValidationError

from headrace.errors import PlanError
from headrace.kinds import Strict
from headrace.plan.quantity import parse_rate

PACKAGED = Path(__file__).with_name("catalogue.yaml")
T = TypeVar("T")
Kind = Literal["vendor", "measured", "listed", "modelled", "assumed"]


class Source(Strict):
    """Where a figure was read, and when."""

    date: str
    title: str


class Sourced(Strict):
    """One figure with its kind and the name of its source."""

    model_config = ConfigDict(allow_inf_nan=False)

    value: float = Field(ge=0)
    kind: Kind
    source: str

    @property
    def modelled(self) -> bool:
        """Nobody measured or published it for this very thing."""
        return self.kind in ("modelled", "assumed")


class Above0(Sourced):
    """A figure that plans divide by."""

    value: float = Field(gt=0)


class Gpu(Strict):
    """One card. Shares are of the dense bfloat16 peak; gains multiply the bfloat16 prefill rate."""

    title: str
    memory_gb: Above0
    memory_tb_s: Above0
    bf16_tflops: Above0
    prefill_share: Above0
    fp8_prefill_gain: Above0 | None = None
    nvfp4_prefill_gain: Above0 | None = None
    usd_per_hour: Sourced | None = None


class Disk(Strict):
    """A disk that is bought, or a place that is rented."""

    title: str
    read_gb_s: Above0
    usd_per_tb: Sourced | None = None
    usd_per_gb_month: Sourced | None = None
    egress_usd_per_gb: Sourced | None = None


class Link(Strict):
    """A network link, one direction."""

    title: str
    gb_s: Above0


class Assumptions(Strict):
    """Figures that hold for every card until something is measured."""

    train_share: Above0
    decode_bandwidth_share: Above0
    usable_memory_share: Above0
    disk_reserve_share: Sourced
    decode_batch: Sourced


class Catalogue(Strict):
    """Everything a plan may name."""

    sources: dict[str, Source]
    assumptions: Assumptions
    gpus: dict[str, Gpu]
    disks: dict[str, Disk]
    links: dict[str, Link]

    def gpu(self, name: str) -> Gpu:
        """A GPU by its name. Raises: PlanError listing the known ones."""
        return _find(self.gpus, name, "GPU")

    def disk(self, name: str) -> Disk:
        """A disk or object store by its name. Raises: PlanError listing the known ones."""
        return _find(self.disks, name, "disk or object store")

    def link_bytes_s(self, text: str | float) -> float:
        """A link by its name or its rate, in bytes a second. Raises: PlanError."""
        key = text.strip().lower() if isinstance(text, str) else ""
        if key in self.links:
            return self.links[key].gb_s.value * 1e9
        if isinstance(text, str) and not re.search(r"\d\s*[kmgtp]?i?(b|bit|bits|byte|bytes)?(/|ps)|^[\d.]+$", key):
            _find(self.links, text, "link (or a rate such as 15 MB/s)")
        return parse_rate(float(text) if isinstance(text, str) and re.fullmatch(r"[\d.]+", key) else text)

    def cite(self, figure: Sourced) -> str:
        """Kind, source and date of a figure in words."""
        source = self.sources[figure.source]
        return f"{figure.kind}, {source.date}: {source.title}"


@dataclass(frozen=True)
class Devices:
    """So many cards of one kind; `gpu` is None for a machine of which only measured rates are known."""

    name: str
    count: int
    gpu: Gpu | None

    @property
    def memory_bytes(self) -> float | None:
        """Memory of one card."""
        return None if self.gpu is None else self.gpu.memory_gb.value * 1e9

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all of them; none if nobody said it."""
        price = None if self.gpu is None else self.gpu.usd_per_hour
        return None if price is None else price.value * self.count

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu.title if self.gpu else self.name}"


def parse_devices(text: str, catalogue: Catalogue) -> Devices:
    """Read `b200`, `b200:8` or `8xb200`. Raises: PlanError."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?([A-Za-z0-9 _-]+?)\s*(?::\s*(\d+))?\s*", text)
    if match is None or (match[1] and match[3]):
        raise PlanError("a GPU such as b200 or b200:8", repr(text), "name and count")
    count = int(match[1] or match[3] or 1)
    if count < 1:
        raise PlanError("at least one GPU", repr(text), "leave the GPU out if there is none")
    name = _key(match[2])
    return Devices(name, count, catalogue.gpu(name))


def load_catalogue(overlay: Path | None = None) -> Catalogue:
    """The packaged catalogue, with a user's file laid over it. Raises: PlanError."""
    if overlay is None:
        return _packaged()
    tree = _merge(_read(PACKAGED), _read(overlay))
    return _validated(tree, str(overlay))


@cache
def _packaged() -> Catalogue:
    return _validated(_read(PACKAGED), PACKAGED.name)


def _read(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is an optional part of PyYAML
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise PlanError("a catalogue in YAML", f"{path}: {exc}", "see catalogue.yaml of the package") from exc
    if not isinstance(value, dict):
        raise PlanError(
            "sections gpus, disks, links, assumptions, sources", f"{path}: {type(value).__name__}", "see docs/plan.md"
        )
    return value


def _validated(tree: Mapping[str, Any], name: str) -> Catalogue:
    try:
        catalogue = Catalogue.model_validate(tree)
    except ValidationError as exc:
        places = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors()[:5])
        raise PlanError("a catalogue of the known layout", f"{name}: {places}", "see docs/plan.md") from exc
    known = set(catalogue.sources)
    unknown = sorted({f.source for f in _figures(catalogue)} - known)
    if unknown:
        raise PlanError(
            "a source for each figure", f"{name}: no source {', '.join(unknown)}", "add it under sources, with its date"
        )
    return catalogue


def _figures(node: Any) -> list[Sourced]:
    if isinstance(node, Sourced):
        return [node]
    if isinstance(node, Strict):
        return [f for key in type(node).model_fields for f in _figures(node.__dict__[key])]
    if isinstance(node, dict):
        return [f for child in node.values() for f in _figures(child)]
    return []


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _find(entries: Mapping[str, T], name: str, what: str) -> T:
    key = _key(name)
    if key in entries:
        return entries[key]
    similar = [k for k in entries if key in k or key.replace("-", "") in k.replace("-", "")]
    hint = (
        f"did you mean {' or '.join(similar)}?"
        if similar
        else "add it to a file of your own and name it with --catalogue"
    )
    raise PlanError(f"a {what} among {', '.join(entries)}", repr(name), hint)
