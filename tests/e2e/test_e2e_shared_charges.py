"""Requests with a common prefix: the scheduler's account covers a worker's pages. About 20 s."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from local_stack import LocalStack, StackShape, local_stack
from tiny_models import build_tiny, clear_prompt, write_tiny

REQUESTS = 16
COMMON, OWN, NEW_TOKENS = 250, 32, 22
SHAPE = StackShape(
    workers=1, activations="never", device_memory_bytes=24 << 20, max_batched_tokens=128
)


async def peaks(stack: LocalStack, stop: asyncio.Event) -> tuple[int, int]:
    """Return the most pages that were charged, and the most that sequences held."""
    charged = held = 0
    [worker] = stack.workers
    account = stack.scheduler.manager.admission.account(worker.worker_id)
    assert account is not None
    while not stop.is_set():
        charged = max(charged, account.charged_pages)
        held = max(held, worker.engine.cache.pages.used_count)
        await asyncio.sleep(0.001)
    assert (account.charged_pages, account.check_integrity()) == (0, [])
    return charged, held


@pytest.mark.parametrize("shares", [True, False])
async def test_the_account_agrees_with_the_pages_of_a_common_prefix(
    tmp_path: Path, shares: bool
) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    model = build_tiny("llama")
    common, _ = clear_prompt(model, COMMON, 1)
    cases = [
        clear_prompt(model, OWN, NEW_TOKENS, before=common, seed=seed) for seed in range(REQUESTS)
    ]
    sockets = tmp_path / "s"
    sockets.mkdir()
    async with local_stack(folder, sockets, replace(SHAPE, shares_prefixes=shares)) as stack:
        stop = asyncio.Event()
        watching = asyncio.create_task(peaks(stack, stop))
        answers = await asyncio.gather(
            *(
                stack.client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True).complete()
                for prompt, _ in cases
            )
        )
        assert [list(a.token_ids) for a in answers] == [wanted for _, wanted in cases]
        await stack.assert_clean()
        stop.set()
        charged, held = await watching
    chunk = SHAPE.chunk_tokens
    prefix = COMMON // chunk
    own = -(-(COMMON + OWN + NEW_TOKENS) // chunk) - prefix
    assert charged == (prefix if shares else REQUESTS * prefix) + REQUESTS * own
    # The worker holds no page that is not charged. The first to end may leave before the last
    # one starts, so not all need be there at once.
    assert held <= charged
    assert held > prefix + own
