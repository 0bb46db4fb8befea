"""One request's state in the engine. Touched by the engine's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitpoint.checkpoint.text import TextStream
from splitpoint.errors import SplitpointError
from splitpoint.planning.planner import Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_line import SplitLine
from worker_service.engine.sampling import Sampling
from worker_service.lanes.spans import RequestSpans
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.client import Connection, Match
from worker_service.store.fetch import FetchSource
from worker_service.store.verifier import Check


@dataclass(frozen=True, slots=True)
class Admission:
    """What the scheduler asked for; immutable."""

    request_id: str
    attempt: int
    prompt: tuple[int, ...]
    # Tokens an earlier attempt already delivered: forced, never sampled again.
    delivered: tuple[int, ...]
    sampling: Sampling
    residency: Residency
    # Of the restore: [0, split_tokens) of what is cached is rebuilt, the rest loaded.
    split_tokens: int
    salt: bytes
    # Streamed, of each step: how the split follows the sequence; None: it stays.
    split_line: SplitLine | None = None
    # Streamed: of so many leading tokens, in whole chunks, K,V stay on the device; with
    # schedule ROW it is X, from which they are rebuilt in each step.
    resident_tokens: int = 0
    schedule: Schedule = Schedule.PIPELINED
    # Another host's store that may hold more of the prefix than the own one.
    source: FetchSource | None = None
    # TOKENS: prefill from the front while chunks come from the back, expected to meet
    # at `recomputed_tokens`. Any other: what split_tokens says.
    method: RestoreMethod = RestoreMethod.LOAD
    recomputed_tokens: int = 0
    # Tokens of X to send at once; 0: as the worker likes.
    tile_tokens: int = 0
    predicted_restore_seconds: float = 0.0
    # Of whoever traces the request (W3C); empty: nobody.
    traceparent: str = ""
    # What it did, for them; None: nobody traces it.
    spans: RequestSpans | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def final_tokens(self) -> int:
        """Tokens of the sequence if it runs to max_tokens."""
        return len(self.prompt) + self.sampling.max_tokens

    def step_split(self, length: int, chunk_tokens: int) -> int:
        """The split of a step that streams a sequence of `length` tokens."""
        if self.split_line is None:
            return self.split_tokens
        return self.split_line.at(length, chunk_tokens)


@dataclass(frozen=True, slots=True)
class Suspects:
    """Chunks of `connection`'s store that may be damaged.

    `error`: what ends the request if all of them are intact; None: it goes on.
    """

    connection: Connection
    chunks: tuple[StoredChunk, ...]
    error: SplitpointError | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request.

    The lifecycle, in order:
      1. admitted   pages are claimed; the store was asked for its prefix (`match`)
      2. restored   [0, computed) has K and V on the device or in the store
      3. prefill    computed < len(tokens) - 1
      4. decode     computed == len(tokens) - 1: each step computes and samples one
      5. finished   the tail is written back, then pages and leases are given up

    Chunk i is on the device when `pages[i]` is not None, and in the store when
    `i < len(stored)`. A resident sequence keeps every page; a streamed one keeps the
    first `kept_chunks` and gives any other up as soon as its chunk is sealed. Of the first
    `kept_inputs` it keeps X instead: that of chunk i in half `i % 2` of `row_pages[i // 2]`.
    """

    admission: Admission
    tokens: list[int]
    claimed_pages: int
    text: TextStream | None
    kept_chunks: int = 0
    kept_inputs: int = 0
    match: Match | None = None
    # Reads the arena its stored chunks are in; another one after the store restarts.
    transfer: CacheTransfer | None = None
    computed: int = 0
    pages: list[int | None] = field(default_factory=list)
    row_pages: list[int] = field(default_factory=list)
    # X pages by chunk index, until the chunk is sealed.
    input_pages: dict[int, int] = field(default_factory=dict)
    stored: list[StoredChunk] = field(default_factory=list)
    # Chunks handed to write-back so far, restored ones included.
    written_chunks: int = 0
    writes_back: bool = False
    paused: bool = False
    restored: bool = False
    # Its prefix is being looked up again after a chunk was lost.
    awaits_match: bool = False
    # Of what its restore read; to be waited for before anything of it is used.
    check: Check | None = None
    # For the store to inspect before it is asked for the prefix again.
    suspects: Suspects | None = None
    # Write-back holds a chain (and the lease) for it.
    chain_is_open: bool = False
    losses: int = 0
    # Of the steps that decoded it, while it was streamed.
    step_count: int = 0
    step_seconds: float = 0.0
    _stored_end: int = field(default=0, init=False)

    @property
    def key(self) -> tuple[str, int]:
        return self.admission.key

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - len(self.admission.prompt)

    @property
    def is_streamed(self) -> bool:
        return self.admission.residency is Residency.STREAMED

    @property
    def mean_step_seconds(self) -> float | None:
        """None: no step decoded it, or it is resident."""
        return self.step_seconds / self.step_count if self.step_count else None

    @property
    def stored_range(self) -> range:
        """The chunks whose K,V are not on the device, between those whose are."""
        start = min(self.kept_chunks, len(self.pages))
        # Pages are given up front to back, so the end only ever moves on.
        end = max(self._stored_end, start)
        while end < len(self.pages) and self.pages[end] is None:
            end += 1
        self._stored_end = end
        return range(start, end)

    @property
    def device_chunks(self) -> list[int]:
        """The chunks that are on the device, in order."""
        stored = self.stored_range
        return [*range(stored.start), *range(stored.stop, len(self.pages))]

    @property
    def read_chunks(self) -> list[StoredChunk]:
        """What each step reads from the store."""
        stored = self.stored_range
        return self.stored[max(stored.start, self.kept_inputs) : stored.stop]

    @property
    def cached_chunks(self) -> tuple[StoredChunk, ...]:
        """Everything that it may have read from the store, or may still read."""
        matched = self.match.chunks if self.match is not None and self.restored else ()
        return tuple(dict.fromkeys((*matched, *self.stored)))

    @property
    def device_page_count(self) -> int:
        return len(self.pages) - len(self.stored_range) + len(self.row_pages)

    def page(self, chunk_index: int) -> int:
        """The device page of a chunk that must be there."""
        page = self.pages[chunk_index]
        if page is None:
            raise RuntimeError(f"chunk {chunk_index} is needed on the device but is in the store")
        return page

    def forget(self) -> None:
        """Back to step 1, tokens kept: nothing of it is computed or restored."""
        self.computed = 0
        self._stored_end = 0
        self.stored = []
        self.written_chunks = 0
        self.match = None
        self.transfer = None
        self.check = None
        self.restored = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, start + count)` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int
