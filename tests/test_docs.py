"""The docs name every command and setting, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from headrace.cli.main import app
from headrace.config import settings_table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_run_file_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "run-file.md").read_text().endswith(settings_table()), "run: headrace settings"


def test_every_command_is_in_the_readme_or_the_docs() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        assert f"headrace {name}" in text, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_make_target_in_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]+[a-z])", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
