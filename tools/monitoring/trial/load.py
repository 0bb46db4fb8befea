"""Requests of many kinds, so that every panel has something to show.

Shared beginnings that one arena cannot hold together, streamed and resident requests,
forced ways to restore, bursts beyond the queue, readers that leave. Token ids are random:
what is generated does not matter. A part of the requests goes through the gateway.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections import Counter

from splitpoint.client import AsyncClient
from splitpoint.client.requests import GenerateOptions
from splitpoint.errors import SplitpointError
from splitpoint.planning.plan import FORCED_METHODS, Residency

_FAMILIES = 6
_SHARED_TOKENS = 640
_VOCABULARY = 4096
_STEADY = 5
_BURST = 24
_BURST_EVERY = 12.0
_REQUEST_SECONDS = 60.0


class Load:
    """Sends requests until `seconds` are over. `ends`: how many ended in which way.

    `address` is the scheduler's, `url` the gateway's.
    """

    def __init__(self, address: str, url: str, seconds: float, seed: int = 0) -> None:
        self.ends: Counter[str] = Counter()
        self._address = address
        self._url = url
        self._seconds = seconds
        self._random = random.Random(seed)
        self._families = [self._tokens(_SHARED_TOKENS) for _ in range(_FAMILIES)]

    async def run(self) -> None:
        self._until = time.monotonic() + self._seconds
        async with AsyncClient(self._address) as client:
            await asyncio.gather(
                *(self._steadily(client) for _ in range(_STEADY)),
                self._in_bursts(client),
                self._by_http(),
            )

    async def _steadily(self, client: AsyncClient) -> None:
        while time.monotonic() < self._until:
            await self._one(client)

    async def _in_bursts(self, client: AsyncClient) -> None:
        """More at once than may run and wait."""
        while time.monotonic() < self._until:
            await asyncio.gather(*(self._one(client) for _ in range(_BURST)))
            await asyncio.sleep(_BURST_EVERY)

    async def _by_http(self) -> None:
        """Streams, one at a time, of which some are left early."""
        while time.monotonic() < self._until:
            prompt = [*self._families[0][:300], *self._tokens(self._random.randrange(8, 80))]
            leaves = self._random.random() < 0.1
            status = await asyncio.to_thread(self._stream, prompt, leaves)
            self.ends["left" if leaves else f"HTTP {status}"] += 1
            if status != http.client.OK:
                await asyncio.sleep(0.5)

    def _stream(self, prompt: list[int], leaves: bool) -> int:
        """Return the status of a stream; it is read to its end, or to its first line."""
        body = {"model": "stdlib-llama", "prompt": prompt, "max_tokens": 24, "stream": True}
        connection = http.client.HTTPConnection(
            self._url.removeprefix("http://"), timeout=_REQUEST_SECONDS
        )
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.readline()
            if not leaves:
                answer.read()
            return answer.status
        finally:
            connection.close()

    async def _one(self, client: AsyncClient) -> None:
        chosen = self._random
        # One family is asked for by half of all, the others take turns.
        family = self._families[chosen.choice((0, 0, 0, *range(_FAMILIES)))]
        leaves = chosen.random() < 0.05
        options: GenerateOptions = {"max_tokens": chosen.randrange(8, 40), "ignore_eos": True}
        options["timeout"] = _REQUEST_SECONDS
        if chosen.random() < 0.3:
            options["residency"] = Residency.STREAMED
        elif chosen.random() < 0.5:
            # Only what is restored to the device has a choice of how.
            options["residency"] = Residency.RESIDENT
            options["restore"] = chosen.choice(FORCED_METHODS)
        new = self._tokens(chosen.randrange(8, 80))
        prompt = family[: chosen.randrange(300, _SHARED_TOKENS)] + new
        generation = client.generate(prompt, **options)
        try:
            async for _ in generation:
                if leaves:
                    self.ends["left"] += 1
                    await generation.close()
                    return
            self.ends["complete"] += 1
        except SplitpointError as error:
            self.ends[error.reason] += 1
            # As a polite caller does.
            await asyncio.sleep(0.5)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, _VOCABULARY) for _ in range(count)]
