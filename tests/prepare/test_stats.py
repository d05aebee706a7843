"""Shares by role and source are counted from tokens."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headrace.prepare import stats
from headrace.prepare.mask import masked_samples
from headrace.prepare.prepared import Draft, write_prepared
from headrace.prepare.stats import UNASSIGNED, roles_of, shares, table
from headrace.prepare.template import ChatTemplate
from headrace.record import Sample, sample_id
from tests.prepare.test_turns import CALLS, END, TOOL_CHAT
from tests.prepare.tiny import byte_tokenizer, chat


def draft(made: Any, messages: list[dict[str, Any]], source: str, heldout: bool = False) -> Draft:
    ((ids, mask),) = masked_samples(ChatTemplate(made), messages)
    return Draft(sample_id(ids, mask), ids, mask, source, heldout, json.dumps(messages))


def test_tokens_are_counted_by_role_and_source(tmp_path: Path) -> None:
    made = byte_tokenizer(CALLS, END)
    made.save_pretrained(tmp_path / "model")
    plain: Any = chat("system: four", "user: hi", "assistant: yes")
    write_prepared(tmp_path / "set", [draft(made, plain, "a"), draft(made, TOOL_CHAT, "b", True)], {"fingerprint": "f"})
    found = shares(tmp_path / "set", tmp_path / "model")
    assert found["roles"]["system"] == {"samples": 1, "tokens": 4, "trained": 0}
    assert found["roles"]["user"] == {"samples": 2, "tokens": 4, "trained": 0}
    assert found["roles"]["tool"] == {"samples": 1, "tokens": 5, "trained": 0}
    assert found["roles"]["template"]["trained"] == 0
    own = found["roles"]["assistant"]
    assert own["tokens"] == own["trained"] == sum(source["trained"] for source in found["sources"].values())
    assert {name: (s["samples"], s["held_out"]) for name, s in found["sources"].items()} == {"a": (1, 0), "b": (1, 1)}
    assert sum(role["tokens"] for role in found["roles"].values()) == sum(
        s["tokens"] for s in found["sources"].values()
    )


def test_trained_tokens_of_a_user_show(tmp_path: Path) -> None:
    made = byte_tokenizer(CALLS, END)
    messages: Any = chat("user: hi", "assistant: yes")
    good = draft(made, messages, "a")
    everything = Sample(0, b"", good.input_ids, np.ones_like(good.loss_mask), "a", False)
    named = roles_of(everything, messages, made)
    assert named.count("user") == 2
    odd = Sample(0, b"", good.input_ids[::-1].copy(), good.loss_mask, "a", False)
    made.add_tokens(["sey"])  # tokens that their own text would not give
    assert set(roles_of(odd, messages, made)) == {UNASSIGNED}


def test_a_large_set_is_sampled_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = byte_tokenizer(CALLS, END)
    made.save_pretrained(tmp_path / "model")
    drafts = [draft(made, chat(f"user: q{i}", "assistant: yes"), "a") for i in range(9)]  # type: ignore[arg-type]
    write_prepared(tmp_path / "set", drafts, {"fingerprint": "f"})
    monkeypatch.setattr(stats, "MOST_ROWS", 4)
    found = shares(tmp_path / "set", tmp_path / "model")
    assert (found["rows_for_roles"], found["num_samples"], found["sources"]["a"]["samples"]) == (4, 9, 9)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(*table(found))
    assert "from 4 rows" in console.export_text()
