import shutil
from pathlib import Path

import pytest

from headrace.doctor.evidence import gather, read_served
from headrace.doctor.examine import examine
from headrace.errors import ConfigError
from tests.doctor.stories import THINKING, healthy, served, write_run


def test_a_run_on_disk_says_what_its_figures_say(tmp_path: Path) -> None:
    run = healthy(tmp_path / "prepared", metrics={"wait": 0.5}, served=served(THINKING))
    path = write_run(tmp_path, run)
    found = examine(gather(tmp_path, path))
    assert found == examine(run)
    assert {one.name for one in found} >= {"waits-for-data", "wrong-template"}


def test_a_running_run_is_read_as_far_as_it_got(tmp_path: Path) -> None:
    write_run(tmp_path, healthy(tmp_path / "prepared"))
    shutil.rmtree(tmp_path / "eval")
    shutil.rmtree(tmp_path / "states")
    assert [one.kind for one in examine(gather(tmp_path))] == ["note"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder of a run"):
        gather(tmp_path)


@pytest.mark.parametrize("line", ['{"prompt_ids": "abc"}', '{"gained": [1]}', '{"prompt_ids": [1, true]}'])
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "served.jsonl").write_text('{"prompt_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"served\.jsonl:2"):
        read_served(tmp_path / "served.jsonl")
