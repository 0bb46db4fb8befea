"""A request whose logits are NaN fails alone, and nothing of it is stored. About 10 s."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_runner import own_decoder
from local_stack import StackShape, local_stack
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.errors import Internal
from splitpoint.planning.plan import Residency

NEW_TOKENS = 24
CHUNK_TOKENS = 16


@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.STREAMED])
async def test_nan_fails_its_own_request_and_none_of_it_is_sealed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, residency: Residency
) -> None:
    folder = write_tiny("llama", tmp_path_factory.mktemp("llama"))
    model = build_tiny("llama")
    poisoned = 7
    good = [clear_prompt(model, 40, NEW_TOKENS, seed=seed) for seed in range(20)]
    good = [each for each in good if poisoned not in (*each[0], *each[1])][:3]
    # Its first two chunks are sound, and then comes the token.
    bad = [8 + n % 50 for n in range(60)]
    bad[40] = poisoned
    async with local_stack(folder, tmp_path, StackShape(workers=1)) as stack:
        engine = stack.workers[0].engine
        await stack.workers[0].runtime.calls.run(
            lambda: own_decoder(engine)._embedding[poisoned].fill_(float("nan"))
        )
        answers = [
            stack.client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True).complete()
            for prompt, _ in good
        ]
        failing = stack.client.generate(
            bad, max_tokens=NEW_TOKENS, ignore_eos=True, residency=residency
        ).complete()
        error, *done = await asyncio.gather(failing, *answers, return_exceptions=True)
        assert isinstance(error, Internal)
        assert error.reason == "NON_FINITE_LOGITS"
        for (_, tokens), answer in zip(good, done, strict=True):
            assert not isinstance(answer, BaseException)
            assert list(answer.token_ids) == tokens
        await stack.assert_clean()
        # With a sound row the prompt is computed anew from the token's chunk on: only the sound
        # chunks before it may be in the store, or on the device.
        await stack.workers[0].runtime.calls.run(
            lambda: own_decoder(engine)._embedding[poisoned].fill_(0.01)
        )
        again = await stack.client.generate(
            bad, max_tokens=1, ignore_eos=True, residency=residency
        ).complete()
        assert again.usage.cached_tokens <= 2 * CHUNK_TOKENS
