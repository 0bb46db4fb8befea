"""The load: sends each request when it is due, whatever became of the ones before.

Times count from the moment at which a request was due, not from the moment at which this process
sent it. A server that stalls therefore cannot hide the wait of the requests that arrive meanwhile
(coordinated omission), and neither can a busy client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitpoint.errors import SplitpointError
from splitpoint_cli.bench.serve.backends import AnswerFacts, Backend, Sample
from splitpoint_cli.bench.shared.progress import LINE_SECONDS, Progress


@dataclass(slots=True)
class Record:
    """What became of one request; seconds from the start of the load.

    Attributes:
        due: when it had to be sent, from which all else counts.
        sent: when it was.
        times, counts: of each message with tokens: when it came, and how many it had.
        ended: when the answer was whole, or failed.
        error: reason of the failure; empty: there was none.
    """

    sample: Sample
    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float = 0.0
    facts: AnswerFacts | None = None
    error: str = ""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens that came: by the server's count, once it is known."""
        return sum(self.counts) if self.facts is None else self.facts.output_tokens


class Load:
    """Sends samples to a backend; `clock` is in seconds.

    With `max_concurrency` a request whose turn has come waits for a place, as a gateway in front
    of the server would let it wait: it is due when it has the place, and the load is not open any
    more.
    """

    def __init__(
        self,
        backend: Backend,
        max_concurrency: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._clock = clock
        self._began = 0.0
        self.ended_count = 0

    async def run(self, samples: Sequence[Sample], due: Sequence[float]) -> list[Record]:
        """Send every sample when it is due, and return what became of them, in this order."""
        self._began = self._clock()
        records = [Record(sample, at) for sample, at in zip(samples, due, strict=True)]
        async with asyncio.TaskGroup() as group:
            for record in records:
                wait = record.due - self._now()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._one(record))
        return records

    def _now(self) -> float:
        return self._clock() - self._began

    async def _one(self, record: Record) -> None:
        if self._places is None:
            await self._send(record)
            return
        must_wait = self._places.locked()
        async with self._places:
            if must_wait:
                record.due = self._now()
            await self._send(record)

    async def _send(self, record: Record) -> None:
        times, counts, clock, began = record.times, record.counts, self._clock, self._began

        def came(count: int) -> None:
            times.append(clock() - began)
            counts.append(count)

        record.sent = self._now()
        try:
            record.facts = await self._backend.send(record.sample, came)
        except SplitpointError as error:
            record.error = error.reason or type(error).__name__
            record.message = error.message
        record.ended = self._now()
        self.ended_count += 1


async def run_load(
    backend: Backend,
    samples: Sequence[Sample],
    due: Sequence[float],
    max_concurrency: int | None,
    progress: Progress,
) -> list[Record]:
    """Run a load and tell now and then how far it is."""
    load = Load(backend, max_concurrency)

    async def tell() -> None:
        while True:
            await asyncio.sleep(LINE_SECONDS)
            progress.say(f"{load.ended_count} of {len(samples)} requests have ended")

    telling = asyncio.create_task(tell())
    try:
        return await load.run(samples, due)
    finally:
        telling.cancel()
