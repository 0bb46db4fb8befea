"""Transfers of one rank: loads from the arena into vLLM's blocks, and stores of blocks.

Two threads copy, one for loads and one for stores; vLLM's thread submits and collects. vLLM waits
for a load without a time limit and reuses the blocks of one that is reported at once, so each job
ends exactly once, and never while its copy is under way:

    queued -> copying -> ended          a copy is one native call
       |                   ^
       +-- given up -------+            a copy that has not begun never begins then

A thread that died or hangs before a copy is noticed when vLLM collects what has ended.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from splitpoint.arena.mapping import Arena
from splitpoint.errors import ResourceExhausted, SplitpointError
from splitpoint_vllm.copies import Copier, Numbers, Parts
from splitpoint_vllm.namespace import page_key
from splitpoint_vllm.store import (
    ArenaName,
    MappedConnection,
    Page,
    PageWriter,
    WrittenPage,
    free_thread,
)

log = logging.getLogger("vllm.splitpoint.worker")

# A load whose copy has not begun by then is given up: computing its tokens takes less.
LOAD_SECONDS = 30.0
# So long may a thread be with a job without copying, or a job wait behind nothing.
STALL_SECONDS = 1.0
# A store that has not begun by then is given up, and so are new ones while so many wait.
STORE_SECONDS = 10.0
MOST_WAITING_STORES = 256
# Answer of the store to Reserve and Seal.
CALL_SECONDS = 1.0
# How long vLLM's step waits for blocks to be read that it wants to use again.
FLUSH_SECONDS = 0.05
# Pages of one Reserve, copy and Seal.
BATCH_PAGES = 64


class State(enum.Enum):
    QUEUED = enum.auto()
    COPYING = enum.auto()
    READ = enum.auto()  # a store: its blocks may be written again
    ENDED = enum.auto()


@dataclass(eq=False)
class Job:
    """Blocks to load or store. `block_ids` has those of the first group first."""

    job_id: int
    group_sizes: Sequence[int]
    block_ids: npt.NDArray[Any]
    after: Any
    submitted: float = field(default_factory=time.monotonic)
    state: State = State.QUEUED

    @property
    def groups(self) -> Numbers:
        """Return the group of each block."""
        return np.repeat(np.arange(len(self.group_sizes)), self.group_sizes)


@dataclass(eq=False)
class LoadJob(Job):
    pages: Sequence[Page] = ()
    arena_name: ArenaName | None = None


@dataclass(eq=False)
class StoreJob(Job):
    """`unstored`: keys of the blocks that are not in the store so far."""

    namespace: bytes = b""
    block_keys: Sequence[bytes] = ()
    unstored: set[bytes] = field(default_factory=set)
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that ended.

    Attributes:
        problem: why a load failed. Empty: it did not.
        seconds: of the work on it, without waiting for its turn.
        unstored: keys of the blocks that were not stored.
    """

    job_id: int
    is_load: bool
    problem: str
    byte_count: int
    seconds: float
    unstored: frozenset[bytes] = frozenset()


class Lane:
    """A queue of jobs and the thread that does them; another thread if that one died or hangs."""

    def __init__(self, name: str, work: Callable[[Any], None], stall_seconds: float) -> None:
        self._name = name
        self._work = work
        self._stall_seconds = stall_seconds
        self._jobs: deque[Job] = deque()
        self._current: Job | None = None
        self._changed = threading.Condition()
        self._progress = time.monotonic()
        self._is_closing = False
        self._number = 0  # of the thread that may take jobs
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        self._number += 1
        return free_thread(self._run, self._name, self._number)

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        with self._changed:
            if not self._jobs and self._current is None:
                self._progress = time.monotonic()
            self._jobs.append(job)
            self._changed.notify()

    def note_progress(self) -> None:
        """Tell that the thread is at work. Called by it."""
        self._progress = time.monotonic()

    def watch(self) -> tuple[Job | None, bool]:
        """Start another thread if this one died, or made no progress on what there is to do.

        Return the job that it was on then, and whether it died.
        """
        with self._changed:
            has_work = self._current is not None or bool(self._jobs)
            is_dead = not self._thread.is_alive()
            silence = time.monotonic() - self._progress
            # A copy takes as long as it takes: nothing could end it.
            copies = self._current is not None and self._current.state is State.COPYING
            hangs = has_work and not copies and silence > self._stall_seconds
            if self._is_closing or not (is_dead or hangs):
                return None, False
            log.error(
                "Splitpoint: thread %s %s; another one takes over",
                *(self._name, "died" if is_dead else "hangs"),
            )
            job, self._current = self._current, None
            self._progress = time.monotonic()
            self._thread = self._start()
            return job, is_dead

    def close(self, seconds: float) -> None:
        """Drop what waits, and wait for the job under way."""
        with self._changed:
            self._is_closing = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(seconds)

    def _run(self, number: int) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_over(number):
                    self._changed.wait()
                if self._is_over(number):
                    return
                job = self._current = self._jobs.popleft()
                self._progress = time.monotonic()
            self._work(job)
            with self._changed:
                if self._current is job:
                    self._current = None

    def _is_over(self, number: int) -> bool:
        return self._is_closing or number != self._number


class Transfers:
    """The jobs of one rank. Public methods are for vLLM's thread.

    Args:
        link_rate: bytes per second of an emulated link that loads take; 0: none is emulated.
    """

    def __init__(
        self,
        store: PageWriter,
        parts: Parts,
        copier: Copier,
        rank: int,
        link_rate: float = 0.0,
    ) -> None:
        self._store = store
        self._parts = parts
        self._copier = copier
        self._rank = rank
        self._link_rate = link_rate
        self._changed = threading.Condition()  # guards states and what ended
        self._jobs: dict[int, Job] = {}
        self._ended: list[Ended] = []
        self._loads = Lane("splitpoint-load", self._load, STALL_SECONDS)
        self._stores = Lane("splitpoint-save", self._save, STORE_SECONDS)

    # -- vLLM's thread ---------------------------------------------------------------------

    def submit_load(
        self,
        job_id: int,
        group_sizes: Sequence[int],
        block_ids: npt.NDArray[Any],
        pages: Sequence[Page],
        arena_name: ArenaName | None,
    ) -> None:
        """Load pages into blocks. `arena_name`: whose slots the pages name; None: of no arena."""
        job = LoadJob(
            job_id, group_sizes, block_ids, self._copier.mark(), pages=pages, arena_name=arena_name
        )
        self._jobs[job_id] = job
        self._loads.put(job)

    def submit_store(
        self,
        job_id: int,
        group_sizes: Sequence[int],
        block_ids: npt.NDArray[Any],
        namespace: bytes,
        block_keys: Sequence[bytes],
    ) -> None:
        """Store blocks under their keys, if the store takes them in time."""
        job = StoreJob(
            job_id,
            group_sizes,
            block_ids,
            self._copier.mark(),
            namespace=namespace,
            block_keys=block_keys,
            unstored=set(block_keys),
        )
        self._jobs[job_id] = job
        if len(self._stores) >= MOST_WAITING_STORES or self._store.connection is None:
            self._give_up(job, "no store takes it")
        else:
            self._stores.put(job)

    def finished(self) -> list[Ended]:
        """Return the jobs that ended since the last call, and look after the threads."""
        now = time.monotonic()
        for lane in (self._loads, self._stores):
            job, is_dead = lane.watch()
            if job is not None:
                self._give_up(job, f"its thread {'died' if is_dead else 'hangs'}", is_dead=is_dead)
        for job in list(self._jobs.values()):
            limit = LOAD_SECONDS if isinstance(job, LoadJob) else STORE_SECONDS
            if now - job.submitted > limit:
                self._give_up(job, "it did not begin in time")
        with self._changed:
            ended, self._ended = self._ended, []
        for each in ended:
            self._jobs.pop(each.job_id, None)
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return when the blocks of these jobs may be written again.

        That is when they were copied. Jobs whose copy does not begin within FLUSH_SECONDS are
        given up.
        """
        jobs = [job for job_id in job_ids if (job := self._jobs.get(job_id)) is not None]
        deadline = time.monotonic() + FLUSH_SECONDS
        while waiting := [job for job in jobs if not self._is_over(job)]:
            if time.monotonic() > deadline:
                for job in waiting:
                    self._give_up(job, "its blocks were wanted")
                for lane in (self._loads, self._stores):
                    job_of_thread, is_dead = lane.watch()
                    if job_of_thread is not None and is_dead:
                        self._give_up(job_of_thread, "its thread died", is_dead=True)
            with self._changed:
                self._changed.wait(FLUSH_SECONDS / 10)

    def close(self, seconds: float) -> None:
        """End the threads and the session."""
        self._loads.close(seconds)
        self._stores.close(seconds)
        self._store.close()

    # -- states ----------------------------------------------------------------------------

    @staticmethod
    def _is_over(job: Job) -> bool:
        return job.state in (State.READ, State.ENDED)

    def _claim(self, job: Job) -> bool:
        """Begin a copy. False if the job was given up."""
        with self._changed:
            if job.state is not State.QUEUED:
                return False
            job.state = State.COPYING
            return True

    def _set(self, job: Job, state: State) -> None:
        with self._changed:
            if job.state is not State.ENDED:
                job.state = state
                self._changed.notify_all()

    def _give_up(self, job: Job, problem: str, *, is_dead: bool = False) -> None:
        """End a job, unless a copy is under way. `is_dead`: its thread died, and the copy too."""
        with self._changed:
            if is_dead or job.state is not State.COPYING:
                self._end(job, problem, 0, 0.0)

    def _end(self, job: Job, problem: str, byte_count: int, seconds: float) -> None:
        with self._changed:
            if job.state is State.ENDED:
                return
            job.state = State.ENDED
            unstored = frozenset(job.unstored) if isinstance(job, StoreJob) else frozenset()
            is_load = isinstance(job, LoadJob)
            self._ended.append(Ended(job.job_id, is_load, problem, byte_count, seconds, unstored))
            self._changed.notify_all()

    # -- loads, on their thread ------------------------------------------------------------

    def _load(self, job: LoadJob) -> None:
        started = time.monotonic()
        byte_count = 0
        try:
            byte_count, problem = self._copy_load(job)
        except Exception as error:
            log.exception("Splitpoint: a load failed")
            problem = f"{type(error).__name__}: {error}"
        self._end(job, problem, byte_count, time.monotonic() - started)

    def _copy_load(self, job: LoadJob) -> tuple[int, str]:
        """Copy, and check what was copied. Return its bytes, and what is wrong with it."""
        connection = self._store.connection
        if connection is None or connection.arena_name != job.arena_name:
            return 0, "the store was lost"
        arena, slots = connection.arena, [page.slot for page in job.pages]
        generations = [page.generation for page in job.pages]
        if not arena.is_current(slots, generations):
            return 0, "its pages were evicted"
        in_cache, in_arena, sizes = self._parts.pieces(
            job.groups, job.block_ids, _slot_addresses(arena, slots)
        )
        byte_count = int(sizes.sum())
        self._emulate_link(job, byte_count)
        if not self._claim(job):
            return 0, "it was given up"
        self._copier.copy(in_cache, in_arena, sizes, job.after)
        damaged = [page for page in job.pages if arena.checksum(page.slot) != page.checksum]
        # A slot that was written meanwhile has other bytes, which is no damage.
        if not arena.is_current(slots, generations):
            return 0, "its pages were evicted during the copy"
        if damaged:
            self._store.report(connection, damaged)
            return 0, f"{len(damaged)} of its {len(slots)} pages are damaged"
        return byte_count, ""

    def _emulate_link(self, job: LoadJob, byte_count: int) -> None:
        """Wait as long as a slow link would take."""
        if self._link_rate:
            end = time.monotonic() + byte_count / self._link_rate
            while job.state is State.QUEUED and (left := end - time.monotonic()) > 0:
                self._loads.note_progress()
                time.sleep(min(left, 0.01))

    # -- stores, on their thread -----------------------------------------------------------

    def _save(self, job: StoreJob) -> None:
        started = time.monotonic()
        problem = ""
        try:
            # The last ones first: what was sealed first is evicted first.
            for first in reversed(range(0, len(job.block_keys), BATCH_PAGES)):
                self._save_batch(job, range(first, min(first + BATCH_PAGES, len(job.block_keys))))
        except ResourceExhausted:
            problem = "full"
        except (SplitpointError, TimeoutError) as error:
            problem = "away"
            log.info("Splitpoint: pages were not stored: %s", error)
        except Exception:
            problem = "error"
            log.exception("Splitpoint: pages were not stored")
        if problem:
            self._store.count(problem)
        self._end(job, problem, job.bytes, time.monotonic() - started)

    def _save_batch(self, job: StoreJob, numbers: range) -> None:
        """Reserve, copy and seal blocks `numbers` of the job. Raises what the store answers."""
        connection = self._store.connection
        if connection is None or job.state is not State.QUEUED:
            return
        granted = self._store.reserve(connection, job.namespace, len(numbers), CALL_SECONDS)
        written: list[WrittenPage] = []
        try:
            written = self._write(connection, job, numbers, granted)
        finally:
            if not written:
                self._store.release_slots(connection, granted)
        self._stores.note_progress()
        if written:
            self._store.seal(connection, job.namespace, written, CALL_SECONDS)
            job.unstored.difference_update(job.block_keys[number] for number in numbers)

    def _write(
        self,
        connection: MappedConnection,
        job: StoreJob,
        numbers: range,
        granted: Sequence[tuple[int, int]],
    ) -> list[WrittenPage]:
        """Copy blocks into granted slots. Empty if the job was given up, or the store is lost."""
        arena, slots = connection.arena, [slot for slot, _ in granted]
        block_ids = job.block_ids[numbers.start : numbers.stop]
        in_cache, in_arena, sizes = self._parts.pieces(
            job.groups[numbers.start : numbers.stop], block_ids, _slot_addresses(arena, slots)
        )
        with self._store.writing:
            if self._store.connection is not connection or not self._claim(job):
                return []
            try:
                self._copier.copy(in_arena, in_cache, sizes, job.after)
            finally:
                is_last = numbers.start == 0
                self._set(job, State.READ if is_last else State.QUEUED)
            checksums = [arena.checksum(slot) for slot in slots]
        job.bytes += int(sizes.sum())
        keys = [page_key(job.block_keys[number], self._rank) for number in numbers]
        return [
            WrittenPage(slot, generation, key, checksum)
            for (slot, generation), key, checksum in zip(granted, keys, checksums, strict=True)
        ]


def _slot_addresses(arena: Arena, slots: Sequence[int]) -> Numbers:
    """Return the address of each slot in this process. An arena of pages has one plane."""
    (plane,) = arena.geometry.planes
    rows = arena.plane(plane.layer, plane.tensor)
    return rows.ctypes.data + np.asarray(slots, dtype=np.int64) * rows.strides[0]
