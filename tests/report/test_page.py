"""The page stands alone and says what was measured."""

import re
from pathlib import Path

from headrace.config import load_run_file
from headrace.report.page import write_report
from tests.report.test_results import a_run


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    write_report(folder, load_run_file(None))
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import", page)
    assert page.count("<svg") >= 3
    assert "1.90 tokens per target pass" in page
    assert "train.lr" in page


def test_a_drafter_that_changes_answers_is_called_out(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    path = folder.evaluation / "stage.json"
    path.write_text(path.read_text().replace('"greedy_identical": true', '"greedy_identical": false'))
    write_report(folder, load_run_file(None))
    assert "do not serve" in (tmp_path / "report.html").read_text()


def test_sampled_answers_are_not_called_different(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    path = folder.evaluation / "stage.json"
    path.write_text(path.read_text().replace('"greedy_identical": true', '"greedy_identical": null'))
    write_report(folder, load_run_file(None))
    page = (tmp_path / "report.html").read_text()
    assert "do not serve" not in page
    assert "sampled" in page


def test_a_streamed_run_has_a_page_without_states(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder.states / "stage.json").unlink()
    results = write_report(folder, load_run_file(None, ["source=grpc+tls://capture-1:8815"]))
    assert results["bytes_stored"] is None
    assert results["tau"] == 1.9
    assert "streamed: their sizes" in (tmp_path / "report.html").read_text()
