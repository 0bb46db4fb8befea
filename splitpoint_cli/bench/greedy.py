"""transformers' `generate` as every benchmark of decoding asks for it: greedy, to full length."""

from __future__ import annotations

from typing import Any


def generate_greedy(model: Any, ids: Any, new_tokens: int, watch: Any, **cache: str) -> Any:
    """int64 `[batch, prompt + new_tokens]` from ids of `[batch, prompt]`, none of them padding.

    `watch`: a stopping criterion that stops nothing, called after each token. `cache`: what
    `generate` is told of its cache.
    """
    return model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[watch],
        **cache,
    )
