"""A person sees which tokens are trained."""

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import PrepareError
from headrace.prepare.mask import masked_samples
from headrace.prepare.prepared import Draft, write_prepared
from headrace.prepare.show import described_row, show_row
from headrace.prepare.template import ChatTemplate
from headrace.record import sample_id
from tests.prepare.tiny import chat, tokenizer


def test_trained_text_is_green_and_only_that(tmp_path: Path) -> None:
    made = tokenizer()
    made.save_pretrained(tmp_path / "model")
    ((ids, mask),) = masked_samples(ChatTemplate(made), chat("user: hello you", "assistant: yes the cat"))
    write_prepared(tmp_path / "set", [Draft(sample_id(ids, mask), ids, mask, "s", False)], {"fingerprint": "f"})
    text = show_row(tmp_path / "set", tmp_path / "model", 0)
    green = "".join(text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style))
    assert green.split() == ["yes", "the", "cat", "<|end|>"]
    assert f"{int(np.sum(mask))} of {len(ids)} tokens trained" in text.plain
    told = described_row(tmp_path / "set", tmp_path / "model", 0)
    assert [run["trained"] for run in told["runs"]] == [False, True]
    assert told["runs"][1]["text"].split() == green.split()
    with pytest.raises(PrepareError, match="a row from 0 to 0"):
        show_row(tmp_path / "set", tmp_path / "model", 1)
