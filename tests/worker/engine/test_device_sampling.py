"""Test that drawing all rows at once gives the tokens of the twin that draws one by one: 2 s."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from worker_service.engine.sampling import (
    Choice,
    NonFiniteLogits,
    PendingChoices,
    Sampling,
    SamplingRow,
    choose,
)
from worker_service.model.draws import most_likely
from worker_service.structured.masks import allowed_ids
from worker_service.structured.matcher import Mask

DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def random_row(rng: random.Random, vocabulary: int) -> SamplingRow:
    tokens = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 40))]
    sampling = Sampling(
        temperature=rng.choice([0, 0.5, 1.0, 1e-5]),
        top_k=rng.choice([0, 0, 1, 5, 60, 2000]),
        top_p=rng.choice([1.0, 0.9, 0.3, 0.999]),
        min_p=rng.choice([0, 0, 0.1]),
        seed=rng.randrange(-(1 << 40), 1 << 40),
        presence_penalty=rng.choice([0, 0.3]),
        frequency_penalty=rng.choice([0, 0.7]),
        repetition_penalty=rng.choice([1, 1.3]),
        logit_bias={} if rng.random() < 0.7 else {3: 2.0, 7: -5.0},
        min_tokens=rng.choice([0, 100]),
        stop_token_ids=(1,),
        logprobs=rng.choice([None, None, 0, 3]),
    )
    # Some of the tokens are drafts.
    known = rng.randint(len(tokens) // 2, len(tokens))
    mask = random_mask(rng, vocabulary) if rng.random() < 0.4 else None
    return SamplingRow(sampling, tokens[:known], len(tokens) // 2, (2,), tokens[known:], mask)


def random_mask(rng: random.Random, vocabulary: int) -> Mask:
    """A grammar's mask, which allows from one id to nearly all."""
    share = rng.choice([0, 0.1, 0.9])
    allowed = {rng.randrange(vocabulary), *(i for i in range(vocabulary) if rng.random() < share)}
    bits = np.zeros((vocabulary // 32 + 1) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def random_logits(rng: random.Random, count: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shape = (count, vocabulary)
    if rng.random() < 0.5:
        return torch.randn(shape, generator=generator) * rng.choice([0.01, 1.0, 5.0])
    # Coarse values, so that many tokens are exactly equal.
    return torch.randint(20, shape, generator=generator) * rng.choice([0.01, 0.5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [50, 300, 3000])
def test_both_twins_choose_the_same(vocabulary: int, device: str) -> None:
    rng = random.Random(vocabulary)
    for trial in range(25):
        count = rng.randint(1, 9)
        logits = random_logits(rng, count, vocabulary)
        if trial % 5 == 0:
            logits[0, rng.randrange(vocabulary)] = rng.choice([math.nan, math.inf])
        if trial % 7 == 0:
            logits[-1] = -math.inf
        rows = [random_row(rng, vocabulary) for _ in range(count)]
        finite = torch.tensor([rng.random() < 0.7 for _ in range(13)])
        pending = PendingChoices(
            logits.clone().to(device),  # what masks exclude is set in place
            finite.to(device),
            rows,
            most_elements=rng.choice([1, 4 * vocabulary, 1 << 20]),
        )
        flags, got = pending.read()
        assert flags == finite.tolist()
        for row, wanted, found in zip(rows, choose(logits, rows), got, strict=True):
            assert type(wanted) is type(found)
            if isinstance(wanted, Choice) and isinstance(found, Choice):
                assert found.token_id == wanted.token_id, row.sampling
                assert row.mask is None or found.token_id in allowed_ids(row.mask, vocabulary)
                assert (found.logprob is None) == (wanted.logprob is None)
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-9)
                values = [value for _, value in wanted.top_logprobs]
                assert [value for _, value in found.top_logprobs] == pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    rng = random.Random(1)
    logits = random_logits(rng, 8, 2000).to(device)
    rows = [random_row(rng, 2000) for _ in range(8)]
    finite = torch.ones(8, dtype=torch.bool, device=device)

    def tokens(result: tuple[list[bool], list[Choice | NonFiniteLogits]]) -> list[int]:
        return [each.token_id for each in result[1] if isinstance(each, Choice)]

    together = tokens(PendingChoices(logits.clone(), finite, rows).read())
    backwards = tokens(PendingChoices(logits.flip(0), finite, rows[::-1]).read())
    alone = [
        tokens(PendingChoices(logits[i : i + 1], finite[:1], rows[i : i + 1]).read())[0]
        for i in range(8)
    ]
    assert together == backwards[::-1] == alone


@pytest.mark.parametrize("device", DEVICES)
def test_a_flat_nucleus_wider_than_the_candidates_is_drawn_from_all(device: str) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 0.01
    rows = [
        SamplingRow(Sampling(temperature=1.0, top_p=0.99, seed=seed), tokens=[1] * 5)
        for seed in range(20)
    ]
    many = logits.expand(20, -1)
    finite = torch.ones(1, dtype=torch.bool)
    _, got = PendingChoices(many.to(device), finite.to(device), rows).read()
    assert got == choose(many, rows)
    assert len({each.token_id for each in got if isinstance(each, Choice)}) > 10


def test_a_step_that_ends_no_prompt_reports_its_flags_alone() -> None:
    finite = torch.tensor([True, False, True])
    result = PendingChoices(torch.zeros(0, 50), finite, []).read()
    assert result == ([True, False, True], [])
    nothing = PendingChoices(torch.full((1, 4), -math.inf), finite, [SamplingRow(Sampling())])
    assert nothing.read() == ([True, False, True], [NonFiniteLogits()])


def test_lower_ids_are_kept_and_come_first_among_equals() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -math.inf]])
    for count, wanted in ((1, [1]), (3, [1, 3, 2]), (4, [1, 3, 2, 4]), (6, [1, 3, 2, 4, 5, 0])):
        values, ids = most_likely(scores, count)
        assert ids.tolist() == [wanted]
        assert values.tolist() == [scores[0, wanted].tolist()]
