"""The model card of an exported drafter: what it is of, how it was trained, what it was measured at.

In: a run's folder and settings. Out: `README.md` beside the weights, from what the stages recorded; what was not
measured is said to be so. Paths of this machine stay out of it: of local data and targets only the last name is kept.
"""

import json
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.config import RunFile, RunFolder
from headrace.drafter.stock import CONFIG
from headrace.files import read_stage, write_atomic
from headrace.kinds import DataSource
from headrace.prepare.prepared import PreparedSet

CARD = "README.md"
_FLOORS = {
    "tau_no_features": "the same drafter without target states",
    "tau_prompt_lookup": "prompt lookup",
    "tau_untrained": "the untrained drafter",
}
_RECIPE = (
    "objective", "loss", "optimizer", "peak_lr", "schedule", "weight_decay", "anchors", "step_tokens", "scale_taps",
    "ema", "seed",
)  # fmt: skip


def write_card(cfg: RunFile, folder: RunFolder, commands: dict[str, str]) -> Path:
    """Write the card of `drafter/`.

    Args: commands: by engine, what serves the drafter, or why it does not.
    Returns: its path.
    """
    config = json.loads((folder.export / CONFIG).read_text(encoding="utf-8"))
    target = _public(cfg.target.model)
    lines = [
        "---",
        *([f"base_model: {target}"] if "/" in target else []),
        "library_name: headrace",
        "tags: [dflash, speculative-decoding, draft-model]",
        "---",
        f"# A DFlash drafter of {target}",
        "",
        f"Drafts blocks of {config['block_size']} tokens for {target}, whose answers stay its own. Trained with "
        f"headrace {__version__}.",
        "",
        *_measured(folder),
        "## Serve it",
        "",
        *(f"- {engine}: `{command}`" for engine, command in commands.items()),
        "",
        *_shape(config),
        *_recipe(cfg, folder),
        *_data(cfg, folder),
    ]
    path = folder.export / CARD
    write_atomic(path, ("\n".join(lines).rstrip() + "\n").encode())
    return path


def _public(model: str) -> str:
    """A hub id or `demo` as it is; of a path the last name alone."""
    is_hub = model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).exists()
    return model if is_hub or "/" not in model else Path(model).name


def _measured(folder: RunFolder) -> list[str]:
    path = folder.evaluation / "results.json"
    if not path.is_file():
        return ["## Measured", "", "Not measured yet: `headrace eval` measures τ and its floors.", ""]
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    low, high = results["tau_interval"]
    rows = [f"| τ of this drafter | {results['tau']:.3f} ({low:.3f} to {high:.3f}) |"]
    rows += [f"| {name} | {results[key]:.3f} |" for key, name in _FLOORS.items() if results.get(key) is not None]
    rows += [f"| τ on {task} | {own['tau']:.3f} |" for task, own in sorted(results["per_task"].items())]
    identical = {True: "identical to the target's own", False: "NOT the target's own", None: "sampled, not compared"}
    return [
        "## Measured",
        "",
        f"Tokens gained per pass of the target, on {results['num_prompts']} held-out prompts; plain decoding gains 1. "
        f"Greedy answers: {identical[results['greedy_identical']]}.",
        "",
        "| | τ |",
        "|---|---|",
        *rows,
        "",
    ]


def _shape(config: dict[str, Any]) -> list[str]:
    own = config["dflash_config"]
    return [
        "## Shape",
        "",
        f"{config['num_hidden_layers']} layers of {config['hidden_size']}, {config['num_attention_heads']} heads on "
        f"{config['num_key_value_heads']} of {config['head_dim']}; {', '.join(sorted(set(config['layer_types'])))}; "
        f"reads the output of blocks {', '.join(map(str, own['target_layer_ids']))} of {config['num_target_layers']}, "
        f"counted from 0; mask token {own['mask_token_id']}.{_vocabulary(config)}",
        "",
    ]


def _vocabulary(config: dict[str, Any]) -> str:
    size = config.get("draft_vocab_size")
    if size is None:
        return ""
    return (
        f" Drafts {size:,} of {config['vocab_size']:,} ids: programs that pass over `d2t` draft from the whole head,"
        " which it was not trained to."
    )


def _recipe(cfg: RunFile, folder: RunFolder) -> list[str]:
    stage = read_stage(folder.train()) or {}
    done = stage.get("summary") or {}
    settings = ", ".join(f"{key} {getattr(cfg.train, key)}" for key in _RECIPE)
    counted = [
        f"{done[key]:,} {name}" for key, name in (("num_steps", "steps"), ("num_tokens", "tokens")) if key in done
    ]
    began = f", going on from {_public(cfg.drafter.init_from)}" if cfg.drafter.init_from else ""
    return ["## Recipe", "", f"{', '.join(counted) or 'Unfinished'}{began}; codec {cfg.capture.codec}; {settings}.", ""]


def _data(cfg: RunFile, folder: RunFolder) -> list[str]:
    prepared = PreparedSet.open(folder.prepared)
    names = ", ".join(Path(DataSource.of(source).path).name for source in cfg.prepare.data)
    answers = "the target's own" if cfg.regenerate.enabled else "those of the data"
    if (came_from := prepared.manifest.get("identity", {}).get("from")) is not None:  # an import: its data said no more
        names, answers = f"{came_from}'s files", "those of the files"
    held = int(prepared.heldout.sum())
    return [
        "## Data",
        "",
        f"{prepared.num_samples - held:,} samples of {names}; {held:,} more held out; answers are {answers}.",
    ]
