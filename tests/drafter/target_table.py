"""Public configurations of targets and drafters beside what headrace derives: the rows of docs/targets.md.

In: the public data beside the project. Out: for each target its drafter and taps, or why there is none; for each
published drafter what it is, and each field in which it differs from the derivation, with the reason.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import DrafterConfig
from headrace.drafter.derive import derive
from headrace.drafter.shape import FULL, DrafterShape
from headrace.drafter.stock import shape_from_stock
from headrace.errors import HeadraceError
from headrace.prepare.model_files import load_config
from headrace.taps import default_taps, to_zlab
from headrace.target.head import check_ends
from headrace.target.quantised import read_quantisation

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "model_configs"

# Published drafters whose target is in the data. A drafter of no target there is read, and compared with none.
TARGETS = {
    "qwen2.5-0.5b-dflash": "Qwen--Qwen2.5-0.5B",
    "qwen2.5-0.5b-eagle3": "Qwen--Qwen2.5-0.5B",
    "qwen3-4b-dflash": "Qwen--Qwen3-4B",
    "qwen3-4b-dspark": "Qwen--Qwen3-4B",
    "qwen3-4b-eagle3": "Qwen--Qwen3-4B",
    "qwen3-8b-dflash": "Qwen--Qwen3-8B",
    "qwen3-8b-domino": "Qwen--Qwen3-8B",
    "qwen3-8b-dspark": "Qwen--Qwen3-8B",
    "qwen3-8b-eagle3": "Qwen--Qwen3-8B",
    "qwen3-8b-peagle": "Qwen--Qwen3-8B",
    "qwen3_8b_eagle3": "Qwen--Qwen3-8B",
    "qwen3_8b_eagle3_mla": "Qwen--Qwen3-8B",
    "dflash_draft_config": "Qwen--Qwen3-8B",
    "qwen3-32b-eagle3": "Qwen--Qwen3-32B",
    "qwen3-30B-A3B-eagle3": "Qwen--Qwen3-30B-A3B",
    "qwen3-30B-A3B-eagle3.1": "Qwen--Qwen3-30B-A3B",
    "qwen3-235B-A22B-eagle3": "Qwen--Qwen3-235B-A22B",
    "qwen3.5-35b-a3b-dflash": "Qwen--Qwen3.5-35B-A3B",
    "qwen3.5-35b-a3b-eagle3": "Qwen--Qwen3.5-35B-A3B",
    "qwen3.6-27b-dflash": "Qwen3.6-27B.from-NVFP4",
    "qwen3.6-27b-domino-full-attention": "Qwen3.6-27B.from-NVFP4",
    "qwen3.6-27b-dspark": "Qwen3.6-27B.from-NVFP4",
    "gemma3-1b-eagle3": "google--gemma-3-1b-it",
    "glm-5.2-dspark": "zai-org--GLM-5.2",
    "gpt-oss-120B-eagle3": "openai--gpt-oss-120b",
    "gpt-oss-20B-eagle3": "openai--gpt-oss-20b",
    "llama3-8B-eagle3": "meta-llama--Llama-3.1-8B-Instruct",
    "llama3-70B-ealge3": "meta-llama--Meta-Llama-3.1-70B",
    "llama4-scout-17B-16E-eagle3": "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "deepseek-v3-671b-eagle3": "deepseek-ai--DeepSeek-V3",
    "minimax_m25_eagle3": "MiniMaxAI--MiniMax-M2.5",
    "kimi_k25_eagle3": "moonshotai--Kimi-K2.5",
    "kimi_k25_eagle3_mla": "moonshotai--Kimi-K2.5",
    "kimi-k3-dspark": "moonshotai--Kimi-K3",
}
_KINDS = {
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "DSparkDraftModel": "DSpark",
    "DominoDraftModel": "Domino",
    "PEagleDraftModel": "P-EAGLE",
    "LlamaForCausalLMEagle3": "EAGLE-3",
    "Eagle3DeepseekV2ForCausalLM": "EAGLE-3 (latent attention)",
}
# Kinds that draft a block from taps named in their config, so that each field can be compared.
_BLOCK_KINDS = ("DFlash", "DFlash 2", "DSpark", "Domino")
# Why a published drafter differs in a field: by drafter, or by kind.
WHY: Mapping[tuple[str, str], str] = {
    ("DSpark", "block_size"): "DSpark drafts from the anchor's slot too, in shorter blocks",
    ("qwen3.6-27b-dspark", "taps"): "each one block later: the numbers are vLLM's, under a key that holds z-lab's",
    ("qwen3.6-27b-dflash", "layer_types"): "four of its layers look back 2,048 tokens, causally: "
    "drafter.layer_types, drafter.sliding_window",
    ("qwen3.5-35b-a3b-dflash", "num_layers"): "deeper by choice: drafter.num_layers",
    ("qwen3.5-35b-a3b-dflash", "heads"): "half the key heads by choice: drafter.num_kv_heads",
    ("glm-5.2-dspark", "taps"): "spread up to the last block but one by choice: target.taps",
    (
        "glm-5.2-dspark",
        "heads",
    ): "twice as many of half the size by choice: drafter.num_heads, .num_kv_heads, .head_dim",
    ("dflash_draft_config", "block_size"): "TorchSpec keeps it in the trainer's settings",
}


@dataclass(frozen=True)
class TargetRow:
    """What is derived for one target; `refused` says why nothing is."""

    name: str
    family: str
    quantisation: str
    shape: DrafterShape | None
    taps: tuple[int, ...]
    reasons: tuple[str, ...]
    refused: str = ""


@dataclass(frozen=True)
class DrafterRow:
    """One published drafter; `differences` by field: (published, derived, why), `why` empty where unexplained."""

    name: str
    kind: str
    target: str
    taps: tuple[int, ...]
    loads: str
    agrees: tuple[str, ...] = ()
    differences: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)


def target_paths() -> list[Path]:
    """Every target configuration."""
    return sorted([*DATA.glob("*.json"), *(DATA / "derived").glob("*.json")], key=lambda path: path.stem.lower())


def drafter_paths() -> list[Path]:
    """Every drafter configuration."""
    return sorted((DATA / "drafts").rglob("*.json"), key=lambda path: str(path).lower())


def target_row(path: Path) -> TargetRow:
    """Derive a drafter for one target. The mask token takes the last row: a configuration alone names no free one."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    text = raw.get("text_config", raw)
    family = str(text.get("model_type"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        quantisation = read_quantisation(Path(folder)).method or "none"
        try:
            config = load_config(Path(folder))
            own = config.get_text_config()
            check_ends(config)
            taps = default_taps(own.num_hidden_layers)
            cfg = DrafterConfig(mask_token_id=own.vocab_size - 1)
            width = len(taps) * own.hidden_size
            derived = derive(cfg, config, [str(tap) for tap in taps], width, {})
        except HeadraceError as exc:
            expected, found = (str(part).replace(f"{folder}/config.json", "config.json") for part in exc.args[:2])
            refused = f"expected {expected.partition(' (')[0]}, found {found.replace(folder, path.stem)[:120]}"
            return TargetRow(path.stem, family, quantisation, None, (), (), refused)
    numbers = tuple(to_zlab(tap, own.num_hidden_layers) for tap in taps)
    return TargetRow(path.stem, family, quantisation, derived.shape, numbers, derived.reasons)


def drafter_row(path: Path, targets: Mapping[str, TargetRow]) -> DrafterRow:
    """Read one published drafter and compare it with what is derived for its target."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    kind = _KINDS[raw["architectures"][0]]
    own = raw.get("dflash_config") or {}
    taps = tuple(own.get("target_layer_ids") or raw.get("target_layer_ids") or ())
    target = targets.get(TARGETS.get(path.stem, ""))
    row = DrafterRow(path.stem, kind, target.name if target else "", taps, _loads(raw))
    if target is None or target.shape is None:
        return row
    agrees, differences = [], {}
    for name, (theirs, ours) in _fields(raw, kind, taps, target.shape, target.taps).items():
        if theirs == ours:
            agrees.append(name)
        else:
            why = WHY.get((path.stem, name)) or WHY.get((kind, name), "")
            differences[name] = (str(theirs), str(ours), why)
    return DrafterRow(row.name, kind, target.name, taps, row.loads, tuple(agrees), differences)


def _loads(raw: Mapping[str, Any]) -> str:
    """Whether headrace runs such a drafter, or why not."""
    if _KINDS[raw["architectures"][0]] != "DFlash":
        return "no: another algorithm"
    try:
        shape_from_stock(raw)
    except HeadraceError as exc:
        return f"no: {exc.args[1]}"
    return "yes"


def _fields(
    raw: Mapping[str, Any], kind: str, taps: tuple[int, ...], shape: DrafterShape, own_taps: tuple[int, ...]
) -> dict[str, tuple[Any, Any]]:
    """Fields as (published, derived). EAGLE decodes with another model: only what ties it to a target counts."""
    found: dict[str, tuple[Any, Any]] = {
        "hidden_size": (raw["hidden_size"], shape.hidden_size),
        "vocab_size": (raw["vocab_size"], shape.vocab_size),
    }
    if kind not in _BLOCK_KINDS:
        return found
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}
    inner = raw.get("dflash_config") or {}
    return found | {
        "taps": (taps, own_taps),
        "num_layers": (raw["num_hidden_layers"], shape.num_layers),
        "heads": (
            (heads, raw["num_key_value_heads"], raw.get("head_dim") or raw["hidden_size"] // heads),
            (shape.num_heads, shape.num_kv_heads, shape.head_dim),
        ),
        "intermediate_size": (raw["intermediate_size"], shape.intermediate_size),
        "rope_theta": (float(rope.get("rope_theta") or raw["rope_theta"]), float(shape.rope["rope_theta"])),
        "block_size": (raw.get("block_size") or inner.get("block_size"), shape.block_size),
        "layer_types": (sorted(set(raw.get("layer_types") or (FULL,))), sorted(set(shape.layer_types))),
    }


def all_rows() -> tuple[list[TargetRow], list[DrafterRow]]:
    """Every target and every drafter."""
    targets = [target_row(path) for path in target_paths()]
    by_name = {row.name: row for row in targets}
    return targets, [drafter_row(path, by_name) for path in drafter_paths()]


def target_table(rows: Iterable[TargetRow]) -> str:
    """Markdown."""
    lines = [
        "| target | family | weights | taps (z-lab) | heads | MLP | RoPE, or why none |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.shape is None:
            lines.append(f"| {row.name} | {row.family} | {row.quantisation} | | | | refused: {row.refused} |")
            continue
        shape = row.shape
        rope = next(reason for reason in row.reasons if reason.startswith("drafter.rope "))
        heads = f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}"
        lines.append(
            f"| {row.name} | {row.family} | {row.quantisation} | {', '.join(map(str, row.taps))} | {heads} | "
            f"{shape.intermediate_size:,} | {rope.removeprefix('drafter.rope ')} |"
        )
    return "\n".join(lines) + "\n"


def drafter_table(rows: Iterable[DrafterRow]) -> str:
    """Markdown."""
    lines = [
        "| drafter | kind | runs here | target in the data | agrees in | differs in |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        differs = "; ".join(
            f"{name} {theirs} for {ours}: {why}" for name, (theirs, ours, why) in row.differences.items()
        )
        lines.append(
            f"| {row.name} | {row.kind} | {row.loads} | {row.target or 'none'} | {', '.join(row.agrees)} | {differs} |"
        )
    return "\n".join(lines) + "\n"
