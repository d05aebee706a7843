"""One sample for the eye: its text with the loss mask in colour.

In: a row of a prepared set. Out: a rich Text; trained tokens green, the rest grey, special tokens visible.
"""

from pathlib import Path
from typing import Any

from rich.text import Text

from headrace.errors import PrepareError
from headrace.prepare.model_files import load_tokenizer
from headrace.prepare.prepared import PreparedSet
from headrace.record import Sample


def show_row(folder: Path, model: Path | str, row: int) -> Text:
    """Render a row of the prepared set in `folder`.

    Raises: PrepareError beyond the set; TargetError without a tokenizer.
    """
    prepared = PreparedSet.open(folder)
    if not 0 <= row < prepared.num_samples:
        raise PrepareError(f"a row from 0 to {prepared.num_samples - 1}", str(row), "give another --row")
    return show_sample(prepared.sample(row), load_tokenizer(model))


def show_sample(sample: Sample, tokenizer: Any) -> Text:
    """Render a sample: a heading, then its tokens in runs of trained (green) and not trained (grey)."""
    held = ", held out" if sample.heldout else ""
    heading = f"row {sample.row}  id {sample.id.hex()}  {sample.source}{held}\n"
    text = Text(heading + f"{sample.num_trained} of {sample.num_tokens} tokens trained\n\n", style="bold")
    mask = sample.loss_mask
    start = 0
    for place in range(1, sample.num_tokens + 1):
        if place == sample.num_tokens or mask[place] != mask[start]:
            style = "bold green" if mask[start] else "bright_black"
            text.append(tokenizer.decode(sample.input_ids[start:place]), style=style)
            start = place
    return text
