"""`headrace speculators train` where speculators is not installed; with it: tests/plugins/test_speculators.py."""

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.speculators import given


@pytest.mark.skipif(importlib.util.find_spec("hs_connectors") is not None, reason="hs-connectors is installed here")
def test_without_their_packages_the_error_says_what_to_install(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["speculators", "train", "--states", str(tmp_path), "--data-path", "x"])
    assert result.exit_code == 2
    assert "hs-connectors" in result.stderr


def test_a_flag_is_found_alone_and_with_its_value() -> None:
    assert given("--config", ["--a", "--config", "x"])
    assert given("--config", ["--config=x"])
    assert not given("--config", ["--configure", "--a=--config"])
