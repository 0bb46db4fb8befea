"""An engine with a real store's rules and a real arena, all in the test's own thread.

What the worker's runtime and write-back do between steps, in the same order and with the
same messages, without sockets: prefixes are matched and leased, full chunks are copied,
verified and sealed, chains end with a flush, and lost prefixes are looked up again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from engine_runner import Transcript, admission, make_engine

from kvstore_service.integrity.inspection import Finder
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.store import KvStore
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.errors import FailedPrecondition, ResourceExhausted
from splitpoint.keys import chunk_key, private_salt
from splitpoint.planning.plan import Residency, SplitLine
from splitpoint.planning.schedule import Schedule
from splitpoint.selection import FULL, Selection
from splitpoint.shapes import ArenaLayout
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Matched, StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission, Suspects
from worker_service.engine.sequence import Sequence as EngineSequence
from worker_service.model.model import Model
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.client import Match
from worker_service.store.pool_rows import move_rows, rows_of_slot, write_rows
from worker_service.store.session import Connection
from worker_service.store.write_back import (
    ChunksStored,
    Flushed,
    Job,
    PoolRelease,
    PoolStart,
    PoolStarted,
    PoolWrite,
    PoolWritten,
    SequenceKey,
    WriteFailed,
    WriteJob,
    copy_chunks,
)

# How long a test waits for a lane before it looks again.
PATIENCE_SECONDS = 60.0


@dataclass
class _Chain:
    salt: bytes
    parent_key: bytes
    lease_ids: list[int]
    has_failed: bool = False
    is_private: bool = False
    pool_slots: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class StoreRunner:
    """One store, and the engines that use it one after the other.

    Attributes:
        after_step: called after each step, before its chunks are stored.
        pool_steps: so many steps later the store does what a pool wants of it.
    """

    store: KvStore
    connection: Connection
    chains: dict[SequenceKey, _Chain] = field(default_factory=dict)
    after_step: Callable[[StepOutput], None] = lambda _: None
    pool_steps: int = 0
    _steps: int = 0
    # What pools want, with the steps after which it is done; ordered by these.
    _late: deque[tuple[int, SequenceKey, Job]] = field(default_factory=deque)

    @property
    def layout(self) -> ArenaLayout:
        return self.connection.tensors.layout

    def run(
        self, engine: Engine, admissions: Sequence[Admission], *, limit: int = 2000
    ) -> Transcript:
        """Admit everything at once and step until idle."""
        for each in admissions:
            self.admit(engine, each)
        transcript = Transcript()
        for _ in range(limit):
            transcript.add(self.step(engine))
            if engine.is_idle:
                return transcript
        raise AssertionError(f"not idle after {limit} steps")

    def admit(self, engine: Engine, each: Admission) -> None:
        tokens = [*each.prompt, *each.delivered]
        engine.admit(each, self._match(each.key, each.salt, tokens))

    def step(self, engine: Engine) -> StepOutput:
        """Step once; steps in which restores only wait do not count."""
        output = engine.step()
        self.after_step(output)
        while engine.is_restoring and not (
            output.ran or output.has_news or output.writes or output.flushes or output.lookups
        ):
            if not engine.can_go_on(output):
                engine.wait(PATIENCE_SECONDS)
            output = engine.step()
            self.after_step(output)
        self.serve(engine, output)
        return output

    def serve(self, engine: Engine, output: StepOutput) -> None:
        """Do what a step asks of the store."""
        self._steps += 1
        for key, jobs in output.writes:
            for is_exact, same in groupby(jobs, key=_exactness):
                chunks = list(same)
                if is_exact is None:
                    due = self._steps + self.pool_steps
                    self._late.extend((due, key, each) for each in chunks)
                else:
                    written = [each for each in chunks if isinstance(each, WriteJob)]
                    self._write(engine, key, written, is_exact=is_exact)
        while self._late and self._late[0][0] <= self._steps:
            _, key, job = self._late.popleft()
            self._serve_pool(engine, key, job)
        for key in output.flushes:
            queued = [job for _, owner, job in self._late if owner == key]
            self._late = deque(each for each in self._late if each[1] != key)
            for job in queued:
                self._serve_pool(engine, key, job)
            chain = self.chains.pop(key)
            self.store.sessions.release(
                self.connection.session_id, chain.lease_ids, chain.pool_slots
            )
            engine.post(Flushed(key))
        for lookup in output.lookups:
            suspects = lookup.suspects
            if suspects is not None and self._are_intact(suspects) and suspects.error is not None:
                engine.post(Matched(lookup.key, None, suspects.error))
                continue
            match = self._match(lookup.key, lookup.salt, lookup.tokens)
            engine.post(Matched(lookup.key, match))

    def _are_intact(self, suspects: Suspects) -> bool:
        """Inspect suspect chunks as ReportChunks does."""
        pool, inspection = self.store.pool, self.store.inspection
        found = [pool.find(chunk.slot) for chunk in suspects.chunks]
        entries = [entry for entry in found if entry is not None]
        inspection.settle(entries, inspection.inspect(entries), Finder.REPORT)
        return all(entry is not None and pool.holds(entry) for entry in found)

    def lose(self, chunk: StoredChunk) -> None:
        """Withdraw a leased chunk, as the store does with damaged ones."""
        session = self.connection.session_id
        self.store.drop_damaged(self.store.leased_chunk(session, chunk.slot, chunk.generation))

    def scrub(self) -> int:
        """Read every sealed chunk as the store's scrubber does; return how many were dropped."""
        inspection, entries = self.store.inspection, list(self.store.pool.index)
        before = inspection.damaged_count
        inspection.settle(entries, inspection.inspect(entries), Finder.SCRUB)
        return inspection.damaged_count - before

    def _match(self, key: SequenceKey, salt: bytes, tokens: Sequence[int]) -> Match:
        found = self.store.match(self.connection.session_id, salt, tokens)
        chunks = tuple(_stored(entry) for entry in found.entries)
        full = min(found.cached_tokens, len(tokens) - 1) // self.layout.chunk_tokens
        self.chains[key] = _Chain(salt, chunks[full - 1].key if full else b"", [found.lease_id])
        return Match(self.connection, found.cached_tokens, chunks, found.lease_id)

    def _serve_pool(self, engine: Engine, key: SequenceKey, job: Job) -> None:
        chain, tensors = self.chains[key], self.connection.tensors
        layout = self.layout
        match job:
            case PoolStart():
                try:
                    granted = self._reserve(chain, job.slot_count)
                except ResourceExhausted:
                    engine.post(PoolStarted(key, None))
                    return
                tensors.check_current(job.chunks)
                move_rows(tensors, job.sources, [slot for slot, _ in granted])
                chunks = [StoredChunk.granted(*each, layout.chunk_tokens) for each in granted]
                engine.post(PoolStarted(key, tuple(chunks)))
            case PoolWrite():
                chunk, targets = None, job.targets
                if targets is None:
                    try:
                        ((slot, generation),) = self._reserve(chain, 1)
                    except ResourceExhausted:
                        engine.post(PoolWritten(key, None, is_refused=True))
                        return
                    chunk = StoredChunk.granted(slot, generation, layout.chunk_tokens)
                    rows = rows_of_slot(slot, layout.kv_head_count, layout.chunk_tokens)
                    targets = [rows] * layout.layer_count
                write_rows(engine.cache, tensors, job.page, targets)
                engine.post(PoolWritten(key, chunk))
            case PoolRelease():
                left, chain.lease_ids = chain.lease_ids, []
                if job.shared:
                    session = self.connection.session_id
                    found = self.store.match(session, job.salt, job.shared_tokens)
                    chain.lease_ids.append(found.lease_id)
                    tensors.check_current(job.shared)
                used = [(each.slot, each.generation) for each in job.used]
                self.store.sessions.release(self.connection.session_id, left, [], used)
            case _:
                raise AssertionError(f"{job} is of no pool")

    def _reserve(self, chain: _Chain, count: int) -> list[tuple[int, int]]:
        runs = self.store.reserve(self.connection.session_id, count, chain.salt)
        granted = [
            (run.first_slot + offset, generation)
            for run in runs
            for offset, generation in enumerate(run.generations)
        ]
        chain.pool_slots += granted
        return granted

    def _write(
        self, engine: Engine, key: SequenceKey, jobs: Sequence[WriteJob], *, is_exact: bool
    ) -> None:
        store, session, chain = self.store, self.connection.session_id, self.chains[key]
        if chain.has_failed:
            return
        if not is_exact and not chain.is_private:
            chain.salt = private_salt(chain.salt, *key, chain.parent_key)
            chain.parent_key, chain.is_private = b"", True
        runs = store.reserve(session, len(jobs), chain.salt)
        granted = [
            (run.first_slot + offset, generation)
            for run in runs
            for offset, generation in enumerate(run.generations)
        ]
        slots = [slot for slot, _ in granted]
        checksums = copy_chunks(engine.cache, self.connection.tensors, jobs, slots)
        written, parent = [], chain.parent_key
        for job, (slot, generation), checksum in zip(jobs, granted, checksums, strict=True):
            written.append(WrittenChunk(slot, generation, parent, job.token_ids, checksum))
            parent = chunk_key(self.layout.layout_hash, chain.salt, parent, job.token_ids)
        try:
            outcome = store.seal(
                session,
                chain.salt,
                written,
                store.verify(written),
                lease_id=chain.lease_ids[-1],
                keep_leased=True,
            )
        except FailedPrecondition as error:
            chain.has_failed = True
            store.sessions.release(session, [], granted)
            engine.post(WriteFailed(key, error))
            return
        if outcome.lease_id not in chain.lease_ids:
            chain.lease_ids.append(outcome.lease_id)
        stored = tuple(_stored(sealed.entry) for sealed in outcome.chunks)
        if len(jobs[-1].token_ids) == self.layout.chunk_tokens:
            chain.parent_key = stored[-1].key
        engine.post(ChunksStored(key, jobs[0].chunk_index, stored))


def _exactness(job: Job) -> bool | None:
    """Return whether a chunk is exact; None for what a pool wants."""
    return job.is_exact if isinstance(job, WriteJob) else None


@contextmanager
def store_runner(layout: ArenaLayout, folder: Path, slot_count: int) -> Iterator[StoreRunner]:
    opened = open_or_create_arena(folder / "store" / "arena", layout, slot_count)
    # Time stands still: no heartbeat is late.
    store = KvStore(opened.arena, clock=lambda: 0.0, lease_seconds=60, is_present=lambda _: True)
    try:
        session = store.sessions.attach("test", ProcessIdentity(1, 1)).session_id
        tensors = ArenaTensors(opened.arena)
        yield StoreRunner(store, Connection(session, opened.arena.superblock.epoch, 60.0, tensors))
    finally:
        store.close()
        opened.owner.remove()


def restored(
    runner: StoreRunner, model: Model, ask: Admission, cached_tokens: int
) -> Iterator[tuple[int, Residency, list[int]]]:
    """Yield the answer with the cached prefix restored at three splits, resident and streamed.

    Each is given by an engine of its own, which has nothing of the prefix on its device.
    """
    for split in (0, cached_tokens // 2, cached_tokens):
        for residency in (Residency.RESIDENT, Residency.STREAMED):
            here = replace(ask, split_tokens=split, residency=residency)
            found = runner.run(make_engine(model, has_activations=True), [here])
            yield split, residency, found.tokens[ask.request_id]


def wait_loaded(sequence: EngineSequence) -> None:
    """Wait until the link has brought everything of a restore that has no products."""
    assert sequence.restoring is not None
    run = sequence.restoring.run
    with run.group.changed:
        assert run.group.changed.wait_for(lambda: run.is_done, PATIENCE_SECONDS)
    run.group.wait_quiet()


def streamed(
    name: str,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    salt: bytes = b"",
    split: int | SplitLine = 0,
    resident_tokens: int = 0,
    schedule: Schedule = Schedule.PIPELINED,
    selection: Selection = FULL,
) -> Admission:
    """Return the admission of a request whose cache lives in the store."""
    return replace(
        admission(name, prompt, sampling),
        residency=Residency.STREAMED,
        salt=salt,
        split_tokens=split if isinstance(split, int) else 0,
        split_line=split if isinstance(split, SplitLine) else None,
        resident_tokens=resident_tokens,
        schedule=schedule,
        selection=selection,
    )


def _stored(entry: Entry) -> StoredChunk:
    return StoredChunk(entry.slot, entry.generation, entry.token_count, entry.key, entry.checksum)
