"""Trouble made on purpose: fill the arena, stop Redis, freeze a worker; read the alerts."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator

from splitpoint.client import AsyncClient
from splitpoint.errors import DeadlineExceeded
from splitpoint.planning.plan import Residency
from tools.monitoring.trial.processes import frozen, worker_process
from tools.monitoring.trial.prometheus import wait_until
from tools.monitoring.trial.stack import CHUNK_TOKENS, Trial

# One of each, and nothing critical: the other worker serves.
EXPECTED_ALERTS = frozenset(
    (f"Splitpoint{name}", "warning")
    for name in ("ArenaFull", "RedisAway", "ScrapeFailing", "WorkerLost")
)
_SECONDS = 120.0
_VOCABULARY = 4096


def firing_in_trouble(running: Trial) -> Counter[tuple[str, str]]:
    """Count the alerts that fire within two minutes, by name and severity."""
    asyncio.run(_fill_arena(running))
    running.redis.kill()
    with frozen(worker_process(running.up.pid, "0")):
        try:
            wait_until(
                lambda: running.prometheus.firing().keys() >= EXPECTED_ALERTS, _SECONDS, "alerts"
            )
        except DeadlineExceeded:
            pass  # the caller reports what is missing
        return running.prometheus.firing()


def wrong_alerts(firing: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield missing alerts, repeated ones, and critical ones."""
    for name, severity in sorted(EXPECTED_ALERTS):
        if firing[name, severity] != 1:
            yield f"{name} ({severity}) fires {firing[name, severity]} times, not once"
    for name, severity in sorted(firing):
        if severity == "critical":
            yield f"{name} is critical, although requests are served"


async def _fill_arena(running: Trial) -> None:
    """Fill the arena by a streamed request; resident ones beside it find no free slot."""
    now = time.time()
    (slots,) = running.prometheus.series("sum(splitpoint_store_slots)", now - 1, now, 1)
    tokens = int(slots.points[-1][1] - 1) * CHUNK_TOKENS
    async with AsyncClient(running.address) as client:
        streamed = client.generate(
            _tokens(tokens),
            max_tokens=CHUNK_TOKENS - 1,
            ignore_eos=True,
            residency=Residency.STREAMED,
            timeout=_SECONDS,
        )
        await anext(streamed)
        await asyncio.gather(
            *(
                client.generate(
                    _tokens(8 * CHUNK_TOKENS),
                    max_tokens=1,
                    residency=Residency.RESIDENT,
                    timeout=_SECONDS,
                ).complete()
                for _ in range(2)
            )
        )
        await streamed.close()


def _tokens(count: int) -> list[int]:
    return [random.randrange(3, _VOCABULARY) for _ in range(count)]
