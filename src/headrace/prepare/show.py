"""One sample for the eye: its text with the loss mask in colour.

In: a row of a prepared set. Out: a rich Text; trained tokens green, the rest grey, special tokens visible.
"""

from collections.abc import Iterator
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
    return show_sample(_sample(folder, row), load_tokenizer(model))


def described_row(folder: Path, model: Path | str, row: int) -> dict[str, Any]:
    """The same row for a program: `row`, `id`, `source`, `heldout`, and `runs` of text with whether it is trained.

    Raises: as show_row does.
    """
    sample, tokenizer = _sample(folder, row), load_tokenizer(model)
    return {
        "row": sample.row,
        "id": sample.id.hex(),
        "source": sample.source,
        "heldout": sample.heldout,
        "num_tokens": sample.num_tokens,
        "num_trained": sample.num_trained,
        "runs": [{"text": text, "trained": trained} for text, trained in _runs(sample, tokenizer)],
    }


def _sample(folder: Path, row: int) -> Sample:
    prepared = PreparedSet.open(folder)
    if not 0 <= row < prepared.num_samples:
        raise PrepareError(f"a row from 0 to {prepared.num_samples - 1}", str(row), "give another --row")
    return prepared.sample(row)


def show_sample(sample: Sample, tokenizer: Any) -> Text:
    """Render a sample: a heading, then its tokens in runs of trained (green) and not trained (grey)."""
    held = ", held out" if sample.heldout else ""
    heading = f"row {sample.row}  id {sample.id.hex()}  {sample.source}{held}\n"
    text = Text(heading + f"{sample.num_trained} of {sample.num_tokens} tokens trained\n\n", style="bold")
    for said, trained in _runs(sample, tokenizer):
        text.append(said, style="bold green" if trained else "bright_black")
    return text


def _runs(sample: Sample, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    mask = sample.loss_mask
    start = 0
    for place in range(1, sample.num_tokens + 1):
        if place == sample.num_tokens or mask[place] != mask[start]:
            yield str(tokenizer.decode(sample.input_ids[start:place])), bool(mask[start])
            start = place
