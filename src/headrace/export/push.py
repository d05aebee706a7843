"""Upload an exported folder to a model repository of the Hugging Face hub.

In: a whole exported folder and a repository's name. Out: its address. The hub's own client does the work and finds
the user's credentials; it is imported only here, so that nothing else needs a network.
"""

import re
from pathlib import Path
from typing import Any, Protocol

from headrace.drafter.stock import CONFIG, WEIGHTS
from headrace.errors import ExportError
from headrace.export.card import CARD

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = (CONFIG, WEIGHTS, CARD)


class Hub(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Make a repository, or keep the one that is there."""
        ...

    def upload_folder(self, *, repo_id: str, folder_path: str, allow_patterns: list[str], commit_message: str) -> Any:
        """Upload files in one commit."""
        ...


def push(folder: Path, repository: str, hub: Hub | None = None) -> str:
    """Upload config, weights and card in one commit; a repository that has to be made is private.

    Returns: the address of the commit, as the hub gives it.
    Raises: ExportError for a name that is none, a folder that is not whole, and what the hub refuses.
    """
    if not _NAME.fullmatch(repository):
        raise ExportError("a repository as OWNER/NAME", repr(repository), "give --push OWNER/NAME")
    absent = [name for name in _FILES if not (folder / name).is_file()]
    if absent:
        raise ExportError(f"a whole export in {folder}", f"no {', '.join(absent)}", "run `headrace export` first")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api: Any = HfApi() if hub is None else hub
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            allow_patterns=list(_FILES),
            commit_message="DFlash drafter, exported by headrace",
        )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as exc:
        raise ExportError(
            f"the hub to take {repository}",
            " ".join(str(exc).split())[:300],
            "log in with `hf auth login`, and see the name",
        ) from exc
    return str(done)
