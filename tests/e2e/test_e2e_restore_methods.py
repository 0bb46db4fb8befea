"""Clients that say how their cached prefix comes back: loaded, or from both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_stack import local_stack
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Residency, RestoreMethod

NEW_TOKENS = 16


async def test_a_client_chooses_how_its_prefix_comes_back(tmp_path: Path) -> None:
    """Grouped queries: what worker 0 computed comes back on worker 1, each time the same tokens."""
    model = build_tiny("llama-3")
    async with local_stack(write_tiny("llama-3", tmp_path / "m"), tmp_path) as stack:

        async def greedy(prompt: list[int], worker: str, **options: Any) -> Any:
            return await stack.client.generate(
                prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker=worker, **options
            ).complete()

        prefix, answered = clear_prompt(model, 250, NEW_TOKENS)
        assert list((await greedy(prefix, "0")).token_ids) == answered
        cached = len(prefix) + NEW_TOKENS - 1
        for number, method in enumerate((RestoreMethod.TOKENS, RestoreMethod.LOAD)):
            before = [*prefix, *answered, 7 + number]
            prompt, wanted = clear_prompt(model, 9, NEW_TOKENS, before=before)
            answer = await greedy(prompt, "1", restore=method)
            assert list(answer.token_ids) == wanted
            assert answer.plan.method is method
            assert answer.plan.split_tokens == 0
            assert answer.usage.cached_tokens in (cached, cached + 1)
            recomputed = answer.plan.recomputed_tokens
            assert 0 <= recomputed <= answer.usage.cached_tokens
            assert not (recomputed and method is RestoreMethod.LOAD)
        for options in ({"residency": Residency.STREAMED}, {"split": 0}):
            with pytest.raises(InvalidArgument) as caught:
                await greedy(prompt, "1", restore=RestoreMethod.TOKENS, **options)
            assert caught.value.field == "restore_method"
        await stack.assert_clean()
