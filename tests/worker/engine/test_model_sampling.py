"""Test that sampling matches a naive reference, is reproducible, and ignores the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from splitpoint.v1 import types_pb2
from worker_service.engine.sampling import (
    Choice,
    NonFiniteLogits,
    PendingChoices,
    Sampling,
    SamplingRow,
    accepted,
    choose,
    uniform,
)
from worker_service.structured.masks import mask_with

VOCABULARY = 50


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 3


def ids(choices: list[Choice | NonFiniteLogits]) -> list[int]:
    return [choice.token_id for choice in choices if isinstance(choice, Choice)]


def naive_distribution(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Return tokens and probabilities left by top_k, top_p and min_p, in plain Python."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(weights[token] for token in order)
    probability = {token: weights[token] / total for token in order}
    kept: list[int] = []
    reached = 0.0
    for token in order:
        if kept and sampling.top_p < 1 and reached >= sampling.top_p:
            break
        kept.append(token)
        reached += probability[token]
    kept = [t for t in kept if probability[t] >= sampling.min_p * probability[order[0]]]
    total = sum(probability[token] for token in kept)
    return {token: probability[token] / total for token in kept}


def test_greedy_is_argmax_and_leaves_logits_alone() -> None:
    logits = logits_of(6)
    before = logits.clone()
    rows = [SamplingRow(Sampling()) for _ in range(6)]
    assert ids(choose(logits, rows)) == logits.argmax(-1).tolist()
    rows[2] = SamplingRow(Sampling(logit_bias={7: 100.0}, logprobs=2))
    assert ids(choose(logits, rows))[2] == 7
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1e-6),
    ],
)
def test_draws_follow_the_naive_distribution(sampling: Sampling) -> None:
    logits = logits_of(1, seed=3)
    wanted = naive_distribution(logits[0].double().tolist(), sampling)
    count = 1500
    # Each position is another draw of the same distribution.
    rows = [SamplingRow(sampling, tokens=[0] * position) for position in range(count)]
    counted = Counter(ids(choose(logits.expand(count, -1), rows)))
    assert set(counted) <= set(wanted)
    for token, probability in wanted.items():
        spread = math.sqrt(count * probability * (1 - probability))
        assert abs(counted[token] - count * probability) <= 5 * spread + 1


@pytest.mark.parametrize("flat", [False, True])
def test_nucleus_of_a_wide_vocabulary(flat: bool) -> None:
    """Find the nucleus among the likeliest tokens, or in all of them."""
    generator = torch.Generator().manual_seed(6)
    # Coarse values, so that many tokens are exactly equal.
    logits = torch.randint(40, (1, 3000), generator=generator) * (0.01 if flat else 0.5)
    sampling = Sampling(temperature=1.0, top_p=0.9)
    kept = set(naive_distribution(logits[0].double().tolist(), sampling))
    assert (len(kept) > 1024) == flat
    rows = [SamplingRow(sampling, tokens=[0] * position) for position in range(300)]
    assert set(ids(choose(logits.expand(300, -1), rows))) <= kept


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = logits_of(3, seed=4)
    rows = [
        SamplingRow(Sampling(temperature=1.0, seed=seed), tokens=[1, 2, 3, seed])
        for seed in (11, -5, 2**62)
    ]
    together = ids(choose(logits, rows))
    alone = [ids(choose(logits[i : i + 1], rows[i : i + 1]))[0] for i in range(3)]
    backwards = ids(choose(logits.flip(0), rows[::-1]))[::-1]
    assert together == alone == backwards
    assert uniform(1, 2) == uniform(1, 2)
    points = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(points) == 400
    assert all(0 <= point < 1 for point in points)


def test_drafts_count_as_tokens() -> None:
    logits = logits_of(1, seed=6)
    sampling = Sampling(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        min_tokens=5,
        stop_token_ids=(3,),
        logprobs=1,
    )
    tokens = [4, 7, 7, 1, 9, 4]
    wanted = choose(logits, [SamplingRow(sampling, tokens, 2, (0,))])
    for known in (2, 4, 6):
        row = SamplingRow(sampling, tokens[:known], 2, (0,), tokens[known:])
        assert choose(logits, [row]) == wanted


def test_choices_hold_up_to_the_first_that_differs_from_its_draft() -> None:
    asked = []

    def choices(*tokens: int | None) -> Iterator[Choice | NonFiniteLogits]:
        for token in tokens:
            asked.append(token)
            yield NonFiniteLogits() if token is None else Choice(token)

    def held(drafts: list[int], *tokens: int | None) -> list[int] | None:
        found = accepted(choices(*tokens), drafts)
        return None if isinstance(found, NonFiniteLogits) else [each.token_id for each in found]

    assert held([], 5) == [5]
    assert held([5, 6], 5, 6, 7) == [5, 6, 7]
    assert held([5, 6], 5, 9, 7) == [5, 9]
    assert held([5, 6], 4, 6, 7) == [4]
    # Rows behind are not usable, or not finite.
    assert held([5, 6], 5) == [5]
    assert held([5, 6], 5, None, 7) == [5]
    assert held([5, 6], None, 6, 7) is None
    asked.clear()
    held([5, 6, 7], 5, 1, 7, 8)
    assert asked == [5, 1]


def test_penalties_equal_their_definition() -> None:
    logits = logits_of(1, seed=5)
    tokens, prompt_length = [3, 4, 4, 9, 9, 9], 2
    sampling = Sampling(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={8: 1.0},
        logprobs=VOCABULARY,
    )
    (choice,) = choose(logits, [SamplingRow(sampling, tokens, prompt_length)])
    assert isinstance(choice, Choice)
    scores = logits[0].double().tolist()
    for token in set(tokens):  # the prompt counts for repetition
        scores[token] = scores[token] / 1.5 if scores[token] > 0 else scores[token] * 1.5
    for token, count in Counter(tokens[prompt_length:]).items():
        scores[token] -= 0.5 + 0.25 * count
    scores[8] += 1.0
    wanted = torch.log_softmax(torch.tensor(scores, dtype=torch.float64), -1)
    got = torch.empty(VOCABULARY, dtype=torch.float64)
    for token, logprob in choice.top_logprobs:
        got[token] = logprob
    torch.testing.assert_close(got, wanted)
    assert choice.token_id == int(wanted.argmax())
    assert choice.logprob == pytest.approx(float(wanted.max()))
    ordered = [logprob for _, logprob in choice.top_logprobs]
    assert ordered == sorted(ordered, reverse=True)


def test_logprobs_zero_reports_the_chosen_one_only() -> None:
    (choice,) = choose(logits_of(1), [SamplingRow(Sampling(logprobs=0))])
    assert isinstance(choice, Choice)
    assert choice.logprob is not None
    assert choice.top_logprobs == ()


def test_ends_are_forbidden_until_min_tokens() -> None:
    logits = torch.zeros((1, VOCABULARY))
    logits[0, 7], logits[0, 8], logits[0, 9] = 30.0, 20.0, 10.0
    sampling = Sampling(min_tokens=2, stop_token_ids=(8,))

    def chosen(generated: int, sampling: Sampling = sampling) -> int:
        row = SamplingRow(sampling, [1] * (3 + generated), 3, eos_token_ids=(7,))
        return ids(choose(logits, [row]))[0]

    assert [chosen(0), chosen(1), chosen(2)] == [9, 9, 7]
    # An end that is ignored anyway is an ordinary token.
    ignoring = Sampling(min_tokens=2, ignore_eos=True)
    assert chosen(0, ignoring) == 7


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_fail_their_row_only(bad: float, temperature: float) -> None:
    logits = logits_of(3)
    logits[1, 20] = bad
    rows = [SamplingRow(Sampling(temperature=temperature)) for _ in range(3)]
    choices = choose(logits, rows)
    assert isinstance(choices[1], NonFiniteLogits)
    assert isinstance(choices[0], Choice)
    assert isinstance(choices[2], Choice)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_and_lists_of_allowed_tokens(temperature: float) -> None:
    logits = logits_of(1)
    first, second, third = logits[0].argsort(descending=True)[:3].tolist()

    def chosen(tokens: list[int], *drafts: int, **values: Any) -> int:
        allowed = values.get("allowed_token_ids", ())
        row = SamplingRow(
            Sampling(temperature=temperature / 1000, **values),
            tokens,
            1,
            drafts=drafts,
            mask=mask_with(allowed, VOCABULARY) if allowed else None,
        )
        [on_host], [on_device] = choose(logits, [row]), read(logits, row)
        assert on_host == on_device
        return ids([on_host])[0]

    assert chosen([9], bad_words=((first,),)) == second
    assert chosen([9], bad_words=((first,), (second,))) == third
    # Only behind its other tokens, and those of the prompt do not count.
    pair = ((7, 8, first),)
    assert [chosen(begin, bad_words=pair) for begin in ([9], [9, 8], [7, 8], [9, 8, 7])] == [
        first
    ] * 4
    assert chosen([9, 7, 8], bad_words=pair) == chosen([9, 7], 8, bad_words=pair) == second
    assert chosen([9], allowed_token_ids=(third,)) == third
    assert chosen([9], allowed_token_ids=(second, third), bad_words=((second,),)) == third
    # Ends are still too early, and a bad word gives way where nothing else is left.
    both = {"allowed_token_ids": (first, third), "stop_token_ids": (first,), "min_tokens": 5}
    assert chosen([9], **both) == third
    assert chosen([9], bad_words=((third,),), **both) == third
    assert chosen([9], allowed_token_ids=(third,), bad_words=((third,),)) == third


def read(logits: torch.Tensor, row: SamplingRow) -> list[Choice | NonFiniteLogits]:
    """Return the choice of the twin that a GPU has."""
    return PendingChoices(logits.clone(), torch.ones(1, dtype=torch.bool), [row]).read()[1]


def test_defaults_of_the_message() -> None:
    assert Sampling.from_proto(types_pb2.SamplingParams()) == Sampling()
    message = types_pb2.SamplingParams(
        temperature=0.5, top_p=0.9, seed=-3, logit_bias={4: -1.5}, max_tokens=7, logprobs=0
    )
    sampling = Sampling.from_proto(message)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, -3)
    assert (sampling.logit_bias, sampling.max_tokens, sampling.logprobs) == ({4: -1.5}, 7, 0)
