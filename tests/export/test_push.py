"""An upload to the hub, with a client that only remembers."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from headrace.errors import ExportError
from headrace.export.push import push


class Remembers:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._error = error

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self._error is not None:
            raise self._error
        self.calls.append(("create", {"repo_id": repo_id, "private": private, "exist_ok": exist_ok}))

    def upload_folder(self, **told: Any) -> str:
        self.calls.append(("upload", told))
        return f"https://hub/{told['repo_id']}/commit/1"


def whole(folder: Path) -> Path:
    for name in ("config.json", "model.safetensors", "README.md", "run.resolved.yaml", "stage.json"):
        (folder / name).write_text("{}")
    return folder


def test_config_weights_and_card_go_up_in_one_commit_and_nothing_else(tmp_path: Path) -> None:
    hub = Remembers()
    assert push(whole(tmp_path), "me/drafter", hub) == "https://hub/me/drafter/commit/1"
    assert [name for name, _ in hub.calls] == ["create", "upload"]
    assert hub.calls[0][1] == {"repo_id": "me/drafter", "private": True, "exist_ok": True}
    assert hub.calls[1][1]["allow_patterns"] == ["config.json", "model.safetensors", "README.md"]


def test_half_an_export_and_a_name_that_is_none_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    hub = Remembers()
    with pytest.raises(ExportError, match=r"README\.md"):
        push(tmp_path, "me/drafter", hub)
    with pytest.raises(ExportError, match="OWNER/NAME"):
        push(whole(tmp_path), "drafter", hub)
    assert not hub.calls


def test_what_the_hub_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no token"):
        push(whole(tmp_path), "me/drafter", Remembers(LocalTokenNotFoundError("no token")))
