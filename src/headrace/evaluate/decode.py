"""The one loop of speculative decoding, for every proposer and for live and replayed targets alike.

In: a prompt as ids, a proposer that drafts, a verifier that runs the target. Out: the answer with what each target
pass gained. Greedy answers are the target's own; sampled ones follow its distribution. Plain decoding is the same
target, cached, one token a pass. The rule of acceptance: arXiv 2302.01318; what τ counts: drafter/acceptance.py.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from headrace.drafter.acceptance import accept_length
from headrace.errors import EvaluateError
from headrace.evaluate.sampling import Sampling, reject
from headrace.taps import Tap


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens [K] and the distributions [K, V] they were drawn from; None if nothing was drawn."""

    ids: tuple[int, ...]
    probs_KV: torch.Tensor | None


class Proposer(Protocol):
    """Drafts the tokens after an anchor."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The taps whose states it reads, in its order; none if it reads no states."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block, the anchor included."""
        ...

    def begin(self) -> None:
        """Forget the last answer."""
        ...

    def propose(self, ids: Sequence[int], states_TLH: torch.Tensor | None, num: int, sampling: Sampling) -> Proposal:
        """Draft at most `num` tokens after `ids`, whose last one is the anchor.

        Args:
            states_TLH: states of the tokens before the anchor that no earlier call of this answer brought.
        """
        ...


@dataclass(frozen=True)
class Verified:
    """What one target pass says about the T tokens it was fed.

    `own_ids` the target's greedy token after each (with `last_only`, after the last alone); `logits_TV` what it chose
    from, None in a replay; `states_TLH` the tapped states, None if no tap is watched.
    """

    own_ids: list[int]
    logits_TV: torch.Tensor | None
    states_TLH: torch.Tensor | None


class Verifier(Protocol):
    """A target that has seen a prefix of the answer and is fed more."""

    def feed(self, ids: Sequence[int], last_only: bool = False) -> Verified:
        """Run the target over `ids` after the tokens it holds."""
        ...

    def keep(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens."""
        ...


@dataclass
class Decoded:
    """One answer.

    `ids` its tokens, the end marker included; for each target pass after the prefill, `gained` the tokens it added
    to the answer (clipped at the end marker or the limit) and `offered` how many were drafted; `seconds` from the
    prompt to the last token, prefill included.
    """

    ids: list[int]
    gained: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Plain(Decoded):
    """A plain answer with what a replay and the identity rule need.

    `gaps` top-1 minus top-2 logit at each token; `states_TLH` of prompt and answer but its last token, if taps were
    watched; `prompt_ids` the prompt.
    """

    prompt_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    states_TLH: torch.Tensor | None = None


@torch.inference_mode()
def decode(
    verifier: Verifier,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling,
) -> Decoded:
    """Answer a prompt by drafting and verifying.

    The prefill chooses the first token, the first anchor. Then each pass verifies a block: the anchor with at most
    block_size - 1 drafted tokens, never more than may still be added. Drafted tokens that stand and the target's
    own next one are added; the last added is the next anchor.
    Raises: EvaluateError for an empty prompt or a limit below 1.
    """
    _check_request(prompt_ids, max_new_tokens)
    started = time.perf_counter()
    proposer.begin()
    prefill = verifier.feed(prompt_ids, last_only=True)
    ids = [*prompt_ids, _choose(prefill, sampling)]
    answer = Decoded([])
    states_TLH = prefill.states_TLH
    limit = len(prompt_ids) + max_new_tokens
    while len(ids) < limit and ids[-1] not in stop_ids:
        proposal = proposer.propose(ids, states_TLH, min(proposer.block_size - 1, limit - len(ids)), sampling)
        verified = verifier.feed([ids[-1], *proposal.ids])
        accepted, following = _accept(proposal, verified, sampling)
        added = _clip([*proposal.ids[:accepted], following], limit - len(ids), stop_ids)
        verifier.keep(len(ids) - 1 + len(added))
        ids += added
        states_TLH = None if verified.states_TLH is None else verified.states_TLH[: len(added)]
        answer.gained.append(len(added))
        answer.offered.append(len(proposal.ids))
    answer.ids = ids[len(prompt_ids) :]
    answer.seconds = time.perf_counter() - started
    return answer


@torch.inference_mode()
def decode_plain(
    verifier: Verifier, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int], sampling: Sampling
) -> Plain:
    """Answer a prompt with the target's own cached loop, one token a pass.

    Raises: EvaluateError for an empty prompt or a limit below 1.
    """
    _check_request(prompt_ids, max_new_tokens)
    started = time.perf_counter()
    answer = Plain([], prompt_ids=list(prompt_ids))
    seen = []
    fed: Sequence[int] = prompt_ids
    while True:
        verified = verifier.feed(fed, last_only=True)
        if verified.states_TLH is not None:
            seen.append(verified.states_TLH)
        answer.ids.append(_choose(verified, sampling))
        answer.gaps.append(_gap(verified))
        if answer.ids[-1] in stop_ids or len(answer.ids) >= max_new_tokens:
            break
        fed = answer.ids[-1:]
    answer.seconds = time.perf_counter() - started
    answer.gained = [1] * (len(answer.ids) - 1)
    answer.offered = [0] * len(answer.gained)
    answer.states_TLH = torch.cat(seen) if seen else None
    return answer


def _choose(verified: Verified, sampling: Sampling) -> int:
    """The token after the last one fed."""
    if sampling.greedy:
        return verified.own_ids[-1]
    return sampling.draw(sampling.probabilities(_logits(verified)[-1:]))[0]


def _accept(proposal: Proposal, verified: Verified, sampling: Sampling) -> tuple[int, int]:
    """How many drafted tokens stand, and the target's token after them."""
    if not sampling.greedy:
        return reject(list(proposal.ids), proposal.probs_KV, sampling.probabilities(_logits(verified)), sampling)
    accepted = accept_length(proposal.ids, verified.own_ids)
    return accepted, verified.own_ids[accepted]


def _gap(verified: Verified) -> float:
    best_2 = _logits(verified)[-1].float().topk(2).values
    return float(best_2[0] - best_2[1])


def _logits(verified: Verified) -> torch.Tensor:
    if verified.logits_TV is None:
        raise EvaluateError("a target with logits", "a replayed answer", "sampling and plain decoding need it live")
    return verified.logits_TV


def _clip(added: list[int], room: int, stop_ids: Collection[int]) -> list[int]:
    """Cut what a block adds at the limit and behind the first end marker."""
    added = added[:room]
    for place, token in enumerate(added):
        if token in stop_ids:
            return added[: place + 1]
    return added


def _check_request(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if not prompt_ids or max_new_tokens < 1:
        raise EvaluateError(
            "a prompt of at least one token and a limit of at least one",
            f"{len(prompt_ids)} tokens and a limit of {max_new_tokens}",
            "leave empty prompts out",
        )
