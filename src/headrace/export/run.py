"""A run's export: the stock folder, its model card, the commands that serve it; speculators' layout, a hub repository.

In: a run's last checkpoint, the one that is evaluated. Out: `drafter/`, and `drafter-speculators/` where it is asked
for. Each engine's command is checked against its profile first: where it would serve another drafter, that is said.
"""

import json
from pathlib import Path
from typing import Any

from headrace.config import RunFile, RunFolder
from headrace.drafter.speculators import VERSION
from headrace.drafter.stock import CONFIG, WEIGHTS
from headrace.errors import ExportError
from headrace.export.card import write_card
from headrace.export.profiles import PROFILES, environment, problems
from headrace.export.push import Hub, push
from headrace.export.speculators import export_speculators
from headrace.export.zlab import export_zlab, serve_commands, stock_scales
from headrace.prepare.model_files import load_config
from headrace.progress import Progress
from headrace.target.head import load_head
from headrace.target.transformers_target import target_folder
from headrace.target.weights import weights_hash
from headrace.train.checkpoint import LAST
from headrace.train.load import check_belongs, load_codec, load_drafter, unfinished

SPECULATORS = "drafter-speculators"


def checked_commands(target: str, folder: Path) -> dict[str, str]:
    """By engine, the command that serves an exported folder; or, where its profile finds a fault, why it would not."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    commands = serve_commands(target, folder, int(config["block_size"]))
    for engine, known in PROFILES.items():
        found = problems(config, known)
        before = "".join(f"{name}={value} " for name, value in environment(config, known).items())
        commands[engine] = f"not served as trained: {'; '.join(found)}" if found else before + commands[engine]
    return commands


def export_run(
    cfg: RunFile,
    folder: RunFolder,
    progress: Progress,
    *,
    speculators: bool = False,
    push_to: str | None = None,
    hub: Hub | None = None,
) -> dict[str, Any]:
    """Export a run's last checkpoint, the one that is evaluated, to `drafter/` with a model card; say how to serve it.

    Args:
        speculators: write `drafter-speculators/` too, in the layout of that package.
        push_to: OWNER/NAME of a hub repository that `drafter/` is uploaded to.
    Returns: folder, step and τ of the checkpoint, bytes, and the commands by engine.
    Raises: TrainError without a checkpoint; ExportError as `export_zlab`, `export_speculators` and `push`.
    """
    drafter, extras = load_drafter(folder.train() / LAST)
    if not drafter.shape.features:
        raise ExportError("a drafter that reads the target's states", "the no-features floor", "train with features")
    model = target_folder(cfg.target.model)
    check_belongs(extras, weights_hash(model), None)
    if (how_far := unfinished(folder.train())) is not None:
        progress.note(f"export: the training has not ended, it {how_far}")
    config = load_config(model)
    text = config.get_text_config()
    ids = {key: getattr(text, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(text, key)}
    codec = load_codec(folder.train() / LAST, extras)
    head = load_head(model, config)
    scales = stock_scales(head)
    export_zlab(drafter, folder.export, codec, ids, scales, head)
    target = str(model) if cfg.target.model == "demo" else cfg.target.model
    commands = checked_commands(target, folder.export)
    for engine, command in commands.items():
        progress.note(f"export: {PROFILES[engine].title}: {command}")
    write_card(cfg, folder, commands)
    more: dict[str, Any] = {}
    if speculators:
        more["speculators"] = str(folder.root / SPECULATORS)
        architectures = config.architectures or []
        export_speculators(drafter, folder.root / SPECULATORS, target, architectures, codec, ids, scales, head)
        progress.note(f"export: speculators {VERSION}: vllm serve {more['speculators']}")
    if push_to is not None:
        more["pushed"] = push(folder.export, push_to, hub)
        progress.note(f"export: pushed to {more['pushed']}")
    num_bytes = (folder.export / WEIGHTS).stat().st_size
    return {
        **more,
        "folder": str(folder.export),
        "step": extras["step"],
        "tau": extras["tau"],
        "bytes": num_bytes,
        "commands": commands,
    }


def refresh_card(cfg: RunFile, folder: RunFolder) -> None:
    """Write the model card of an export again, with what was measured since; nothing where there is no export."""
    if (folder.export / CONFIG).is_file():
        target = str(target_folder(cfg.target.model)) if cfg.target.model == "demo" else cfg.target.model
        write_card(cfg, folder, checked_commands(target, folder.export))
