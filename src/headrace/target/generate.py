"""Batched answers: prompts of similar length together, finished rows leave, waiting prompts take their place.

In: prompts as ids. Out: the answer to each, in the order asked. A pure function of the whole batch of prompts, the
settings and the build: greedy answers come out the same each time; which prompts share a batch moves the last bits.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from headrace.errors import TargetError
from headrace.record import digest
from headrace.target.base import Generated
from headrace.target.rows import Rows, row_attention

PREFILL_TOKENS = 4096


@dataclass
class _Answer:
    """One answer in the making."""

    index: int
    prompt: Sequence[int]
    limit: int
    rng: torch.Generator
    ids: list[int] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Tokens in the row: all but the last, which the next pass feeds."""
        return len(self.prompt) + len(self.ids) - 1


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen, and where answers end."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    top_p: float
    seed: int


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    batch_size: int,
    told: Callable[[int, int], None],
) -> list[Generated]:
    """Answer prompts, at most `batch_size` at a time.

    Args:
        told: called now and then with the numbers of tokens written and answers finished since the last call.
    Raises: TargetError for an empty prompt, or one that leaves no room in the target's positions.
    """
    _check(prompts, decoding, model.config.get_text_config().max_position_embeddings)
    if not prompts:
        return []
    longest = max(len(p) for p in prompts) + decoding.max_new_tokens
    batch = _Batch(model, Rows(model, min(batch_size, len(prompts)), longest), decoding)
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    waiting = [
        _Answer(i, prompts[i], decoding.max_new_tokens, _rng(decoding.seed, prompts[i])) for i in reversed(order)
    ]
    done: list[_Answer] = []
    num_rows = min(batch_size, len(prompts))
    with row_attention(model):
        while waiting or batch.answers:
            free = num_rows - len(batch.answers)
            if waiting and free >= min(len(waiting), max(1, num_rows // 8)):
                batch.admit([waiting.pop() for _ in range(min(free, len(waiting)))])
            else:
                batch.step()
            finished = batch.release()
            told(batch.num_written, len(finished))
            batch.num_written = 0
            done += finished
    stops = decoding.stop_ids
    done.sort(key=lambda answer: answer.index)
    return [Generated(tuple(a.ids), "stop" if a.ids[-1] in stops else "length") for a in done]


class _Batch:
    """The answers that are being written, one a row."""

    def __init__(self, model: PreTrainedModel, rows: Rows, decoding: Decoding) -> None:
        self._model = model
        self._rows = rows
        self._decoding = decoding
        self.answers: list[_Answer] = []
        self.num_written = 0

    def admit(self, new: Sequence[_Answer]) -> None:
        """Prefill prompts, longest first, at most PREFILL_TOKENS padded tokens (or one prompt) a pass."""
        start = 0
        while start < len(new):
            size = max(1, PREFILL_TOKENS // len(new[start].prompt))
            self._prefill(new[start : start + size])
            start += size

    def _prefill(self, new: Sequence[_Answer]) -> None:
        lengths = [len(answer.prompt) for answer in new]
        ids = torch.zeros(len(new), max(lengths), dtype=torch.long)
        for n, answer in enumerate(new):
            ids[n, : lengths[n]] = torch.tensor(answer.prompt)
        self._rows.fill(range(len(self.answers), len(self.answers) + len(new)))
        last = torch.tensor(lengths, device=self._model.device) - 1
        ends, which = torch.unique(last, return_inverse=True)
        causal = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=self._model.device).tril()
        logits_NEV = self._model(
            input_ids=ids.to(self._model.device),
            attention_mask=causal,
            position_ids=torch.arange(ids.shape[1], device=self._model.device)[None],
            past_key_values=self._rows,
            use_cache=True,
            logits_to_keep=ends,
        ).logits
        self.answers += new
        self._choose(new, logits_NEV[torch.arange(len(new), device=which.device), which])

    def step(self) -> None:
        """Write one token of every answer."""
        positions, mask = self._rows.step([answer.num_cached for answer in self.answers])
        ids = torch.tensor([answer.ids[-1] for answer in self.answers], device=self._model.device)
        logits_N1V = self._model(
            input_ids=ids[:, None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._rows,
            use_cache=True,
        ).logits
        self._choose(self.answers, logits_N1V[:, 0])

    def _choose(self, answers: Sequence[_Answer], logits_NV: torch.Tensor) -> None:
        if self._decoding.temperature == 0:
            chosen = logits_NV.argmax(-1).tolist()
        else:
            chosen = _draw(logits_NV, self._decoding, [answer.rng for answer in answers])
        for answer, token in zip(answers, chosen, strict=True):
            answer.ids.append(token)
        self.num_written += len(answers)

    def release(self) -> list[_Answer]:
        """Take finished answers out; the last row moves into each gap."""
        finished = []
        for n in reversed(range(len(self.answers))):
            answer = self.answers[n]
            if answer.ids[-1] not in self._decoding.stop_ids and len(answer.ids) < answer.limit:
                continue
            finished.append(answer)
            last = self.answers.pop()
            if last is not answer:
                self._rows.move(len(self.answers), n, last.num_cached)
                self.answers[n] = last
        return finished


def _draw(logits_NV: torch.Tensor, decoding: Decoding, rngs: Sequence[torch.Generator]) -> list[int]:
    """Draw one token a row from the nucleus of the tempered distribution; each answer has its own generator."""
    probs, ids = (logits_NV.float() / decoding.temperature).softmax(-1).sort(-1, descending=True)
    below = probs.cumsum(-1) - probs
    probs = probs.masked_fill(below >= decoding.top_p, 0.0)
    rising = probs.cumsum(-1)
    uniform = torch.cat([torch.rand(1, generator=rng) for rng in rngs]).to(rising.device)
    place = torch.searchsorted(rising, uniform[:, None] * rising[:, -1:], right=True)
    kept = (probs > 0).sum(-1, keepdim=True)
    chosen: list[int] = ids.gather(-1, torch.minimum(place, kept - 1))[:, 0].tolist()
    return chosen


def _rng(seed: int, prompt: Sequence[int]) -> torch.Generator:
    """A generator of the seed and the prompt alone, whatever else is in the batch."""
    key = digest(seed.to_bytes(8, "little"), b"".join(int(i).to_bytes(4, "little") for i in prompt))
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


def _check(prompts: Sequence[Sequence[int]], decoding: Decoding, num_positions: int) -> None:
    for n, prompt in enumerate(prompts):
        if not prompt:
            raise TargetError("prompts of at least one token", f"prompt {n} is empty", "drop it in prepare")
        if len(prompt) + decoding.max_new_tokens > num_positions:
            raise TargetError(
                f"prompt and answer within the target's {num_positions} positions",
                f"prompt {n} of {len(prompt)} tokens and max_new_tokens {decoding.max_new_tokens}",
                "lower regenerate.max_new_tokens or prepare.max_tokens",
            )


def stop_ids(*sources: int | Collection[int] | None) -> frozenset[int]:
    """Join end-of-answer ids: each source one id, several, or none."""
    found: set[int] = set()
    for source in sources:
        if source is not None:
            found |= {source} if isinstance(source, int) else set(source)
    return frozenset(found)
