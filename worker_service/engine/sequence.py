"""A request in the worker: what the scheduler asked for, and the state of its sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from splitpoint.checkpoint.text import TextStream
from splitpoint.errors import SplitpointError
from splitpoint.planning.plan import Residency, RestoreMethod, SplitLine
from splitpoint.planning.schedule import Schedule
from splitpoint.selection import FULL, Selection
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint.structured.grammar import GrammarText
from worker_service.device.claims import Claim
from worker_service.engine.sampling import Sampling
from worker_service.fetching.results import FetchSource
from worker_service.lanes.spans import RequestSpans
from worker_service.pipeline.restore_state import Restoring
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.pipeline.two_ends import TwoEnds
from worker_service.retrieval.bounded_pool import PoolStage
from worker_service.retrieval.selector import EXACT, SelectionPlan
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.client import Match
from worker_service.store.session import Connection
from worker_service.store.write_back import SequenceKey
from worker_service.structured.matcher import GrammarMatcher, Mask


@dataclass(frozen=True, slots=True)
class Admission:
    """A request as the scheduler placed it on this worker.

    Attributes:
        delivered: tokens that an earlier attempt delivered; they are never sampled again.
        split_tokens: in a restore, cached tokens [0, split_tokens) are rebuilt from
            activations and the rest is loaded.
        split_line: streamed: the split of each step by sequence length; None if it is
            always `split_tokens`.
        resident_tokens: streamed: leading tokens, in whole chunks, whose K and V stay on the
            device. With schedule ROW their X stays, from which each step rebuilds K and V.
        source: another host's store that may hold more of the prefix; None if there is none.
        method: TOKENS computes the prefix from its front while chunks are loaded from its
            back, and expects both to meet at `recomputed_tokens`. Any other method follows
            `split_tokens`.
        tile_tokens: tokens of X sent at once; 0 lets the worker choose.
        restores_all: also what the device holds of the prefix comes from the store; set when
            the client chose the split.
        traceparent: W3C trace context; empty if the request is not traced.
        speculation: how its next tokens are guessed.
        selection: which of its stored tokens each decode step reads.
        grammar: what its answer must look like; None: any text.
        stream: number of the Run stream that it came through.
    """

    request_id: str
    attempt: int
    prompt: tuple[int, ...]
    delivered: tuple[int, ...]
    sampling: Sampling
    residency: Residency
    split_tokens: int
    salt: bytes
    split_line: SplitLine | None = None
    resident_tokens: int = 0
    schedule: Schedule = Schedule.PIPELINED
    source: FetchSource | None = None
    method: RestoreMethod = RestoreMethod.LOAD
    recomputed_tokens: int = 0
    tile_tokens: int = 0
    restores_all: bool = False
    predicted_restore_seconds: float = 0.0
    traceparent: str = ""
    speculation: Speculation = PLAIN
    selection: Selection = FULL
    grammar: GrammarText | None = None
    stream: int = 0

    @property
    def key(self) -> SequenceKey:
        return self.request_id, self.attempt, self.stream

    @property
    def tokens(self) -> list[int]:
        """Return the prompt and the delivered tokens, as a new list."""
        return [*self.prompt, *self.delivered]

    @property
    def scores_prompt(self) -> bool:
        """True if it reports the prompt's log-probabilities, before the first token."""
        return self.sampling.prompt_logprobs is not None and not self.delivered

    @property
    def final_tokens(self) -> int:
        """Tokens of the sequence if it runs to max_tokens."""
        return len(self.prompt) + self.sampling.max_tokens


class Stage(Enum):
    """Where a request is in its life; it moves as `_NEXT` allows.

    A running sequence prefills while computed < len(tokens) - 1; then each step computes and
    samples one token. One with `ends` computes its front, and is looked up again where it
    meets what a tier brought.
    """

    WAITING = "waiting"  # what the store has of its prefix is known: it waits for its turn
    ADMITTED = "admitted"  # pages are promised
    AWAITING_PREFIX = "awaiting prefix"  # admitted, and another sequence brings its prefix
    RESTORING = "restoring"  # its prefix comes onto the device, beside the steps of others
    RUNNING = "running"  # [0, computed) has K and V on the device or in the store
    LEAVING = "leaving"  # it lost chunks, or others need its pages: its chunks are written back
    LOOKING_UP = "looking up"  # it has left the device, and the store is asked for its prefix
    FINISHED = "finished"  # the tail is written back, then pages and leases are released


_ADMITTED = {Stage.ADMITTED, Stage.AWAITING_PREFIX, Stage.RESTORING, Stage.RUNNING}
# Without a store there is nothing to write back: a sequence that leaves waits again at once.
_AWAY = {Stage.LEAVING, Stage.WAITING, Stage.FINISHED}
_NEXT = {
    Stage.WAITING: {Stage.ADMITTED, Stage.FINISHED},
    Stage.ADMITTED: {Stage.AWAITING_PREFIX, Stage.RESTORING, Stage.RUNNING, *_AWAY},
    Stage.AWAITING_PREFIX: {Stage.ADMITTED, *_AWAY},
    Stage.RESTORING: {Stage.RUNNING, *_AWAY},
    Stage.RUNNING: _AWAY,
    Stage.LEAVING: {Stage.LOOKING_UP, Stage.FINISHED},
    Stage.LOOKING_UP: {Stage.WAITING, Stage.FINISHED},
    Stage.FINISHED: set(),
}


@dataclass(frozen=True, slots=True)
class Suspects:
    """Chunks of `connection`'s store that may be damaged.

    `error` ends the request if all of them are intact; None lets it go on.
    """

    connection: Connection
    chunks: tuple[StoredChunk, ...]
    error: SplitpointError | None


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request. Only the engine's thread uses it after `Engine.post`.

    Chunk i is on the device if `pages[i]` is not None, and in the store if
    `i < len(stored)`. A resident sequence keeps every page. A streamed one keeps the first
    `kept_chunks` and the newest `window_chunks` of the sealed ones, and frees any other as
    soon as its chunk is sealed. Of the first `kept_inputs` it keeps X instead: chunk i's in
    half `i % 2` of `row_pages[i // 2]`.
    One with `selection_pages` reads what it has in the store through `reads`, which keeps its
    rows and screens there, once a step that read everything has built them.
    Resident sequences with equal beginnings share the pages of their first
    `checked_chunks`, which nothing writes any more.
    """

    admission: Admission
    stage: Stage = field(default=Stage.WAITING, init=False)
    # The leased prefix; None without a store.
    match: Match | None = None
    # None if the request is not traced.
    spans: RequestSpans | None = None
    # Follows its answer; None: any text.
    matcher: GrammarMatcher | None = None
    # A bit for each of the only ids that may be chosen, once a step chose; None: no such list.
    allowed: Mask | None = field(default=None, init=False)
    # Its back comes from a tier while steps compute its front; None: nothing comes.
    ends: TwoEnds | None = None
    tokens: list[int] = field(init=False)
    # Streamed: the split of each step by length; the engine redraws it.
    split_line: SplitLine | None = field(init=False)
    # Write-back holds a chain (and the lease) for it.
    chain_is_open: bool = field(init=False)
    claim: Claim = field(default_factory=Claim)
    # Its place in the order of arrival, which decides what runs and what leaves.
    arrival: int = 0
    # It left the device, and has computed nothing since then.
    is_back: bool = False
    kept_chunks: int = 0
    window_chunks: int = 0
    kept_inputs: int = 0
    # Looks for stop strings; None if there are none.
    text: TextStream | None = None
    # Reads the arena that holds its stored chunks; another one after the store restarts.
    transfer: CacheTransfer | None = None
    computed: int = 0
    # Guessed tokens that the step under way verifies, and their method.
    drafts: list[int] = field(default_factory=list)
    drafted_by: DraftMethod = DraftMethod.OFF
    # A guess spoiled the last step: the next one computes nothing else but the newest token.
    skips_drafts: bool = False
    pages: list[int | None] = field(default_factory=list)
    row_pages: list[int] = field(default_factory=list)
    selection_pages: list[int] = field(default_factory=list)
    # None before it runs, and if it reads everything.
    reads: SequenceReads | None = None
    # Whether it reads by selection, since it was admitted last.
    selection_plan: SelectionPlan = EXACT
    # Its first token whose K and V follow from a selection of the tokens before it; None: none.
    first_approximate: int | None = None
    # X pages by chunk index, until the chunk is sealed.
    input_pages: dict[int, int] = field(default_factory=dict)
    stored: list[StoredChunk] = field(default_factory=list)
    # Chunks handed to write-back so far, restored ones included.
    written_chunks: int = 0
    # Leading chunks that are full, finite and checked. Only these may be shared.
    checked_chunks: int = 0
    # Leading tokens that were on the device already: nothing restored them.
    device_tokens: int = 0
    # Its first chunk that was restored without comparing checksums; None if there is none.
    first_unsure_chunk: int | None = None
    # Keys of its first full chunks, as far as they were asked for.
    chunk_keys: list[bytes] = field(default_factory=list)
    writes_back: bool = False
    paused: bool = False
    # None before it begins, and once its result is used or given up.
    restoring: Restoring | None = None
    # Leading tokens of the prompt whose log-probabilities are reported; the first has none.
    scored_tokens: int = 1
    # Chunks that the store inspects before it is asked for the prefix again.
    suspects: Suspects | None = None
    losses: int = 0
    # Steps that decoded it while it was streamed.
    step_count: int = 0
    step_seconds: float = 0.0
    _stored_end: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.tokens = self.admission.tokens
        self.split_line = self.admission.split_line
        self.chain_is_open = self.match is not None

    def enter(self, stage: Stage) -> None:
        """Move on to a stage; a step that `_NEXT` does not allow is a defect of the engine."""
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"a request that is {self.stage.value} became {stage.value}")
        self.stage = stage

    @property
    def is_admitted(self) -> bool:
        """True from its admission until it leaves the device or ends."""
        return self.stage in _ADMITTED

    @property
    def key(self) -> SequenceKey:
        return self.admission.key

    @property
    def prompt_length(self) -> int:
        return len(self.admission.prompt)

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - len(self.admission.prompt)

    @property
    def salt(self) -> bytes:
        return self.admission.salt

    @property
    def speculation(self) -> Speculation:
        return self.admission.speculation

    @property
    def selection(self) -> Selection:
        return self.admission.selection

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of its prompt are still to be reported.

        Each position is then computed: it uses nothing that is cached, here or in the store.
        """
        return self.admission.scores_prompt and self.scored_tokens < self.prompt_length

    @property
    def is_streamed(self) -> bool:
        return self.admission.residency is Residency.STREAMED

    @property
    def selects(self) -> bool:
        """True if its next decode step reads by selection: not if that is only to draft."""
        reads = self.reads
        return reads is not None and reads.is_built and not self.selection.verify

    @property
    def runnable_tokens(self) -> int:
        """Tokens that the next step may compute: all that are left, or the front of a restore
        or beside a tier.

        A restore goes on while its sequence is paused: until it ends, its pages cannot leave.
        """
        if self.stage is Stage.RESTORING and self.restoring is not None:
            return self.restoring.front_tokens(self.computed)
        if self.paused or self.stage is not Stage.RUNNING:
            return 0
        if self.matcher is not None and self.matcher.is_awaited:
            return 0
        if self.ends is not None:
            return self.ends.front_tokens(self.computed)
        return len(self.tokens) - self.computed

    @property
    def most_drafts(self) -> int:
        """Guesses that its answer has room for behind the newest token."""
        return max(0, self.admission.sampling.max_tokens - self.generated_count - 1)

    @property
    def mean_step_seconds(self) -> float | None:
        """None if no step decoded it, or if it is resident."""
        return self.step_seconds / self.step_count if self.step_count else None

    def step_split(self, chunk_tokens: int) -> int:
        """Return the split of a step that streams the computed tokens."""
        if self.split_line is None:
            return self.admission.split_tokens
        return self.split_line.at(self.computed, chunk_tokens)

    @property
    def stored_range(self) -> range:
        """The chunks in the middle whose K and V are not on the device."""
        start = min(self.kept_chunks, len(self.pages))
        # Pages are freed front to back, so the end only ever moves on.
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
    def ranked_pages(self) -> list[int]:
        """The device pages that its selection ranks beside the stored tokens; often none."""
        if self.reads is None or self.reads.selection.alpha is None:
            return []
        return [self.page(index) for index in self.device_chunks]

    @property
    def read_chunks(self) -> list[StoredChunk]:
        """The chunks that each step reads from the store."""
        if self.reads is not None and self.has_pool:
            return self.reads.chunks
        stored = self.stored_range
        # Rows of a selection come from the store also where X is kept.
        start = stored.start if self.reads is not None else max(stored.start, self.kept_inputs)
        return self.stored[start : stored.stop]

    @property
    def has_pool(self) -> bool:
        """True if a limit has left some of what it stored, in slots of its own."""
        return self.reads is not None and self.reads.pool is not None and self.reads.pool.is_bound

    @property
    def is_lost(self) -> bool:
        """True if it must start over: tokens have left, and with them what could go on without."""
        pool = None if self.reads is None else self.reads.pool
        return pool is not None and pool.stage is PoolStage.LOST

    @property
    def cached_chunks(self) -> tuple[StoredChunk, ...]:
        """All chunks that it may have read from the store, or may still read."""
        has_read = self.stage in (Stage.RESTORING, Stage.RUNNING)
        matched = self.match.chunks if self.match is not None and has_read else ()
        return tuple(dict.fromkeys((*matched, *self.stored)))

    def is_exact_until(self, position: int) -> bool:
        """Return True if all K and V before a position are those that full attention gives."""
        return self.first_approximate is None or position <= self.first_approximate

    def page(self, chunk_index: int) -> int:
        """Return the device page of a chunk that must be there."""
        page = self.pages[chunk_index]
        if page is None:
            raise RuntimeError(f"chunk {chunk_index} is needed on the device but is in the store")
        return page

    def reset(self) -> None:
        """Keep the tokens only: nothing is computed or restored."""
        self.computed = 0
        self._stored_end = 0
        self.stored = []
        self.written_chunks = 0
        self.checked_chunks = 0
        self.device_tokens = 0
        self.first_unsure_chunk = None
        self.first_approximate = None
        self.writes_back = False
        self.match = None
        self.ends = None
        self.transfer = None
        self.restoring = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, start + count)` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int


def device_pages(
    sequences: Iterable[Sequence], chunk_tokens: int
) -> tuple[list[int], list[int], list[int]]:
    """Return all device pages, and for each its sequence's number and its first position."""
    pages: list[int] = []
    owners: list[int] = []
    first_positions: list[int] = []
    for owner, sequence in enumerate(sequences):
        for index in sequence.device_chunks:
            pages.append(sequence.page(index))
            owners.append(owner)
            first_positions.append(index * chunk_tokens)
    return pages, owners, first_positions
