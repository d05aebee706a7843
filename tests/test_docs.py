"""The docs name every command and setting, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from headrace.cli.main import app
from headrace.config import settings_table

ROOT = Path(__file__).parent.parent
# Wrong hidden states; templates, masks and lengths; training.
CASES = [
    31, 32, 33, 34, 35, 38, 39, 42, 43, 44, 45, 46,
    47, 48, 50, 51, 53, 55, 56, 57, 60, 61,
    65, 66, 67, 69, 70, 72, 73, 74, 77, 78, 81, 84, 85, 86, 87,
]  # fmt: skip
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


def test_every_test_named_in_the_docs_exists() -> None:
    named = {
        (page.name, *found) for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    }
    assert len(named) > 50
    for page, file, name in sorted(named):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{page}: {file}::{name}"


def test_every_case_stands_once_with_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (B\d+) \[.*\| (.+) \|$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    assert sorted(case for case, _ in rows) == sorted(f"B{number}" for number in CASES)
    assert all("`tests/" in here or here.startswith("cannot happen: ") for _, here in rows)


def test_every_make_target_in_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]+[a-z])", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
