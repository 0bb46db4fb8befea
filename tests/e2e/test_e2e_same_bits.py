"""One prompt has one answer, to the last bit, in bfloat16, with real processes.

On either worker, cold or restored by any method, resident or streamed, alone or in a batch, and
while a worker or the store dies.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from kept_fleet import KeptFleet, kept_fleet
from long_runs import scaled
from small_model import WIDE, small_model

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion, Logprobs, Tokens
from splitpoint.host.processor import compiler
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.shapes import Numerics
from splitpoint.speculation import DraftMethod
from splitpoint_cli.bench.texts import beginnings, held_back_files

SECONDS = 120.0
NEW_TOKENS = scaled(20, chaos=48)
# Of answers that a death hits: long enough to be hit in the middle.
LONG = scaled(48, chaos=96)
PAGE = 16
# Several pages, and prompts that end inside of one. The first token of all is the same.
LENGTHS = (20, 130, 203, 64, 301, 97)
# A victim dies once each request has this number of tokens.
BEFORE_DEATH = 8

pytestmark = [
    pytest.mark.scaled,
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]


@dataclass(frozen=True)
class Answer:
    """What a client gets; tops with their log-probabilities included."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]

    @classmethod
    def of(cls, found: Completion) -> Self:
        return cls(found.token_ids, found.logprobs)

    def beginning(self, tokens: int) -> Answer:
        return Answer(self.token_ids[:tokens], self.logprobs[:tokens])


@dataclass
class Stack:
    """Running services, two workers among them.

    `wanted`: LONG tokens for each prompt.
    """

    client: AsyncClient
    services: KeptFleet
    prompts: tuple[tuple[int, ...], ...]
    wanted: list[Answer] = field(default_factory=list)

    async def ask(
        self,
        which: int,
        tokens: int = NEW_TOKENS,
        begun: asyncio.Event | None = None,
        **options: Any,
    ) -> Completion:
        """The answer to a prompt; `begun` is set once it has BEFORE_DEATH tokens."""
        count = 0
        generation = self.client.generate(
            self.prompts[which], max_tokens=tokens, ignore_eos=True, logprobs=4, **options
        )
        async for event in generation:
            if isinstance(event, Tokens):
                count += len(event.token_ids)
            if begun is not None and count >= BEFORE_DEATH:
                begun.set()
            if isinstance(event, Completion):
                return event
        raise AssertionError("the stream has no end")

    async def check(self, which: int, tokens: int = NEW_TOKENS, **options: Any) -> Completion:
        found = await self.ask(which, tokens, **options)
        assert Answer.of(found) == self.wanted[which].beginning(tokens), (which, options)
        return found

    async def check_all(self, **options: Any) -> list[Completion]:
        return await asyncio.gather(*(self.check(n, **options) for n in range(len(self.prompts))))

    async def check_while(self, module: str, **options: Any) -> None:
        """kill -9 a service while all prompts are answered; each answer goes on where it was."""
        begun = [asyncio.Event() for _ in self.prompts]
        running = [
            asyncio.create_task(self.check(n, LONG, begun=event, **options))
            for n, event in enumerate(begun)
        ]
        for event in begun:
            await asyncio.wait_for(event.wait(), SECONDS)
        assert not all(task.done() for task in running)
        if module == "worker_service":
            await self.services.kill_busiest_worker(self.client)
        else:
            self.services.kill_store()
        await asyncio.wait_for(asyncio.gather(*running), SECONDS)
        await self.whole()

    async def whole(self) -> None:
        """Wait until both workers serve, with the store, in invariant numerics."""
        async with asyncio.timeout(SECONDS):
            while True:
                found = await self.client.list_workers()
                if sum(each.ready for each in found) == 2:
                    break
                await asyncio.sleep(0.1)
        assert {each.numerics for each in found} == {Numerics.INVARIANT}


@pytest.fixture(scope="module")
def services() -> Iterator[KeptFleet]:
    with kept_fleet(
        *("--dtype", "bfloat16", "--numerics", "invariant", "--device-memory", "192MiB"),
        *("--cpu-kernels", "linear=panels,decode=fused,prefill=fused"),
        *("--max-batched-tokens", "64", "--speculative-config", '{"method": "suffix"}'),
        # Sums as long as the bundled model's.
        model=small_model(**WIDE),
        store_options=(
            *("--dtype", "bfloat16", "--host-memory", "256MiB", "--chunk-tokens", str(PAGE)),
        ),
        scheduler_options=("--dtype", "bfloat16"),
    ) as running:
        yield running


def prompts_of(folder: Path) -> tuple[tuple[int, ...], ...]:
    whole = beginnings(held_back_files(), folder, len(LENGTHS), max(LENGTHS))
    return tuple(each[:length] for each, length in zip(whole, LENGTHS, strict=True))


async def test_restores_batches_and_deaths_change_no_bit(
    services: KeptFleet, bundled_model: Path
) -> None:
    async with AsyncClient(services.address) as client:
        stack = Stack(client, services, prompts_of(bundled_model))
        await stack.whole()
        # Alone, and with nothing cached.
        for which in range(len(LENGTHS)):
            cold = await stack.ask(which, LONG, worker="0", speculate=DraftMethod.OFF)
            assert cold.usage.cached_tokens < PAGE
            assert len(cold.token_ids) == LONG
            stack.wanted.append(Answer.of(cold))
        # Restored on the other worker. The store may still write the newest chunks.
        for which, length in enumerate(LENGTHS):
            splits = (0, 1, length // 2, length - 1)
            for number, (split, residency) in enumerate(itertools.product(splits, Residency)):
                # Half of them each, by turns; all in the long run.
                if (number // 2 + number + which) % scaled(2, chaos=1):
                    continue
                found = await stack.check(which, worker="1", split=split, residency=residency)
                assert found.usage.cached_tokens >= length // PAGE * PAGE - PAGE
            await stack.check(which, worker="1", restore=RestoreMethod.TOKENS)
        # All at once: cached, and under a salt of their own computed anew, with drafts and without.
        await stack.check_all()
        for residency in Residency:
            for method in (DraftMethod.OFF, DraftMethod.SUFFIX):
                salt = f"{residency.value} {method.value}".encode()
                answers = await stack.check_all(
                    cache_salt=salt, residency=residency, speculate=method
                )
                assert all(each.usage.cached_tokens < PAGE for each in answers)
        # Deaths: what was delivered is the other worker's prompt.
        for module in ("worker_service", "kvstore_service"):
            for residency in Residency:
                await stack.check_while(
                    module, cache_salt=f"{module} {residency.value}".encode(), residency=residency
                )
        await stack.check_all()
