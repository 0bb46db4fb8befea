"""The greedy texts that tests compare with are those of transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CASES, CLEAR_LEAD, build_tiny, clear_prompt

COUNT = 24


def generated(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Return the tokens of `generate`, and the smallest lead of one over the second best."""
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
    return output.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.mark.parametrize("case", CASES)
def test_references_are_what_generate_gives(case: str) -> None:
    """Also across the border of a window (at most 24)."""
    model = build_tiny(case)
    for length in (1, 30):
        prompt, wanted = clear_prompt(model, length, COUNT)
        tokens, lead = generated(model, prompt)
        assert wanted == tokens
        assert lead > 0.9 * CLEAR_LEAD
