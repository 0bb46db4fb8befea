"""A fleet of real service processes to kill, and a load that checks every token it is sent.

One store, some workers, some schedulers that all know all workers; each serves a model that
answers fast (`small_model.py`).
`tests/fork_server.py` starts them, so a killed one is back in a second or two.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fork_server import SECONDS, Child, ForkServer
from own_names import shared_memory_folder
from small_model import small_model

from splitpoint.client import AsyncClient, Client
from splitpoint.client.answers import Completion, Tokens, Worker
from splitpoint.errors import Retryable, SplitpointError
from splitpoint.transport.channels import open_channel
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc

CHUNK_TOKENS = 16
# Lines of each log, when a test failed.
_TOLD_LINES = 12
SOURCES = ("asyncio", "collections", "contextlib", "dataclasses", "functools", "itertools")


class Fleet:
    """Its processes by their numbers. `folder` holds sockets and logs.

    The options replace those that all stores, workers and schedulers get.
    """

    def __init__(
        self,
        folder: Path,
        arena: Path,
        server: ForkServer,
        model: Path,
        worker_count: int,
        store_options: Sequence[str],
        worker_options: Sequence[str],
        scheduler_options: Sequence[str],
    ) -> None:
        self.folder = folder
        self.store_options = store_options
        self.worker_options = worker_options
        self.scheduler_options = scheduler_options
        self.arena = arena
        self.server = server
        self.model = str(model)
        self.worker_count = worker_count
        self.workers: dict[int, Child] = {}
        self.schedulers: dict[int, Child] = {}
        self.store = self.start_store()
        self.store.wait_ready()

    @property
    def addresses(self) -> list[str]:
        return [self.address("s", number) for number in sorted(self.schedulers)]

    def address(self, kind: str, number: int = 0) -> str:
        return f"unix:{self.folder}/{kind}{number}"

    def start_store(self) -> Child:
        self.store = self.server.start(
            "kvstore_service",
            *("--listen", self.address("k"), "--model", self.model, "--dtype", "float32"),
            *("--arena", str(self.arena), "--host-memory", "192MiB", "--lease-seconds", "2"),
            *("--chunk-tokens", str(CHUNK_TOKENS), "--activations", "always"),
            *self.store_options,
        )
        return self.store

    def start_worker(self, number: int, failpoint: str = "") -> Child:
        child = self.server.start(
            "worker_service",
            *("--listen", self.address("w", number), "--worker-id", str(number)),
            *("--model", self.model, "--dtype", "float32", "--kvstore", self.address("k")),
            *("--device", "cpu", "--threads", "1", "--device-memory", "128MiB"),
            *self.worker_options,
            failpoint=failpoint,
        )
        self.workers[number] = child
        return child

    def start_scheduler(self, number: int, *options: str) -> Child:
        workers = (("--worker", self.address("w", each)) for each in range(self.worker_count))
        child = self.server.start(
            "scheduler_service",
            *("--listen", self.address("s", number), "--model", self.model, "--dtype", "float32"),
            *("--server-key-file", str(self.folder / "key")),
            *(word for pair in workers for word in pair),
            *self.scheduler_options,
            *options,
        )
        self.schedulers[number] = child
        return child

    def start_all(self, schedulers: int) -> None:
        for number in range(self.worker_count):
            self.start_worker(number)
        for number in range(schedulers):
            self.start_scheduler(number)
        for child in (*self.workers.values(), *self.schedulers.values()):
            child.wait_ready()

    def tell(self) -> None:
        """Print the end of each log, and what schedulers say."""
        for child in self.server.children:
            lines = child.log.read_text().splitlines()[-_TOLD_LINES:]
            print(
                f"-- {child.log.name}, {'runs' if child.is_running else 'ended'}", *lines, sep="\n"
            )
        for address in self.addresses:
            with suppress(SplitpointError), Client(address, timeout=3) as client:
                print(address, client.scheduler_status(), client.get_queue(), sep="\n")
                for worker in client.list_workers():
                    print(worker.id, worker.ready, worker.running_count, worker.message)

    async def workers_seen(self, client: AsyncClient) -> dict[int, Worker]:
        """Return what a scheduler says of each worker that it has met."""
        return {int(each.id): each for each in await client.list_workers() if each.id.isdigit()}

    async def all_ready(self) -> None:
        """Start what was killed, and wait until each scheduler serves with all workers."""
        for number, child in list(self.workers.items()):
            if not child.is_running:
                self.start_worker(number)
        for number, child in list(self.schedulers.items()):
            if not child.is_running:
                self.start_scheduler(number)
        for address in self.addresses:
            async with AsyncClient(address) as client:
                await until(lambda: self._is_complete(client))

    async def _is_complete(self, client: AsyncClient) -> bool:
        try:
            seen = await self.workers_seen(client)
        except SplitpointError:
            return False
        return sum(worker.ready for worker in seen.values()) == self.worker_count

    async def store_is_clean(self) -> None:
        """Wait until the store holds no lease and no unsealed slot, and agrees with itself."""
        async with open_channel(self.address("k")) as channel:
            stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)

            async def is_clean() -> bool:
                stats = await stub.GetStats(
                    kvstore_pb2.GetStatsRequest(check_integrity=True), wait_for_ready=True
                )
                assert list(stats.integrity_violations) == []
                held = (
                    stats.lease_count,
                    stats.writing_slot_count,
                    stats.quarantined_slot_count,
                )
                return held == (0, 0, 0)

            await until(is_clean)


@contextmanager
def fleet(
    workers: int,
    schedulers: int = 0,
    *,
    model: Path | None = None,
    store_options: Sequence[str] = (),
    worker_options: Sequence[str] = (),
    scheduler_options: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Start a store and, with `schedulers`, everything else, too.

    `model`: the folder of another one than the small model.
    """
    folder = Path(tempfile.mkdtemp(prefix="fleet-"))
    arena = shared_memory_folder() / "arena"
    try:
        with ForkServer(folder) as server:
            running = Fleet(
                *(folder, arena, server, model or small_model(), workers),
                *(store_options, worker_options, scheduler_options),
            )
            try:
                if schedulers:
                    running.start_all(schedulers)
                yield running
            except BaseException:
                running.tell()
                raise
    finally:
        shutil.rmtree(arena.parent, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


async def until(condition: Callable[[], Any], seconds: float = SECONDS) -> float:
    """Return the monotonic time at which an (async) condition came true."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        now = time.monotonic()
        if found:
            return now
        assert now < deadline, "the awaited state did not come"
        await asyncio.sleep(0.01)


# -- a load that checks what it is sent -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """A request, as the arguments of `generate`."""

    prompt: str
    options: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.prompt, tuple(sorted(self.options.items()))))


def questions(rng: random.Random, count: int, most_tokens: int = 48) -> list[Question]:
    """Greedy and sampled ones, with and without log-probabilities and stop strings."""
    made = []
    for index in range(count):
        names = rng.sample(SOURCES, 3)
        lines = "".join(f"import {name}\n" for name in names) * rng.randrange(1, 5)
        options: dict[str, Any] = {"max_tokens": rng.randrange(most_tokens // 2, most_tokens)}
        options["ignore_eos"] = True
        if index % 3 == 1:
            options |= {"temperature": 0.8, "seed": rng.randrange(1 << 30)}
        if index % 4 == 2:
            options["logprobs"] = 1
        if index % 5 == 3:
            options["stop"] = "def __"
        made.append(Question(f"{lines}\n\nclass {names[0].title()}{index}:\n", options))
    return made


@dataclass(slots=True, eq=False)
class Stream:
    """An open stream. `needed`: tokens at which a further kill may hit it."""

    count: int = 0
    needed: int = 0
    kills: int = 0


@dataclass
class Load:
    """Keeps streams open. Every event must be the next of the undisturbed answer."""

    truths: dict[Question, Completion]
    rng: random.Random
    # Codes by which a stream may end early: nothing of it was wrong up to there.
    permitted: tuple[type[SplitpointError], ...] = ()
    # Cache salts of its streams. Empty: none and new ones by turns.
    salts: Sequence[str] = ()
    open: set[Stream] = field(default_factory=set)
    finished: int = 0
    resumed: int = 0
    ended_early: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    @classmethod
    async def of(
        cls, client: AsyncClient, asked: Sequence[Question], seed: int, **fields: Any
    ) -> Load:
        """Ask for the undisturbed answers, which share no cache with those of the load."""
        answers = await asyncio.gather(
            *(
                client.generate(each.prompt, **each.options, cache_salt="undisturbed").complete()
                for each in asked
            )
        )
        return cls(dict(zip(asked, answers, strict=True)), random.Random(seed), **fields)

    async def keep(self, addresses: Sequence[str], streams: int, **options: Any) -> None:
        """Keep this number of streams open until `is_over`; then let them end."""
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._ask_on(addresses, number, options))

    async def _ask_on(self, addresses: Sequence[str], number: int, options: Any) -> None:
        turned = [*addresses[number % len(addresses) :], *addresses[: number % len(addresses)]]
        async with AsyncClient(turned, on_retry=self._note, **options) as client:
            while not self.is_over:
                await self.ask(client, self.rng.choice(list(self.truths)))

    def _note(self, error: Retryable, address: str) -> None:
        self.resumed += 1

    async def ask(self, client: AsyncClient, question: Question) -> None:
        """Compare one stream with the undisturbed one, event by event."""
        truth, stream = self.truths[question], Stream()
        self.open.add(stream)
        # With a new salt a stream finds nothing cached.
        salt = self.rng.choice(self.salts or ["", f"{self.rng.random()}"])
        options = {"cache_salt": salt, **question.options}
        try:
            async for event in client.generate(question.prompt, **options):
                if isinstance(event, Tokens):
                    assert event.index == stream.count, "an index was lost or repeated"
                    stream.count += len(event.token_ids)
                    due = truth.token_ids[event.index : stream.count]
                    assert event.token_ids == due, f"{question} from {event.index} on"
                    continue
                assert event.token_ids == truth.token_ids
                assert (event.text, event.finish_reason) == (truth.text, truth.finish_reason)
                assert len(event.logprobs) == len(truth.logprobs)
                assert event.usage.completion_tokens == truth.usage.completion_tokens
                self.finished += 1
        except self.permitted as error:
            self.ended_early[error.reason] += 1
        finally:
            self.open.discard(stream)

    def killed(self) -> None:
        """Note that a worker was killed: the scheduler suspects what ran there.

        A request that is on a second worker when that dies, too, and has not got past the place
        of the first failure, counts as the cause (`requests/failover.py`).
        """
        for stream in self.open:
            stream.needed = stream.count + 2 * 8 ** (stream.kills + 1)
            stream.kills += 1

    @property
    def is_clear(self) -> bool:
        """True if no open stream is suspected."""
        return all(stream.count >= stream.needed for stream in self.open)
