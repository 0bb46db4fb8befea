"""One request's state in the engine. Touched by the engine's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitpoint.planner import Residency, RestoreMethod
from splitpoint.text import TextStream
from worker_service.arena_tensors import StoredChunk
from worker_service.fetch import FetchOrder
from worker_service.puller import Puller
from worker_service.sampling import Sampling
from worker_service.store_client import Match


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
    split_tokens: int
    salt: bytes
    # Another host's store that may hold more of the prefix than the own one.
    source: FetchOrder | None = None
    # TOKENS: prefill from the front while chunks come from the back, expected to meet
    # at `recomputed_tokens`. Any other: what split_tokens says.
    method: RestoreMethod = RestoreMethod.LOAD
    recomputed_tokens: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def final_tokens(self) -> int:
        """Tokens of the sequence if it runs to max_tokens."""
        return len(self.prompt) + self.sampling.max_tokens


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
    `i < len(stored)`. A resident sequence keeps every page; a streamed one gives
    a page up as soon as its chunk is sealed.
    """

    admission: Admission
    tokens: list[int]
    claimed_pages: int
    text: TextStream | None
    match: Match | None = None
    # Reads the arena its stored chunks are in; another one after the store restarts.
    puller: Puller | None = None
    computed: int = 0
    pages: list[int | None] = field(default_factory=list)
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
    # Write-back holds a chain (and the lease) for it.
    chain_is_open: bool = False
    losses: int = 0

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
    def stored_front(self) -> int:
        """Leading chunks that are in the store only; 0 unless streamed."""
        if not self.is_streamed:
            return 0
        for index, page in enumerate(self.pages):
            if page is not None:
                return index
        return len(self.pages)

    @property
    def device_page_count(self) -> int:
        return sum(page is not None for page in self.pages)

    def forget(self) -> None:
        """Back to step 1, tokens kept: nothing of it is computed or restored."""
        self.computed = 0
        self.stored = []
        self.written_chunks = 0
        self.match = None
        self.puller = None
        self.restored = False
