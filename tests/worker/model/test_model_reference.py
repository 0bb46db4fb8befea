"""The greedy texts that tests compare with are those of transformers' own `generate`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import CASES, VOCABULARY, build_tiny, computed

COUNT = 24


def generated(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the tokens of `generate`, and how far each is ahead of the second best."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
        do_sample=False,
        # The checkpoint's own must not stop it.
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(output.logits)[:, 0].topk(2, dim=-1).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


@pytest.mark.parametrize("case", CASES)
def test_references_are_what_generate_gives(case: str) -> None:
    """Also across the borders of a window, and behind an end of sequence."""
    model, rng = build_tiny(case), random.Random(case)
    for length in (1, 30):
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
        found = computed(model, prompt, COUNT)
        tokens, leads = generated(model, prompt)
        assert found.tokens == tokens
        assert found.leads == pytest.approx(leads, abs=1e-4)
