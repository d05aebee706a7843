"""Peers by name: how to write for each, how to open what each wrote.

In: a name, folders, and what a user says. Out: an export, or an import into a run folder.
"""

from pathlib import Path
from typing import Any

from headrace.config import RunFolder
from headrace.errors import ConfigError
from headrace.interchange import deepspec, specforge, speculators
from headrace.interchange.incoming import Peer, Said, take_in
from headrace.interchange.outgoing import Outgoing
from headrace.prepare.model_files import load_config
from headrace.progress import Progress

PEERS = ("speculators", "specforge", "deepspec")


def export_run(
    peer: str,
    run: RunFolder,
    out: Path,
    progress: Progress,
    *,
    target: Path | None = None,
    final: bool = False,
    states: bool = True,
) -> dict[str, Any]:
    """Write a run's states as a peer's files.

    Args:
        target: the target's folder, to apply its final norm (DeepSpec, SpecForge with `final`).
        final: SpecForge: write the last state too.
        states: False: speculators' data set alone.
    Raises: ConfigError for an unknown peer or an option that is not the peer's, and what each export raises.
    """
    _known(peer)
    if final and peer != "specforge":
        raise ConfigError("--with-final for specforge alone", peer, "the others always have a last state")
    if not states and peer != "speculators":
        raise ConfigError("--without-states for speculators alone", peer, "leave it out")
    outgoing = Outgoing(run, target)
    try:
        if peer == "speculators":
            return speculators.export(outgoing, out, progress, states=states)
        if peer == "specforge":
            return specforge.export(outgoing, out, progress, final=final)
        return deepspec.export(outgoing, out, progress)
    finally:
        outgoing.close()


def import_run(
    peer: str, folder: Path, to: RunFolder, said: Said, progress: Progress, hidden_states: Path | None = None
) -> dict[str, Any]:
    """Take a peer's files into a run folder.

    Args: hidden_states: speculators: where `hs_{i}.safetensors` lie, if not in the data set's folder.
    Raises: ConfigError for an unknown peer, damaged files, and what was not said.
    """
    _known(peer)
    if hidden_states is not None and peer != "speculators":
        raise ConfigError("--hidden-states for speculators alone", peer, "leave it out")
    opened: Peer
    if peer == "speculators":
        opened = speculators.SpeculatorsFolder(folder, progress, hidden_states)
    elif peer == "specforge":
        hidden_size = load_config(said.target).get_text_config().hidden_size
        opened = specforge.SpecforgeFolder(folder, hidden_size, progress)
    else:
        opened = deepspec.DeepspecFolder(folder)
    return take_in(opened, said, to, progress)


def _known(peer: str) -> None:
    if peer not in PEERS:
        raise ConfigError(f"a peer among {', '.join(PEERS)}", peer, "see docs/interchange.md")
