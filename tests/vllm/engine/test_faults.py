"""Kills, hangs and damage under real engines: no wrong text, no request that waits, no lost page.

    make vllm-test ARGS="-k faults"
    SPLITPOINT_LONG=1 make vllm-test ARGS="-k faults -s"    # 500 requests, 50 kills of the store

Texts are compared with those of an engine without a connector. The seed is printed;
SPLITPOINT_CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import signal
import statistics
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import engines
import grpc
import pytest
from flipped_bits import ArenaFile
from long_runs import scaled
from waiting import wait_until

from benchmarks.vllm_connector import (
    BUNDLED,
    Answer,
    Engine,
    Processes,
    Store,
    ready,
    stats_of,
    stop,
)
from splitpoint.config import SHARED_MEMORY, arena_path
from splitpoint.errors import Unavailable
from splitpoint.transport.channels import open_sync_channel
from splitpoint.transport.local_session import mapped_arena
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc
from splitpoint_cli.request.observed import read_store

pytestmark = [pytest.mark.scaled, pytest.mark.timeout(scaled(600, chaos=7200))]

REQUESTS = scaled(50, chaos=500)
STORE_KILLS = scaled(3, chaos=50)
ENGINE_KILLS = scaled(1, chaos=10)
FLIPPED_BITS = scaled(20, chaos=200)
FROZEN_SECONDS = scaled(3, chaos=30)
CLIENTS = 3
ANSWER_TOKENS = 12
# Beginnings of modules of the standard library, each with several ends.
MODULES = (argparse, tarfile, threading)
PREFIX_CHARACTERS, END_CHARACTERS, ENDS = 1600, 500, 5
# 31 pages of 128 tokens, fewer than the prompts have: the arena is full from early on.
MEMORY = "64MiB"
# The engine's own cache has three prompts, so that most hits are the store's.
SMALL = (
    *("--num-gpu-blocks-override", "24", "--max-num-seqs", "4", "--max-model-len", "2048"),
    "--enforce-eager",
)
# Longest wait for a store that takes no page: the prompts in the engine may be stored by now.
STORING_SECONDS = 20.0


def prompts(rng: random.Random) -> list[str]:
    """Return source texts that share their first 1,600 characters with others."""
    found = []
    for module in MODULES:
        source = inspect.getsource(module)
        for _ in range(ENDS):
            start = rng.randrange(PREFIX_CHARACTERS, len(source) - END_CHARACTERS)
            found.append(source[:PREFIX_CHARACTERS] + source[start : start + END_CHARACTERS])
    return found


class Campaign:
    """Clients that ask an engine, again and again, while the test breaks it and its store.

    Attributes:
        answers: in the order in which they came.
        errors: what a client met that no kill explains.
    """

    def __init__(self, engine: Engine, texts: list[str], seed: int) -> None:
        self.engine = engine
        self.answers: list[tuple[str, Answer]] = []
        self.errors: list[str] = []
        self._texts = texts
        self._is_up = threading.Event()
        self._is_up.set()
        self._is_over = threading.Event()
        self._kills = 0
        self._clients = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),))
            for number in range(CLIENTS)
        ]

    def start(self) -> None:
        for client in self._clients:
            client.start()

    def wait_for(self, count: int) -> None:
        """Wait until this many answers have come, or a client failed."""
        wait_until(lambda: len(self.answers) >= count or self.errors)

    def wait_for_engine(self, store: Store) -> None:
        """Wait until the engine has attached to the store again, or a client failed."""
        wait_until(lambda: is_used(store) or self.errors)

    def wait_for_load(self) -> None:
        """Wait until an answer from now on comes from the store's pages, or a client failed."""
        begun = len(self.answers)
        wait_until(
            lambda: (
                self.errors
                or any(answer.told.get("reason") == "loaded" for _, answer in self.answers[begun:])
            )
        )

    def finish(self) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join()

    def replace_engine(self, start: Callable[[], Engine]) -> None:
        """Kill the engine with all its processes; the clients go on at the one that is started."""
        self._is_up.clear()
        self._kills += 1
        left = shared_files(self.engine.process.pid)
        os.killpg(self.engine.process.pid, signal.SIGKILL)
        self.engine.process.wait()
        for path in left:
            path.unlink(missing_ok=True)
        self.engine = start()
        ready(self.engine)
        self._is_up.set()

    def _run(self, rng: random.Random) -> None:
        while not self._is_over.is_set():
            text = rng.choice(self._texts)
            self._is_up.wait()
            kills = self._kills
            try:
                self.answers.append((text, self.engine.ask(text, ANSWER_TOKENS)))
            except Unavailable as error:
                if self._kills == kills:
                    self.errors.append(error.message)
                    return


def shared_files(group: int) -> set[Path]:
    """Return what a group of processes has in shared memory besides the arena.

    vLLM and multiprocessing leave it there if all of them are killed. A semaphore is mapped by
    another name than the one it has then, so files are compared by their numbers.
    """
    mapped: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(folder.name)) == group:
                lines = (folder / "maps").read_text().splitlines()
                mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    files = [*SHARED_MEMORY.glob("psm_*"), *SHARED_MEMORY.glob("sem.*")]
    return {path for path in files if path.stat().st_ino in mapped}


def kill(store: Store, processes: Processes, rng: random.Random) -> Store:
    """Kill a store, and start its successor on the same arena after up to half a second."""
    os.killpg(store.process.pid, signal.SIGKILL)
    store.process.wait()
    time.sleep(rng.uniform(0, 0.5))
    return processes.store(MEMORY, "--keep-arena", after=store)


def flip(store: Store, count: int, rng: random.Random) -> int:
    """Flip bits of sealed pages of the arena; return how many."""
    arena = ArenaFile(arena_path(store.instance))
    try:
        sealed = arena.sealed()
        for _ in range(count if sealed else 0):
            arena.flip_anywhere(rng.choice(sealed).slot, rng)
        return count if sealed else 0
    finally:
        arena.close()


@contextmanager
def frozen(store: Store) -> Iterator[None]:
    os.kill(store.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(store.process.pid, signal.SIGCONT)


@contextmanager
def filled(store: Store) -> Iterator[int]:
    """Hold every slot that the store can give, as a writer that does not seal."""
    with open_sync_channel(store.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        answer = stub.Attach(
            pb.AttachRequest(client_name="filler", process_id=os.getpid(), process_start_ticks=1),
            timeout=10,
        )
        is_over = threading.Event()

        def beats() -> Iterator[pb.KeepAliveRequest]:
            while not is_over.is_set():
                yield pb.KeepAliveRequest(session_id=answer.session_id)
                is_over.wait(1.0)

        stream = stub.KeepAlive(beats())
        arena = mapped_arena(answer)
        held = 0
        try:
            for number in range(answer.slot_count):
                try:
                    stub.Reserve(
                        pb.ReserveRequest(
                            session_id=answer.session_id,
                            request_id=str(number).encode(),
                            slot_count=1,
                        ),
                        timeout=10,
                    )
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    break
                held += 1
            yield held
        finally:
            is_over.set()
            stream.cancel()
            arena.close()


def is_used(store: Store) -> bool:
    """Return whether both sides of an engine are attached."""
    found = read_store(store.address).stats
    return found is not None and found.session_count >= 2


def writes(store: Store) -> bool:
    """Return whether an engine writes pages at this moment."""
    return stats_of(store).writing_slot_count > 0


def settled(store: Store) -> pb.GetStatsResponse:
    """Wait until nothing is left of the engines that have ended; return the checked statistics."""

    def stats() -> pb.GetStatsResponse:
        with open_sync_channel(store.address) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            found: pb.GetStatsResponse = stub.GetStats(
                pb.GetStatsRequest(check_integrity=True), timeout=30
            )
            return found

    wait_until(
        lambda: (
            not (
                (now := stats()).session_count
                or now.lease_count
                or now.writing_slot_count
                or now.quarantined_slot_count
            )
        )
    )
    return stats()


def test_faults_cost_no_text_no_engine_and_no_page(tmp_path: Path) -> None:
    seed = int(os.environ.get("SPLITPOINT_CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
    rng = random.Random(seed)
    print(f"SPLITPOINT_CHAOS_SEED={seed}")
    texts = prompts(rng)
    with Processes(Path(sys.executable), tmp_path) as processes:
        store = processes.store(MEMORY, "--keep-arena")

        def start_engine() -> Engine:
            return processes.engine(BUNDLED, store, *SMALL)

        plain, first = processes.engine(BUNDLED, None, *SMALL), start_engine()
        ready(plain, first)
        expected = {text: plain.ask(text, ANSWER_TOKENS).text for text in texts}
        stop(plain.process)

        campaign = Campaign(first, texts, seed)
        faults = ["store"] * STORE_KILLS + ["engine"] * ENGINE_KILLS + ["bits"] * 5
        faults += ["frozen", "full"]
        rng.shuffle(faults)
        done: Counter[str] = Counter()
        begun = 0
        campaign.start()
        for number, fault in enumerate(faults):
            # The first tenth of the requests fills the store.
            begun = REQUESTS // 10 if number == 0 else begun + REQUESTS * 9 // 10 // len(faults)
            campaign.wait_for(max(begun, len(campaign.answers) + CLIENTS))
            faulted = len(campaign.answers)
            if fault == "store":
                store = kill(store, processes, rng)
                campaign.wait_for_engine(store)
            elif fault == "engine":
                until = time.monotonic() + STORING_SECONDS
                while not (is_storing := writes(store)) and time.monotonic() < until:
                    time.sleep(0.002)
                done["engine, while it stored"] += is_storing
                campaign.replace_engine(start_engine)
            elif fault == "bits":
                done["flipped bits"] += flip(store, FLIPPED_BITS // 5, rng)
            elif fault == "frozen":
                with frozen(store):
                    time.sleep(FROZEN_SECONDS)
                campaign.wait_for_engine(store)
            else:
                with filled(store) as held:
                    done["slots held by another writer"] = held
                    campaign.wait_for(faulted + 2 * CLIENTS)
            done[fault] += 1
        campaign.wait_for(REQUESTS)
        # After all of it the store is of use again.
        campaign.wait_for_load()
        campaign.finish()

        wrong = [
            (text, answer.text)
            for text, answer in campaign.answers
            if answer.text != expected[text]
        ]
        reasons = Counter(str(answer.told.get("reason")) for _, answer in campaign.answers)
        print(f"faults: {dict(done)}; reasons: {dict(reasons)}")
        assert campaign.errors == []
        assert wrong == []
        assert campaign.engine.process.poll() is None
        assert set(reasons) <= {
            "loaded",
            "local",
            "miss",
            "late",
            "away",
            "failed",
            "slower",
            "remeasured",
        }

        print(f"largest added delay: {added_delay(campaign.engine, store, rng):.3f} s")
        stop(campaign.engine.process)
        left = settled(store)
        assert list(left.integrity_violations) == []
        assert left.free_slot_count + left.sealed_slot_count == left.slot_count
        stop(store.process)


def added_delay(engine: Engine, store: Store, rng: random.Random) -> float:
    """Return the most seconds that a frozen store adds to one of five requests."""

    def ask() -> Answer:
        words = [str(rng.randrange(1000)) for _ in range(300)]
        return engine.ask(" ".join(words))

    usual = statistics.median(ask().seconds for _ in range(5))
    with frozen(store):
        answers = [ask() for _ in range(5)]
    assert {answer.told["reason"] for answer in answers} <= {"late", "away"}
    assert "late" in {answer.told["reason"] for answer in answers}
    return max(answer.seconds for answer in answers) - usual


def dying_load(during_copy: bool) -> Callable[[], None]:
    """Let the thread of the first load die: before its copy, or with garbage in half of it."""

    def prepare() -> None:
        from splitpoint_vllm.worker import LoadJob, Transfers

        load, numbers = Transfers._copy_load, count(1)

        def die(self: Transfers, job: LoadJob) -> tuple[int, str]:
            if next(numbers) > 1:
                return load(self, job)
            if during_copy:
                assert self._claim(job)
                for group in self._parts._groups:
                    for part in group:
                        part.rows[job.block_ids.tolist()[::2]] = 7
            raise SystemExit

        Transfers._copy_load = die  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("during_copy", [False, True])
def test_a_copy_thread_that_dies_costs_its_own_load(
    models: Path, store: engines.Store, during_copy: bool
) -> None:
    first, second = engines.prompt(1, 700), engines.prompt(2, 700)
    with engines.engine(models / "llama", None) as plain:
        expected = plain.generate(first, second)
    with engines.engine(models / "llama", store.address) as computes:
        computes.generate(first, second)
    prepare = dying_load(during_copy)
    with engines.engine(models / "llama", store.address, prepare=prepare) as broken:
        answers = [*broken.generate(first), *broken.generate(second)]
    assert [each.reason for each in answers] == ["failed", "loaded"]
    assert [each.tokens for each in answers] == [each.tokens for each in expected]


def test_an_engine_whose_pages_do_not_fit_goes_on_without_the_store(
    models: Path, tmp_path: Path
) -> None:
    prompt = engines.prompt(1, 700)
    with engines.engine(models / "llama", None) as plain:
        expected = plain.generate(prompt)
    with (
        engines.Store(tmp_path, page_size="64KiB") as small,
        engines.engine(models / "llama", small.address, waits=False) as misfit,
    ):
        answers = [*misfit.generate(prompt), *misfit.generate(prompt)]
        assert small.stats()["sealed_slot_count"] == 0
    assert [each.tokens for each in answers] == [expected[0].tokens] * 2
    assert {each.reason for each in answers} == {"pages_do_not_fit"}
