"""A request whose logits are NaN fails alone, and nothing of it is stored."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path

from engine_runner import own_decoder
from local_stack import StackShape, local_stack
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.errors import Internal
from splitpoint.planning.plan import Residency

NEW_TOKENS = 24
CHUNK_TOKENS = 16


async def test_nan_fails_its_own_request_and_none_of_it_is_sealed(tmp_path: Path) -> None:
    model, poisoned = build_tiny("llama"), 7
    drawn = (clear_prompt(model, 40, NEW_TOKENS, seed=seed) for seed in range(20))
    good = list(islice((each for each in drawn if poisoned not in (*each[0], *each[1])), 3))
    assert len(good) == 3
    # Its first two chunks are sound, and then comes the token.
    bad = [8 + n % 50 for n in range(60)]
    bad[40] = poisoned
    folder = write_tiny("llama", tmp_path / "m")
    async with local_stack(folder, tmp_path, StackShape(workers=1)) as stack:
        worker = stack.workers[0]

        async def fill(value: float) -> None:
            row = own_decoder(worker.engine)._embedding[poisoned]
            await worker.runtime.calls.run(lambda: row.fill_(value))

        for residency in (Residency.RESIDENT, Residency.STREAMED):
            await fill(float("nan"))
            salt = residency.value.encode()
            answers = [
                stack.client.generate(
                    prompt, max_tokens=NEW_TOKENS, ignore_eos=True, cache_salt=salt
                ).complete()
                for prompt, _ in good
            ]
            failing = stack.client.generate(
                bad, max_tokens=NEW_TOKENS, ignore_eos=True, residency=residency, cache_salt=salt
            ).complete()
            error, *done = await asyncio.gather(failing, *answers, return_exceptions=True)
            assert isinstance(error, Internal)
            assert error.reason == "NON_FINITE_LOGITS"
            for (_, tokens), answer in zip(good, done, strict=True):
                assert not isinstance(answer, BaseException)
                assert list(answer.token_ids) == tokens
            await stack.assert_clean()
            # With a sound row the prompt is computed anew from the token's chunk on: only the
            # sound chunks before it may be in the store, or on the device.
            await fill(0.01)
            again = await stack.client.generate(
                bad, max_tokens=1, ignore_eos=True, residency=residency, cache_salt=salt
            ).complete()
            assert again.usage.cached_tokens <= 2 * CHUNK_TOKENS
