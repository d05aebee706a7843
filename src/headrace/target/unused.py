"""A row of the embedding that no text produces: what a mask token needs.

In: a target's tokenizer and the rows of its embedding. Out: the first row beyond the tokenizer's ids; where the
tokenizer fills every row, the first token that its own name calls reserved or unused; or none.
"""

import re
from typing import Any

_SPARE = re.compile(r"reserved|unused|<\|?extra|placeholder", re.IGNORECASE)


def unused_row(tokenizer: Any, num_rows: int) -> int | None:
    """The first such row.

    Args:
        tokenizer: of transformers; only `get_vocab` and the special ids are asked.
        num_rows: rows of the target's embedding, its config's vocab_size.
    """
    vocab: dict[str, int] = tokenizer.get_vocab()
    first = max(vocab.values(), default=-1) + 1
    if first < num_rows:
        return first
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    spare = [id for token, id in vocab.items() if _SPARE.search(token) and id not in taken and id < num_rows]
    return min(spare, default=None)
