"""A store that comes back finds its workers, and what it kept is used by the first request."""

from __future__ import annotations

import asyncio
from pathlib import Path

from local_stack import StackShape, local_stack, prompt_of
from tiny_models import VOCABULARY, write_tiny
from waiting import until

from splitpoint.planning.plan import Residency

SHAPE = StackShape(workers=1, host_memory="16MiB")
PROMPT = prompt_of(64, 7, VOCABULARY)
# By then the pauses between attempts, and those of gRPC, are at their longest.
AWAY_SECONDS = 4.0


async def test_the_first_request_after_a_restart_reuses_what_was_kept(tmp_path: Path) -> None:
    """A request that comes before an idle worker has attached by itself, has it attach."""
    folder = write_tiny("llama", tmp_path / "model")
    (tmp_path / "s").mkdir()
    async with local_stack(folder, tmp_path / "s", SHAPE) as stack:

        async def cached_tokens() -> int:
            answer = await stack.client.generate(
                PROMPT, max_tokens=2, ignore_eos=True, residency=Residency.RESIDENT
            ).complete()
            return answer.usage.cached_tokens

        assert await cached_tokens() == 0
        await stack.assert_clean()
        await stack.kill_store()
        (worker,) = stack.workers
        store = worker.store
        assert store is not None
        await until(lambda: store.connection is None)
        await asyncio.sleep(AWAY_SECONDS)
        stack.store_process = await stack.start_store()
        assert await cached_tokens() > 0
        stats = await stack.store_stats()
        assert (stats.epoch, stats.session_count) == (2, 1)
