"""Commands that the engine takes, and events that leave it. Frozen values: they cross threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from splitpoint.costs.profile import Profile
from splitpoint.errors import SplitpointError
from splitpoint.planning.plan import RestoreMethod
from splitpoint.selection import SelectionUsage
from splitpoint.speculation import DraftMethod
from worker_service.engine.sampling import Choice, PromptScores
from worker_service.engine.sequence import Sequence, Suspects
from worker_service.lanes.timeline import LaneTotals, StepTimes
from worker_service.pipeline.tiles import StreamedTokens
from worker_service.store.client import Match
from worker_service.store.write_back import (
    ChunksStored,
    Flushed,
    Job,
    PoolStarted,
    PoolWritten,
    SequenceKey,
    StoreLimitReached,
    WriteFailed,
)

# -- commands, besides those of write-back -------------------------------------


@dataclass(frozen=True, slots=True)
class Matched:
    """The result of looking up again the prefix of a sequence that left the device.

    `error` ends the request: its chunks are intact, so a retry cannot help.
    """

    key: SequenceKey
    match: Match | None
    error: SplitpointError | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    key: SequenceKey


@dataclass(frozen=True, slots=True)
class SetPaused:
    key: SequenceKey
    paused: bool


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function between two steps, on the engine's thread."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Wake:
    """Run a step: a restore got further, or masks are ready."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End `Engine.run`."""


# A Sequence is a new request; the sender does not use it any more.
Command = (
    Sequence
    | Matched
    | Cancel
    | SetPaused
    | Call
    | Wake
    | Stop
    | ChunksStored
    | PoolStarted
    | PoolWritten
    | WriteFailed
    | StoreLimitReached
    | Flushed
)


# -- what a step produces --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenEvent:
    key: SequenceKey
    index: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Log-probabilities of tokens of one sequence's prompt."""

    key: SequenceKey
    scores: PromptScores


@dataclass(frozen=True, slots=True)
class DraftEvent:
    """Drafts of one sequence that a step verified: `drafted` tokens, at least 1, of which the
    first `accepted` ones are those that sampling chose."""

    key: SequenceKey
    method: DraftMethod
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SelectionEvent:
    """What one sequence read by selection in a step; steps that read everything have none."""

    key: SequenceKey
    usage: SelectionUsage


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a request. `reason` is "stop", "length" or "cancelled", unless `error` is set.

    `mean_step_seconds` is of the steps that decoded it while streamed; None if there were none.
    `selection_off_reason`: why decode steps read every token although the request selects, the
    latest reason; empty if none did.
    """

    key: SequenceKey
    reason: str = ""
    error: SplitpointError | None = None
    mean_step_seconds: float | None = None
    selection_off_reason: str = ""


@dataclass(frozen=True, slots=True)
class RestoreEvent:
    """What a restore did; `RestoreReport` of worker.proto has the same fields.

    Attributes:
        fetched_tokens: tokens fetched before, from a tier or another host's store.
        fetch_transfer: how they came from another store (`FetchResult.came_by`).
        recomputed_tokens: tokens computed from their ids, from the front.
        predicted_restore_seconds: 0 if there was no prediction, or other requests used the
            lanes meanwhile.
        loaded_tokens, rebuilt_tokens: tokens brought onto the device: all that are cached,
            or of a streamed request those that stay there.
        device_tokens: leading tokens that were on the device already, of an earlier request.
        first_use_bytes: of the pages that the restore was the first to use.
    """

    key: SequenceKey
    cached_tokens: int
    split_tokens: int
    method: RestoreMethod
    restore_seconds: float
    fetched_tokens: int = 0
    fetch_seconds: float = 0.0
    fetch_transfer: str = ""
    recomputed_tokens: int = 0
    predicted_restore_seconds: float = 0.0
    link_bytes: int = 0
    link_busy_seconds: float = 0.0
    compute_busy_seconds: float = 0.0
    loaded_tokens: int = 0
    rebuilt_tokens: int = 0
    device_tokens: int = 0
    first_use_bytes: int = 0

    @property
    def request_id(self) -> str:
        return self.key[0]

    @property
    def attempt(self) -> int:
        return self.key[1]

    @property
    def brought_tokens(self) -> int:
        return self.loaded_tokens + self.rebuilt_tokens + self.recomputed_tokens

    @property
    def is_whole(self) -> bool:
        """True unless a part stays in the store, as of a streamed request."""
        return self.brought_tokens + self.device_tokens >= self.cached_tokens


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """Tokens of one sequence that a step prefilled."""

    key: SequenceKey
    token_count: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step that ran the model. `streamed` is None if it read nothing from the store."""

    times: StepTimes
    prefilled_tokens: int
    decoded_tokens: int
    streamed: StreamedTokens | None = None

    @property
    def scheduled_tokens(self) -> int:
        return self.prefilled_tokens + self.decoded_tokens


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prefix to look up again, since its sequence left the device or lost a chunk.

    The store inspects suspects first. `computes_all`: nothing of what it finds is used.
    """

    key: SequenceKey
    salt: bytes
    tokens: list[int]
    is_streamed: bool
    suspects: Suspects | None = None
    computes_all: bool = False


@dataclass(slots=True)
class StepOutput:
    """Everything that leaves the engine.

    Attributes:
        prompts: of sequences that want log-probabilities of the prompt tokens in the step.
        prefills: one event for each sequence that the step prefilled.
        drafts: one event for each sequence whose drafts the step verified.
        selections: one event for each sequence that the step read by selection.
        flushes: sequences whose write-back chains are to be flushed.
        profile: costs that were measured anew; None if they did not change.
        step: None if the model did not run.
        work: totals of the lanes, in restores and in the step.
        loss_count: sequences that lost chunks and start over.
        preemption_count: sequences that left the device because others needed their pages.
    """

    tokens: list[TokenEvent] = field(default_factory=list)
    prompts: list[PromptEvent] = field(default_factory=list)
    prefills: list[PrefillEvent] = field(default_factory=list)
    drafts: list[DraftEvent] = field(default_factory=list)
    selections: list[SelectionEvent] = field(default_factory=list)
    finishes: list[FinishEvent] = field(default_factory=list)
    restores: list[RestoreEvent] = field(default_factory=list)
    writes: list[tuple[SequenceKey, list[Job]]] = field(default_factory=list)
    flushes: list[SequenceKey] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    profile: Profile | None = None
    step: StepEvent | None = None
    work: LaneTotals | None = None
    loss_count: int = 0
    preemption_count: int = 0
    running_count: int = 0
    cache_used_bytes: int = 0

    @property
    def ran(self) -> bool:
        """True if the model ran."""
        return self.step is not None

    @property
    def has_news(self) -> bool:
        """True if it holds anything that a Run stream reports: a step, too, without tokens."""
        return bool(
            self.tokens or self.ran or self.finishes or self.restores or self.profile is not None
        )

    @property
    def is_empty(self) -> bool:
        return not (
            self.has_news
            or self.writes
            or self.flushes
            or self.lookups
            or self.step is not None
            or self.work is not None
            or self.loss_count
            or self.preemption_count
        )
