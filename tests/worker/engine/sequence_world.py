"""Queues, pages and claims of an engine as they are, around a model and a store that are doubles.

The model's double chooses random tokens. The store's double remembers how many tokens of each
request are sealed, answers late and in any order between requests, fails, and goes away. So a
history of a hundred steps takes milliseconds.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from engine_runner import CPU, Transcript, admission

from splitpoint.errors import (
    ChunkLost,
    FailedPrecondition,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.residency.selecting import LOADS_ALL, SelectionPages, StepSplit
from splitpoint.selection import FULL, Selection
from splitpoint.shapes import ArenaLayout, DataType, ModelShape, chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan
from worker_service.engine.batch import Batch
from worker_service.engine.messages import Lookup, Matched, StepOutput
from worker_service.engine.model_runner import StepResult
from worker_service.engine.pages import PageManager
from worker_service.engine.postprocessor import Postprocessor
from worker_service.engine.queues import SequenceQueues
from worker_service.engine.sampling import Choice, Sampling
from worker_service.engine.selected_step import Reader
from worker_service.engine.sequence import Admission, Segment, Sequence, Stage
from worker_service.engine.streamed_step import LostSequence
from worker_service.retrieval.selector import EXACT, SelectionPlan
from worker_service.retrieval.sequence_reads import ReadCounts
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.client import Match
from worker_service.store.write_back import ChunksStored, SequenceKey, WriteJob

CHUNK = 4
SHAPE = ModelShape("double", "opt", 1, 4, 2, 2, 2, 4, 8, 64, DataType.FLOAT32)
EOS = 1
SELECTING = Selection.parsed("window:0.5")
VERIFYING = Selection.parsed("window:0.5,verify")
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class _Chain:
    """Jobs of one sequence that are not written yet.

    Attributes:
        flush: it ends after them.
        error: what its next job meets; it has no more after that.
    """

    jobs: deque[WriteJob] = field(default_factory=deque)
    flush: bool = False
    error: SplitpointError | None = None
    has_failed: bool = False


class Reads:
    """A double of `SequenceReads`: which chunks its screens are of, and in which pages.

    Attributes:
        log: how often one was built, extended and dropped.
    """

    pool = None
    pool_bytes = 0

    def __init__(self, cache: DeviceCache, pages: list[int], log: Counter[str]) -> None:
        self.pages = pages
        self.chunks: list[StoredChunk] = []
        self.log = log
        self._cache = cache

    @property
    def is_built(self) -> bool:
        return bool(self.chunks)

    @property
    def stored_tokens(self) -> int:
        return len(self.chunks) * CHUNK

    def new_counts(self) -> ReadCounts:
        return ReadCounts()

    def build(self, chunks: list[StoredChunk]) -> None:
        self.chunks = list(chunks)
        self.log["built"] += 1

    def extend(self, page: int, chunk: StoredChunk) -> None:
        assert self._cache.pages.references(page) == 1, "its K are gone"
        self.chunks.append(chunk)
        self.log["extended"] += 1

    def drop(self) -> None:
        for page in self.pages:
            assert self._cache.pages.references(page) == 1, "another may use its pages"
        self.log["dropped"] += self.is_built
        self.chunks = []


class Chooses:
    """A double of `Selector`: requests of every third length read everything."""

    def __init__(self, cache: DeviceCache) -> None:
        self.log: Counter[str] = Counter()
        self._cache = cache

    def plan(
        self, selection: Selection, final_tokens: int, _: StepSplit, *, is_streamed: bool
    ) -> SelectionPlan:
        if selection.is_full or not is_streamed or not final_tokens % 3:
            return EXACT
        return SelectionPlan(SelectionPages(1 + final_tokens % 2, final_tokens % 3))

    def reads(self, _: Selection, plan: SelectionPlan, pages: Any, final_tokens: int) -> Any:
        assert (
            len(pages)
            == plan.pages.count
            == self.plan(SELECTING, final_tokens, LOADS_ALL, is_streamed=True).pages.count
        )
        return Reads(self._cache, pages, self.log)


class World:
    """One engine's sequences. `step` until `queues.is_empty`."""

    def __init__(self, rng: random.Random, *, has_store: bool) -> None:
        self.rng = rng
        layout = ArenaLayout.of(
            SHAPE, chunk_tokens=CHUNK, has_activations=has_store and rng.random() < 0.5
        )
        self.batch = rng.randrange(2, 9)
        self.budget = rng.choice([5, 9, 16])
        room = rng.choice([1, 2, 2 * (chunks_of(self.budget, CHUNK) + 1)]) if has_store else 0
        window = rng.choice([0, 0, 1, 3]) if has_store else 0
        sinks = rng.randrange(2) if window else 0
        plan = MemoryPlan(
            budget_bytes=0,
            weight_bytes=0,
            workspace_bytes=0,
            page_bytes=SHAPE.page_bytes(CHUNK),
            page_count=rng.randrange(4, 24),
            input_page_count=self.batch + 10 if layout.has_activations else 0,
            streamed_page_count=1 + window + sinks,
            room_page_count=room,
            window_page_count=window,
            sink_page_count=sinks,
        )
        self.cache = DeviceCache(layout, plan, CPU)
        self.selector = Chooses(self.cache)
        self.pages = PageManager(
            self.cache, shares_prefixes=rng.random() < 0.7, selector=self.selector
        )
        self.queues = SequenceQueues(self.cache, self.pages, None, self.batch)
        self.postprocessor = Postprocessor(self.queues, self.pages, (EOS,))
        self.transcript = Transcript()
        self.admissions: dict[str, Admission] = {}
        self.preemptions = self.losses = self.peak_running = 0
        self.store_is_up = has_store
        self.has_store = has_store
        self._sealed: dict[SequenceKey, int] = {}
        self._chains: dict[SequenceKey, _Chain] = {}
        self._lookups: deque[Lookup] = deque()
        self._slots = self._step_count = 0

    # -- what happens to it ------------------------------------------------------------

    def admit(self, name: str, prompt: int, sampling: Sampling) -> None:
        rng = self.rng
        each = admission(name, [rng.choice([2, 3])] * prompt, sampling)
        if self.has_store and self.store_is_up and rng.random() < 0.3:
            each = replace(
                each,
                residency=Residency.STREAMED,
                resident_tokens=rng.choice([0, 0, CHUNK, 3 * CHUNK]),
                schedule=rng.choice([Schedule.PIPELINED, Schedule.ROW]),
                selection=rng.choice([FULL, SELECTING, VERIFYING]),
            )
        self.admissions[name] = each
        key = each.key
        if self.has_store and rng.random() < 0.3:
            self._sealed[key] = rng.randrange(prompt + 1)
        self.queues.add(Sequence(each, self._match(key, prompt)))

    def lose_store(self) -> None:
        """Fail all writes of present chains, and find no prefix until the store is back."""
        self.store_is_up = False
        self._sealed.clear()
        error = FailedPrecondition("the KV store session changed", reason="STORE_LOST")
        for chain in self._chains.values():
            chain.error = chain.error or error

    def fail_a_write(self) -> None:
        if self._chains:
            self.rng.choice(list(self._chains.values())).error = self.rng.choice(
                [
                    ResourceExhausted("the arena is full", reason="ARENA_FULL"),
                    Unavailable("no answer", reason="STORE_LOST"),
                    FailedPrecondition("a parent is damaged", reason="CHUNK_LOST"),
                ]
            )

    def live(self) -> list[Sequence]:
        queues = self.queues
        return [*queues.waiting, *queues.running, *queues._flushed()]

    # -- a step --------------------------------------------------------------------------

    def step(self, *, prompt_store: bool = False, losing: float = 0.0) -> bool:
        """Run one step; return False if the model did not run and nothing is to be answered."""
        self._answer(prompt_store=prompt_store)
        self.queues.admit_waiting()
        for sequence in list(self.queues.running):
            if sequence.stage in (Stage.ADMITTED, Stage.AWAITING_PREFIX):
                self._restore(sequence)
        decodes, segments = self.queues.take_step(self.budget)
        for sequence in decodes:
            if self.rng.random() < 0.3:
                most = self.rng.randrange(sequence.most_drafts + 1)
                sequence.drafts = [2] * self.pages.grow_for_drafts(sequence, most)
        if decodes or segments:
            self.postprocessor.apply(self._computed(decodes, segments, losing))
        output, self.queues.output = self.queues.output, StepOutput()
        self._take(output)
        self.check()
        chains = self._chains.values()
        return bool(
            decodes
            or segments
            or output.finishes
            or self._lookups
            or any(chain.jobs or chain.flush for chain in chains)
        )

    def _restore(self, sequence: Sequence) -> None:
        """Do what the engine and a restore do, without the bytes."""
        pages, match = self.pages, sequence.match
        if pages.must_wait(sequence):
            if sequence.stage is Stage.ADMITTED:
                sequence.enter(Stage.AWAITING_PREFIX)
            return
        if sequence.stage is Stage.AWAITING_PREFIX:
            sequence.enter(Stage.ADMITTED)
            if sequence.chain_is_open and pages.holds_more(sequence):
                self.queues.look_up_again(sequence)
                return
        if not self.queues.can_restore(sequence) or not pages.has_input_page:
            return
        pages.take_prefix(sequence)
        sequence.enter(Stage.RUNNING)
        if match is None:
            return
        cached = min(match.cached_tokens, len(sequence.tokens) - 1)
        full = cached // CHUNK
        stored = pages.stored_chunks(sequence, full)
        has_tail = cached % CHUNK > 0 and cached > sequence.device_tokens
        pages.allocate_prefix(sequence, stored, full + has_tail)
        pages.allocate_row_pages(sequence)
        pages.allocate_selection(sequence)
        if has_tail and self.cache.inputs:
            pages.allocate_input_page(sequence, full)
        sequence.computed = max(cached, sequence.device_tokens)
        sequence.stored = list(match.chunks[:full])
        sequence.written_chunks = full
        sequence.writes_back = True

    def _computed(
        self, decodes: list[Sequence], segments: list[Segment], losing: float
    ) -> StepResult:
        pieces = [
            *(Segment(each, each.computed, 1 + len(each.drafts)) for each in decodes),
            *segments,
        ]
        for piece in pieces:
            for position in range(piece.start, piece.start + piece.count):
                piece.sequence.page(position // CHUNK)  # it must be on the device
        whole = [
            each.start + each.count == len(each.sequence.tokens) + len(each.sequence.drafts)
            for each in pieces
        ]
        batch = Batch(
            time.perf_counter(),
            [piece.sequence for piece in pieces],
            [piece.count for piece in pieces],
            token_ids=_NONE,
            positions=_NONE,
            pages=_NONE,
            rows=_NONE,
            logit_rows=_NONE,
            logit_counts=[int(done) for done in whole],
            inputs=None,
            decode_plan=None,
            streamed=None,
            prefills=cast(Any, segments),
            selected=cast(Any, SimpleNamespace(readers=self._readers(decodes))),
        )
        if self.rng.random() < losing:
            lost = [
                LostSequence(each.sequence, ChunkLost("a chunk was reused", reason="CHUNK_LOST"))
                for each in pieces
                if each.sequence.match is not None and self.rng.random() < 0.5
            ]
            if lost:
                return StepResult(batch, [], lost=lost)
        choices: list[Any] = [
            self._choices(each.sequence.drafts) if done else []
            for each, done in zip(pieces, whole, strict=True)
        ]
        # Now and then drafts spoil the row of the newest token.
        spoiled = [each for each in decodes if each.drafts and self.rng.random() < 0.1]
        for place, sequence in enumerate(decodes):
            if sequence in spoiled and self.rng.random() < 0.5:
                choices[place] = []
        return StepResult(batch, [], choices=choices, spoiled=spoiled)

    def _readers(self, decodes: list[Sequence]) -> list[Reader]:
        """Return those that read by selection, and build what the others will read by."""
        readers = []
        for number, sequence in enumerate(decodes):
            reads = sequence.reads
            stored = sequence.stored_range
            if sequence.selects and reads is not None:
                position = sequence.computed
                readers.append(Reader(number, position, reads, _NONE, number, sequence))
            elif isinstance(reads, Reads) and not reads.is_built:
                reads.build(sequence.stored[stored.start : stored.stop])
        return readers

    def _choices(self, drafts: list[int]) -> list[Choice]:
        """Return some drafts that were right, and one token more."""
        right = drafts[: self.rng.randrange(len(drafts) + 1)]
        last = EOS if self.rng.random() < 0.05 else 2 + self.rng.randrange(6)
        return [*map(Choice, right), Choice(last)]

    def _take(self, output: StepOutput) -> None:
        self.transcript.add(output)
        self.preemptions += output.preemption_count
        self.losses += output.loss_count
        self.peak_running = max(self.peak_running, len(self.queues.running))
        for key, jobs in output.writes:
            self._chains[key].jobs.extend(each for each in jobs if isinstance(each, WriteJob))
        for key in output.flushes:
            self._chains[key].flush = True
        self._lookups.extend(output.lookups)

    # -- the store -----------------------------------------------------------------------

    def _match(self, key: SequenceKey, token_count: int) -> Match | None:
        if not self.store_is_up:
            return None
        cached = min(self._sealed.get(key, 0), token_count)
        chunks = tuple(self._chunk(min(CHUNK, cached - first)) for first in range(0, cached, CHUNK))
        assert key not in self._chains, "a sequence has two chains"
        self._chains[key] = _Chain()
        return Match(cast(Any, None), cached, chunks, 0)

    def _chunk(self, token_count: int) -> StoredChunk:
        self._slots += 1
        return StoredChunk(self._slots, 1, token_count, b"", 0)

    def _answer(self, *, prompt_store: bool) -> None:
        """Write some jobs, end some chains, and answer some lookups."""
        rng = self.rng
        for key, chain in list(self._chains.items()):
            if chain.has_failed:
                chain.jobs.clear()
            elif chain.jobs and chain.error is not None:
                chain.has_failed = True
                chain.jobs.clear()
                self.queues.write_failed(key, chain.error)
            while chain.jobs and (prompt_store or rng.random() < 0.5):
                job = chain.jobs.popleft()
                end = job.chunk_index * CHUNK + len(job.token_ids)
                if job.is_exact:
                    self._sealed[key] = max(end, self._sealed.get(key, 0))
                else:
                    # No request finds it.
                    assert self.admissions[key[0]].selection == SELECTING
                    assert len(job.token_ids) == CHUNK
                owner = self.queues.find(key)
                assert owner is not None, "pages of an ended sequence are written"
                stored = self._chunk(len(job.token_ids))
                self.pages.chunks_stored(owner, ChunksStored(key, job.chunk_index, (stored,)))
            if chain.flush and not chain.jobs and (prompt_store or rng.random() < 0.5):
                del self._chains[key]
                self.queues.flushed(key)
        while self._lookups and (prompt_store or rng.random() < 0.5):
            lookup = self._lookups.popleft()
            match = self._match(lookup.key, len(lookup.tokens))
            self.queues.matched_again(Matched(lookup.key, match))
        # What these gave, such as lookups after flushes.
        output, self.queues.output = self.queues.output, StepOutput()
        self._take(output)

    # -- invariants -----------------------------------------------------------------------

    def check(self) -> None:
        """Check that pages, promises and queues agree."""
        cache, queues, live = self.cache, self.queues, self.live()
        self._step_count += 1
        if self.pages.shared is not None and self._step_count % 16 == 0:
            self.pages.shared.prefixes.check_integrity()
        held = Counter(page for sequence in live for page in _held(sequence) if page is not None)
        inputs = [page for sequence in live for page in sequence.input_pages.values()]
        assert {page: cache.pages.references(page) for page in held} == held
        assert len(held) == cache.pages.used_count
        assert len(inputs) == len(set(inputs)) == cache.input_pages.used_count
        for sequence in live:
            assert sequence.claim.held == sum(page is not None for page in _held(sequence))
            if isinstance(reads := sequence.reads, Reads):
                assert reads.pages == sequence.selection_pages
                stored = sequence.stored_range
                assert reads.chunks in ([], sequence.stored[stored.start : stored.stop])
            if sequence.is_streamed and sequence.stage is Stage.RUNNING:
                self._check_streamed(sequence)
        claims = cache.claims
        assert claims.promised_count == sum(each.claim.promised for each in live)
        assert claims.room_used == sum(each.claim.room_count for each in live)
        assert claims.room_used <= cache.plan.room_page_count
        assert claims.spare_count >= 0
        assert len(queues.running) <= self.batch
        for listed in (queues.running, queues.waiting):
            arrivals = [each.arrival for each in listed]
            assert arrivals == sorted(set(arrivals))
        assert len({each.key for each in live}) == len(live)
        assert not any(each.claim.held or each.claim.promised for each in queues.waiting)

    def _check_streamed(self, sequence: Sequence) -> None:
        """Check that exactly the chunks behind front and window are in the store alone."""
        sealed = len(sequence.stored)
        start = min(sequence.kept_chunks, len(sequence.pages))
        assert sequence.stored_range.start == start
        assert [index for index, page in enumerate(sequence.pages) if page is None] == list(
            sequence.stored_range
        )
        newest = max(start, sealed - sequence.window_chunks)
        assert sequence.stored_range.stop <= sealed or not sequence.stored_range
        # A window that gave a page up before it was full lacks its oldest chunks.
        assert sequence.stored_range.stop >= newest
        room = sequence.claim.room_count
        unsealed = sum(page is not None for page in sequence.pages[sealed:])
        assert room <= max(0, unsealed - 1)


def _held(sequence: Sequence) -> list[int | None]:
    """Return all pages that a sequence has."""
    return [*sequence.pages, *sequence.row_pages, *sequence.selection_pages]
