"""Workers and schedulers that die under load: every stream is the one that it would have been.

pytest -m chaos tests/e2e/test_e2e_kills.py -s    # 200 kills of workers, 50 of schedulers, figures

SPLITPOINT_CHAOS_SEED is the seed of all choices; it is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fleet import Fleet, Load, Question, fleet, questions, until

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Telemetry, Tokens
from splitpoint.client.requests import GenerateOptions, generate_request
from splitpoint.errors import Internal, Unavailable
from splitpoint.v1 import scheduler_pb2_grpc

SEED = int(os.environ.get("SPLITPOINT_CHAOS_SEED", "1616"))
PROMPT = "import os\nimport sys\n\n\nclass Stream:\n" * 5


def report(**figures: object) -> None:
    """Print one line of JSON."""
    print(json.dumps(figures), flush=True)


@pytest.fixture(scope="module")
def two() -> Iterator[Fleet]:
    """Two workers and two schedulers; each test starts again what it killed."""
    with fleet(workers=2, schedulers=2) as running:
        yield running


async def losses(running: Fleet, client: AsyncClient, number: int) -> int:
    seen = await running.workers_seen(client)
    return seen[number].loss_count if number in seen else 0


async def is_ready(running: Fleet, client: AsyncClient, number: int) -> bool:
    seen = await running.workers_seen(client)
    return number in seen and seen[number].ready


# -- a worker dies at a place -----------------------------------------------------------------


RARE = pytest.mark.chaos


@pytest.mark.parametrize(
    "failpoint",
    [
        "prefill:1",
        pytest.param("seal:1", marks=RARE),
        "seal:3",
        pytest.param("send:1", marks=RARE),
        "send:17",
        pytest.param("copy:1", marks=RARE),
        "copy:15",
    ],
)
async def test_a_worker_that_dies_at_a_place_is_replaced(two: Fleet, failpoint: str) -> None:
    """In prefill, after a seal, between computing and sending a token, in a copy."""
    question = Question(PROMPT, {"max_tokens": 40, "ignore_eos": True})
    await two.all_ready()
    async with AsyncClient(two.addresses[0]) as client:
        load = await Load.of(client, [question], 0)
        load.salts = [failpoint]
        two.workers[0].kill()
        fragile = two.start_worker(0, failpoint)
        await asyncio.to_thread(fragile.wait_ready)
        await until(lambda: is_ready(two, client, 0))
        two.workers[1].kill()
        asking = asyncio.create_task(load.ask(client, question))
        await until(lambda: not fragile.is_running or asking.done())
        assert not asking.done()
        two.start_worker(1)
        await asking
        # What was half-written is never served, and no slot is lost.
        await load.ask(client, question)
        assert load.finished == 2
    await two.store_is_clean()


# -- a scheduler dies ---------------------------------------------------------------------------


async def test_a_client_goes_on_when_its_scheduler_is_killed(two: Fleet) -> None:
    await two.all_ready()
    rng = random.Random(SEED)
    async with AsyncClient(two.addresses[0]) as client:
        load = await Load.of(client, questions(rng, 8, 24), SEED)
    single = AsyncClient(two.addresses[0], retry_seconds=0)
    running = asyncio.create_task(load.keep([two.addresses[0], two.addresses[1]], 6))
    async with single:
        lost = single.generate(PROMPT, max_tokens=1000, ignore_eos=True)
        assert isinstance(await anext(lost), Tokens)
        await until(lambda: load.finished > 6)
        two.schedulers[0].kill()
        with pytest.raises(Unavailable):
            await lost.complete()
    at_kill = load.finished
    await until(lambda: load.resumed and load.finished > at_kill + 6)
    load.is_over = True
    await running


async def test_a_client_leaves_a_scheduler_that_hangs(two: Fleet) -> None:
    await two.all_ready()
    asked = Question(PROMPT, {"max_tokens": 120, "ignore_eos": True})
    async with AsyncClient(two.addresses) as client:
        load = await Load.of(client, [asked], SEED)
        asking = asyncio.create_task(load.ask(client, asked))
        await until(lambda: any(stream.count > 5 for stream in load.open))
        two.schedulers[0].signal(signal.SIGSTOP)
        try:
            await asking
        finally:
            two.schedulers[0].signal(signal.SIGCONT)
        assert client.address == two.addresses[1]
    assert load.finished == 1


# -- clients that leave, and clients that are slow ----------------------------------------------


async def computed(running: Fleet, client: AsyncClient) -> int:
    """Return the tokens that workers generated, once two tellings of each worker agree."""
    earlier: dict[int, Telemetry] = {}
    while True:
        seen = await running.workers_seen(client)
        told = {number: each.telemetry for number, each in seen.items() if each.telemetry}
        # A worker tells once a second, or later: the same telling says nothing new.
        if len(told) == running.worker_count and not any(
            told[number].uptime_seconds == each.uptime_seconds for number, each in earlier.items()
        ):
            counts = {number: each.generated_token_count for number, each in told.items()}
            if counts == {n: each.generated_token_count for n, each in earlier.items()}:
                return sum(counts.values())
            earlier = told
        await asyncio.sleep(0.1)


async def test_work_for_a_client_that_left_stops(two: Fleet) -> None:
    await two.all_ready()
    async with AsyncClient(two.addresses[0]) as client:
        worked = await computed(two, client)
        before = await client.scheduler_status()
        for count in range(8):
            async with client.generate(PROMPT, max_tokens=1000, ignore_eos=True) as generation:
                for _ in range(count + 1):
                    await anext(generation)

        async def is_idle() -> bool:
            return (await client.scheduler_status()).running_count == 0

        await until(is_idle)
        after = await client.scheduler_status()
        assert after.cancelled_count - before.cancelled_count == 8
        delivered = after.generated_token_count - before.generated_token_count
        assert delivered >= sum(range(1, 9))
        # Of up to 1,000 for each request: the steps while the word of its end was on its way,
        # which takes a busy machine longer than a step.
        assert await computed(two, client) - worked - delivered <= 100 * 8


async def test_a_slow_reader_holds_up_nobody(two: Fleet) -> None:
    await two.all_ready()
    rng = random.Random(SEED)
    async with AsyncClient(two.addresses[0]) as client, AsyncClient(two.addresses[0]) as other:
        slow = client.generate(PROMPT, max_tokens=120, ignore_eos=True, logprobs=20)
        read = [await anext(slow)]
        load = await Load.of(other, questions(rng, 4, 24), SEED)
        for _ in range(2):
            for question in load.truths:
                await load.ask(other, question)
            read.append(await anext(slow))
        whole = await slow.complete()
    assert load.finished == 8
    assert len(whole.token_ids) == len(whole.logprobs) == 120


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_a_client_that_does_not_read_is_cancelled() -> None:
    rng = random.Random(SEED)
    with fleet(workers=1, schedulers=1) as running:
        await running.all_ready()
        async with AsyncClient(running.addresses[0]) as client:
            load = await Load.of(client, questions(rng, 4), SEED)
            others = (await client.scheduler_status()).generated_token_count
            # Its connection holds 64 KiB that were not read.
            window = [("grpc.http2.bdp_probe", 0)]
            options: GenerateOptions = {"max_tokens": 3500, "ignore_eos": True, "logprobs": 20}
            async with grpc.aio.insecure_channel(running.addresses[0], options=window) as channel:
                stub: Any = scheduler_pb2_grpc.InferenceServiceStub(channel)
                stuck = stub.Generate(generate_request(PROMPT, options))
                await stuck.read()
                began = time.monotonic()
                while (await client.scheduler_status()).cancelled_count == 0:
                    question = rng.choice(list(load.truths))
                    await load.ask(client, question)
                    others += len(load.truths[question].token_ids)
                    assert time.monotonic() - began < 120
                status = await client.scheduler_status()
            seconds = round(time.monotonic() - began, 1)
            report(test="client that does not read", cancelled_after_seconds=seconds)
            # It was not computed to its end.
            assert status.generated_token_count - others < 3500


# -- everything at once -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [4, pytest.param(80, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])],
)
async def test_everything_at_once(events: int) -> None:
    """Nothing wrong is ever sent. A stream may end early, with a code that says so."""
    print(f"SPLITPOINT_CHAOS_SEED={SEED}")
    rng = random.Random(SEED)
    asked = questions(rng, 8 if events < 10 else 12)
    done: dict[str, int] = {}
    with fleet(workers=3, schedulers=2) as running:
        await running.all_ready()
        async with AsyncClient(running.addresses) as client:
            load = await Load.of(client, asked, SEED, permitted=(Unavailable, Internal))
            keeping = asyncio.create_task(load.keep(running.addresses, 6))
            names: list[str] = []
            for _ in range(events):
                names = names or rng.sample(list(DISTURBANCES), len(DISTURBANCES))
                name = names.pop()
                done[name] = done.get(name, 0) + 1
                before = load.finished
                print(f"{name} after {before} streams, {load.ended_early}", flush=True)
                disturbing = asyncio.create_task(DISTURBANCES[name](running, client, rng))
                await asyncio.wait({keeping, disturbing}, return_when=asyncio.FIRST_COMPLETED)
                if keeping.done():
                    break
                await disturbing
                await until(lambda: load.finished > before + 2 or keeping.done())  # noqa: B023
                if keeping.done():
                    break
            load.is_over = True
            await keeping
            await running.all_ready()
            early = dict(load.ended_early)
            load.permitted = ()
            await asyncio.gather(*(load.ask(client, question) for question in load.truths))
        await running.store_is_clean()
    allowed = {"REQUEST_QUARANTINED", "TOO_MANY_MOVES", "NO_WORKER", "UNAVAILABLE"}
    assert set(early) <= allowed, early
    report(test="everything at once", seed=SEED, events=done, finished=load.finished, early=early)


async def kill_a_worker(running: Fleet, client: AsyncClient, rng: random.Random) -> None:
    number = rng.randrange(running.worker_count)
    running.workers[number].kill()
    running.start_worker(number)


async def fail_a_worker(running: Fleet, client: AsyncClient, rng: random.Random) -> None:
    """At a place, if it comes there soon; then it starts again without."""
    number = rng.randrange(running.worker_count)
    running.workers[number].kill()
    place = rng.choice(["prefill", "seal", "send", "copy"])
    fragile = running.start_worker(number, f"{place}:{rng.randrange(1, 9)}")
    soon = time.monotonic() + 4
    await until(lambda: not fragile.is_running or time.monotonic() > soon)
    fragile.kill()
    running.start_worker(number)


async def stop_a_worker(running: Fleet, client: AsyncClient, rng: random.Random) -> None:
    """Long enough to be noticed; then it goes on, and what it says is too late."""
    worker = running.workers[rng.randrange(running.worker_count)]
    worker.signal(signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(2.6, 3.5))
    worker.signal(signal.SIGCONT)


async def kill_a_scheduler(running: Fleet, client: AsyncClient, rng: random.Random) -> None:
    number = rng.choice(list(running.schedulers))
    running.schedulers[number].kill()
    await asyncio.to_thread(running.start_scheduler(number).wait_ready)


async def kill_the_store(running: Fleet, client: AsyncClient, rng: random.Random) -> None:
    running.store.kill()
    await asyncio.to_thread(running.start_store().wait_ready)


async def leave_early(running: Fleet, client: AsyncClient, rng: random.Random) -> None:
    for _ in range(4):
        async with client.generate(PROMPT, max_tokens=500, ignore_eos=True) as generation:
            for _ in range(rng.randrange(1, 6)):
                await anext(generation)


DISTURBANCES = {
    each.__name__: each
    for each in (
        kill_a_worker,
        fail_a_worker,
        stop_a_worker,
        kill_a_scheduler,
        kill_the_store,
        leave_early,
    )
}


# -- long runs ------------------------------------------------------------------------------------


def summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 1),
        "most_ms": round(max(seconds) * 1e3, 1),
    }


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
async def test_50_worker_kills_under_load(part: int) -> None:
    """200 in four parts. The next worker dies once no stream is suspected of the last kill."""
    seed = SEED + part
    print(f"SPLITPOINT_CHAOS_SEED={SEED} part {part}")
    rng, noticed, kills = random.Random(seed), [], 50
    began = time.monotonic()
    with fleet(workers=3, schedulers=1) as running:
        await running.all_ready()
        async with AsyncClient(running.addresses[0]) as client:
            load = await Load.of(client, questions(rng, 16), seed)
            keeping = asyncio.create_task(load.keep(running.addresses, 6, retry_seconds=0))
            for _ in range(kills):

                async def ready() -> list[int]:
                    seen = await running.workers_seen(client)
                    return [number for number, worker in seen.items() if worker.ready]

                async def may_go_on() -> bool:
                    return keeping.done() or (load.is_clear and len(await ready()) > 1)

                try:
                    await until(may_go_on)
                except AssertionError:
                    print([(s.count, s.needed, s.kills) for s in load.open], await ready())
                    raise
                if keeping.done():
                    break
                await asyncio.sleep(rng.uniform(0, 0.1))
                victim = rng.choice(await ready())
                before = await losses(running, client, victim)
                killed = running.workers[victim].kill()
                load.killed()
                seen = await until(lambda: losses_exceed(running, client, victim, before))  # noqa: B023
                noticed.append(seen - killed)
                running.start_worker(victim)
            load.is_over = True
            await keeping
            moves = (await client.scheduler_status()).failover_count
        await running.store_is_clean()
    report(
        test="worker kills",
        seed=seed,
        kills=len(noticed),
        streams=load.finished,
        moved=moves,
        noticed=summary(noticed),
        seconds=round(time.monotonic() - began, 1),
    )
    assert moves >= kills / 2, "the kills hit nothing"
    assert max(noticed) < 1


async def losses_exceed(running: Fleet, client: AsyncClient, number: int, before: int) -> bool:
    return await losses(running, client, number) > before


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_hang_is_noticed() -> None:
    noticed = []
    rng = random.Random(SEED)
    with fleet(workers=2, schedulers=1) as running:
        await running.all_ready()
        async with AsyncClient(running.addresses[0]) as client:
            load = await Load.of(client, questions(rng, 8), SEED)
            keeping = asyncio.create_task(load.keep(running.addresses, 4, retry_seconds=0))
            for index in range(6):
                await running.all_ready()
                await asyncio.sleep(rng.uniform(0.2, 0.6))
                victim = index % 2
                before = await losses(running, client, victim)
                running.workers[victim].signal(signal.SIGSTOP)
                stopped = time.monotonic()
                seen = await until(lambda: losses_exceed(running, client, victim, before))  # noqa: B023
                noticed.append(seen - stopped)
                running.workers[victim].signal(signal.SIGCONT)
            load.is_over = True
            await keeping
    report(test="hangs", stops=len(noticed), streams=load.finished, noticed=summary(noticed))
    assert max(noticed) < 3


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_50_scheduler_kills() -> None:
    """Two schedulers over the same workers, each killed in turn: no client sees it."""
    print(f"SPLITPOINT_CHAOS_SEED={SEED}")
    rng, kills, began = random.Random(SEED), 50, time.monotonic()
    with fleet(workers=2, schedulers=2) as running:
        await running.all_ready()
        async with AsyncClient(running.addresses) as client:
            load = await Load.of(client, questions(rng, 16), SEED)
        keeping = asyncio.create_task(load.keep(running.addresses, 6))
        for index in range(kills):
            await until(lambda: load.open or keeping.done())
            await asyncio.sleep(rng.uniform(0, 0.3))
            number = index % 2
            running.schedulers[number].kill()
            running.start_scheduler(number)
            await running.all_ready()
            if keeping.done():
                break
        load.is_over = True
        await keeping
        await running.store_is_clean()
    report(
        test="scheduler kills",
        seed=SEED,
        kills=index + 1,
        streams=load.finished,
        resumed=load.resumed,
        seconds=round(time.monotonic() - began, 1),
    )
    assert load.resumed >= kills
