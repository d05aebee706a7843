from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import TargetError
from headrace.target.generate import Decoding, generate, stop_ids
from headrace.testing.tiny_target import EOS_ID, tiny_model
from tests.target.conftest import LoadTiny

MODEL = tiny_model("qwen3")
PROMPTS = st.lists(st.lists(st.integers(3, 63), min_size=1, max_size=9), min_size=1, max_size=9)
# most tokens end an answer, so that rows leave and are filled again all the time
STOPS = frozenset(range(2, 20))


def greedy(max_new_tokens: int, stops: frozenset[int] = STOPS) -> Decoding:
    return Decoding(max_new_tokens, stops, temperature=0.0, top_p=1.0, seed=0)


def one_by_one(prompt: list[int], max_new_tokens: int) -> tuple[list[int], str]:
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + max_new_tokens:
            ids.append(int(MODEL(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in STOPS:
                return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"


@settings(max_examples=20, deadline=None)
@given(PROMPTS, st.integers(1, 4), st.integers(1, 6))
def test_every_answer_is_the_one_the_model_gives_alone(prompts: list[list[int]], rows: int, limit: int) -> None:
    answers = generate(MODEL, prompts, greedy(limit), rows, lambda *_: None)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (list(answer.ids), answer.finish_reason) == one_by_one(prompt, limit)


def test_greedy_answers_equal_those_of_transformers(load_tiny: LoadTiny) -> None:
    target = load_tiny("llama-untied")
    prompts = [[5, 9, 11], [40, 3], [8, 8, 8, 21]]
    for prompt, answer in zip(prompts, target.generate(prompts, 12, 0.0, 1.0, 0), strict=True):
        ids = torch.tensor([prompt])
        whole = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert list(answer.ids) == whole[0, len(prompt) :].tolist()


def test_the_end_marker_is_kept_and_the_limit_is_told(load_tiny: LoadTiny) -> None:
    target = load_tiny()
    assert target.stop_ids == {EOS_ID}
    (cut,) = generate(MODEL, [[3, 4]], greedy(3, frozenset()), 1, lambda *_: None)
    assert (len(cut.ids), cut.finish_reason) == (3, "length")
    (stopped,) = generate(MODEL, [[3, 4]], greedy(3, frozenset({cut.ids[1]})), 1, lambda *_: None)
    assert (stopped.ids, stopped.finish_reason) == (cut.ids[: cut.ids.index(cut.ids[1]) + 1], "stop")


def test_tokens_and_answers_are_told_as_they_are_written() -> None:
    told: list[tuple[int, int]] = []
    answers = generate(MODEL, [[3, 4], [5], [6, 7, 8]], greedy(5), 2, lambda *new: told.append(new))
    assert sum(tokens for tokens, _ in told) == sum(len(answer.ids) for answer in answers)
    assert sum(finished for _, finished in told) == 3
    assert told[0][1] < 3


def sampled(seed: int, temperature: float = 1.5, top_p: float = 1.0, limit: int = 6) -> Decoding:
    return Decoding(limit, frozenset(), temperature, top_p, seed)


def test_a_sampled_answer_depends_on_seed_and_prompt_not_on_its_company() -> None:
    prompts = [[3, 4], [5], [6, 7, 8]]
    together = generate(MODEL, prompts, sampled(1), 3, lambda *_: None)
    alone = [generate(MODEL, [p], sampled(1), 1, lambda *_: None)[0] for p in prompts]
    assert together == alone
    assert together != generate(MODEL, prompts, sampled(2), 3, lambda *_: None)


def test_samples_follow_the_tempered_nucleus() -> None:
    with torch.no_grad():
        probs = (MODEL(torch.tensor([[9, 10]])).logits[0, -1] / 2.0).softmax(-1)
    ordered = probs.argsort(descending=True).tolist()
    nucleus: list[int] = []
    while sum(float(probs[i]) for i in nucleus) < 0.6:
        nucleus.append(ordered[len(nucleus)])
    drawn = Counter(
        generate(MODEL, [[9, 10]], sampled(seed, 2.0, 0.6, limit=1), 1, lambda *_: None)[0].ids[0]
        for seed in range(400)
    )
    assert set(drawn) <= set(nucleus)
    first = float(probs[nucleus[0]]) / sum(float(probs[i]) for i in nucleus)
    assert abs(drawn[nucleus[0]] / 400 - first) < 4 * (first * (1 - first) / 400) ** 0.5


@pytest.mark.parametrize(("prompts", "limit", "found"), [([[3], []], 4, "prompt 1 is empty"), ([[3] * 510], 4, "510")])
def test_prompts_without_tokens_or_without_room_are_refused(prompts: list[list[int]], limit: int, found: str) -> None:
    with pytest.raises(TargetError, match=found):
        generate(MODEL, prompts, greedy(limit), 2, lambda *_: None)


def test_no_prompts_no_answers() -> None:
    assert generate(MODEL, [], greedy(3), 2, lambda *_: None) == []


def test_stop_ids_join_one_several_and_none() -> None:
    assert stop_ids(None, 3, [4, 5]) == {3, 4, 5}
