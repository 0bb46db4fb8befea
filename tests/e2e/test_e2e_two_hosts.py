"""Two hosts that find each other by Redis.

The prefix that one host computed is fetched by the other, whose answer must be the same.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from local_stack import prompt_of
from redis_server import RedisServer
from two_hosts import CHUNK, two_hosts

from splitpoint.planning.plan import ReasonKind

PROMPT = prompt_of(600, seed=3, vocabulary=2000)
FULL_TOKENS = len(PROMPT) // CHUNK * CHUNK


async def test_a_prefix_is_fetched_from_another_host(
    tmp_path: Path, bundled_model: Path, redis_server: RedisServer
) -> None:
    async with two_hosts(tmp_path, bundled_model, redis=redis_server) as hosts:
        cold = await hosts.generate("b", PROMPT, salt=b"cold")
        assert cold.usage.cached_tokens == 0
        # The catalog learns of chunks in the background: each try has prefixes of its own.
        for attempt in range(8):
            salt = b"%d" % attempt
            first = await hosts.generate_stored("a", PROMPT, salt)
            assert (first.usage.cached_tokens, first.token_ids) == (0, cold.token_ids)
            await asyncio.sleep(0.3 * (attempt + 1))
            fetched = await hosts.generate("b", PROMPT, salt)
            assert fetched.token_ids == first.token_ids
            assert fetched.plan is not None
            if fetched.plan.fetched_tokens >= FULL_TOKENS:
                break
        assert fetched.plan is not None
        assert fetched.plan.fetched_tokens >= FULL_TOKENS, fetched.plan.reason_details
        assert fetched.usage.cached_tokens >= FULL_TOKENS
        assert ReasonKind.FETCHED in dict(fetched.plan.reasons)

        again = await hosts.generate("b", PROMPT, salt)
        assert again.token_ids == first.token_ids
        assert again.plan is not None
        assert again.plan.fetched_tokens == 0  # it is here now
        assert again.usage.cached_tokens == len(PROMPT) - 1

        # The other host dies: what it had is computed, and right.
        other = prompt_of(300, seed=4, vocabulary=2000)
        right = await hosts.generate("a", other)
        hosts.processes["store a"].send_signal(signal.SIGKILL)
        computed = await hosts.generate("b", other)
        assert computed.token_ids == right.token_ids
