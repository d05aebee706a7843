"""Choosing tokens: greedy, or sampled so that a drafter changes the speed and never the distribution.

In: logits of the target and of a proposer, and a generator. Out: probabilities, chosen tokens, and how many drafted
tokens stand. Source: speculative sampling, arXiv 2302.01318 algorithm 2 and arXiv 2211.17192 appendix A.
"""

from dataclasses import dataclass, field

import torch

from headrace.errors import EvaluateError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy and draws nothing from the generator."""

    temperature: float = 0.0
    top_p: float = 1.0
    rng: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise EvaluateError(
                "temperature >= 0 and 0 < top_p <= 1",
                f"temperature {self.temperature} and top_p {self.top_p}",
                "0 is greedy; top_p 1 keeps every token",
            )

    @property
    def greedy(self) -> bool:
        """Whether the best logit is always taken."""
        return self.temperature == 0

    def probabilities(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The distribution that is sampled: float32 [N, V], each row summing to 1.

        With top_p, the fewest best tokens whose mass reaches top_p keep theirs, and the rest is zero.
        """
        probs_NV = torch.softmax(logits_NV.float() / self.temperature, dim=-1)
        if self.top_p >= 1:
            return probs_NV
        best_NV, order_NV = probs_NV.sort(dim=-1, descending=True)
        mass_before_NV = best_NV.cumsum(-1) - best_NV
        nucleus_NV = best_NV.masked_fill(mass_before_NV >= self.top_p, 0.0)
        kept_NV = torch.zeros_like(probs_NV).scatter(-1, order_NV, nucleus_NV)
        return kept_NV / kept_NV.sum(-1, keepdim=True)

    def draw(self, probs_NV: torch.Tensor) -> list[int]:
        """One token for each row of probabilities."""
        return torch.multinomial(probs_NV, 1, generator=self.rng)[:, 0].tolist()


def reject(
    draft_ids: list[int], draft_KV: torch.Tensor | None, target_KV: torch.Tensor, sampling: Sampling
) -> tuple[int, int]:
    """Keep drafted tokens by rejection sampling and draw the token that follows them.

    Args:
        draft_ids: K drafted tokens.
        draft_KV: float32 [K, V], the distributions they were drawn from; None for a proposer that does not draw
            (each drafted token then has probability 1).
        target_KV: float32 [K + 1, V], the target's distributions at the same places and at the one after.
    Returns: how many drafted tokens stand, and the token after them. Both together follow the target's distribution:
        token x stands with probability min(1, p(x) / q(x)); at the first that falls, max(0, p - q) is drawn from.
    """
    for slot, token in enumerate(draft_ids):
        wanted = float(target_KV[slot, token])
        offered = 1.0 if draft_KV is None else float(draft_KV[slot, token])
        if float(torch.rand((), generator=sampling.rng)) * offered < wanted:
            continue
        rest_V = target_KV[slot].clone()
        if draft_KV is None:
            rest_V[token] = 0
        else:
            rest_V = (rest_V - draft_KV[slot]).clamp_min(0)
        # Rounding can leave nothing where p and q agree; then p itself is the limit.
        rest_V = rest_V if float(rest_V.sum()) > 0 else target_KV[slot]
        return slot, sampling.draw(rest_V[None])[0]
    return len(draft_ids), sampling.draw(target_KV[-1:])[0]
