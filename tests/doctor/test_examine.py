from pathlib import Path
from typing import Any

import pytest

from headrace.doctor.examine import examine
from tests.doctor.stories import THINKING, drift, healthy, served

# Each story: what is changed in a healthy run, and what the doctor must say; nothing else but notes.
STORIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "states of other tokens": (
        {"tau": 1.4, "metrics": {"ce": 3.98, "tau": 1.4}, "served": served()},
        "near-the-floor",
        "fault",
    ),
    "learned by heart": ({"tau": 1.4, "metrics": {"tau": 1.4}, "served": served()}, "near-the-floor", "lack of data"),
    "hardly trained": (
        {"tau": 1.4, "metrics": {"ce": 3.98, "tau": 1.4, "steps": 40}, "served": served()},
        "near-the-floor",
        "lack of data",
    ),
    "served by another head": ({"tau": 1.0, "served": served()}, "tau-of-one", "fault"),
    "learns nothing": (
        {"tau": 1.0, "metrics": {"ce": 9.0, "hit_rate": 0.0, "tau": 1.0}, "served": served()},
        "tau-of-one",
        "fault",
    ),
    "other states in the engine": ({"served": served(tau=1.5)}, "served-below-trained", "fault"),
    "other states at evaluation": ({"tau": 1.7, "served": served()}, "served-below-trained", "fault"),
    "no long chats": ({"weak": {"long": 1.4}, "long_share": 0.02}, "falls-with-length", "lack of data"),
    "rotary settings": ({"weak": {"long": 1.4}}, "falls-with-length", "fault"),
    "slow disk": ({"metrics": {"wait": 0.45}}, "waits-for-data", "speed"),
    "codec of other data": ({"captured": drift(40)}, "codec-drift", "fault"),
    "thinking at the server": ({"served": served(THINKING)}, "wrong-template", "fault"),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_planted_story_is_named(tmp_path: Path, story: str) -> None:
    changes, name, kind = STORIES[story]
    found = [one for one in examine(healthy(tmp_path, **changes)) if one.kind != "note"]
    assert [(one.name, one.kind) for one in found if one.name == name] == [(name, kind)]
    others = {one.name for one in found} - {name}
    # A part that is weak enough drags the whole evaluation below training, and may be told so too.
    assert not others - ({"served-below-trained"} if "weak" in changes else set()), found
    assert all(one.evidence and one.next_step for one in found)


@pytest.mark.parametrize(("share", "kind"), [(0.02, "lack of data"), (0.4, "note")])
def test_a_weak_language_is_named_with_its_share_of_the_data(tmp_path: Path, share: float, kind: str) -> None:
    found = {one.name: one for one in examine(healthy(tmp_path, weak={"ru": 1.4}, russian_share=share))}
    assert found["falls-by-language"].kind == kind
    assert "CYRILLIC" in found["falls-by-language"].what
    assert found["falls-by-source"].kind == kind


def test_a_run_that_gets_worse_lacks_data(tmp_path: Path) -> None:
    run = healthy(tmp_path, taus=[(step, step * 4000, 2.4 - abs(step - 160) / 400) for step in range(40, 401, 40)])
    assert "gets-worse" in {one.name for one in examine(run)}


def test_a_healthy_run_gets_an_outlook_and_nothing_else(tmp_path: Path) -> None:
    found = examine(healthy(tmp_path))
    assert [(one.name, one.kind) for one in found] == [("forecast", "note")]


def test_a_run_that_has_just_begun_is_not_judged(tmp_path: Path) -> None:
    run = healthy(tmp_path, metrics={"steps": 3}, results={}, prompts=(), taus=[(0, 0.0, 1.0)], served=())
    assert examine(run) == []
