"""What goes into the engine (commands) and what comes out of it (events).

Frozen values: they cross threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from splitpoint.costs.profile import Profile
from splitpoint.errors import SplitpointError
from splitpoint.planning.planner import RestoreMethod
from worker_service.engine.sampling import Choice
from worker_service.engine.sequence import Admission, Suspects
from worker_service.lanes.timeline import StepTimes
from worker_service.lanes.totals import LaneTotals
from worker_service.pipeline.tiles import StreamedTokens
from worker_service.store.client import Match
from worker_service.store.write_back import (
    ChunksStored,
    Flushed,
    SequenceKey,
    WriteEnded,
    WriteFailed,
    WriteJob,
)

# -- commands, besides those of write-back -------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Run a request. `match` is its leased prefix; None without a store."""

    admission: Admission
    match: Match | None


@dataclass(frozen=True, slots=True)
class Matched:
    """The prefix of a sequence whose chunks were lost, looked up again.

    `error`: the chunks are intact, and this is why the sequence began anew.
    """

    key: SequenceKey
    match: Match | None
    error: SplitpointError | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    key: SequenceKey


@dataclass(frozen=True, slots=True)
class SetPaused:
    request_id: str
    paused: bool


@dataclass(frozen=True, slots=True)
class Call:
    """Run something between two steps, on the engine's thread."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave `run`."""


Command = (
    Admit
    | Matched
    | Cancel
    | SetPaused
    | Call
    | Stop
    | ChunksStored
    | WriteFailed
    | WriteEnded
    | Flushed
)


# -- what a step produces --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenEvent:
    key: SequenceKey
    index: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """`reason` is "stop", "length" or "cancelled", unless `error` is set."""

    key: SequenceKey
    reason: str = ""
    matched_stop: str = ""
    error: SplitpointError | None = None
    # Streamed: of the steps that decoded it; None: resident, or none did.
    mean_step_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RestoreEvent:
    key: SequenceKey
    cached_tokens: int
    split_tokens: int
    method: RestoreMethod
    seconds: float
    # From another host's store, before.
    fetched_tokens: int = 0
    fetch_seconds: float = 0.0
    # Prefilled from their ids, from the front.
    recomputed_tokens: int = 0
    predicted_seconds: float = 0.0
    link_bytes: int = 0
    link_busy_seconds: float = 0.0
    compute_busy_seconds: float = 0.0
    # What came onto the device: all that is cached, or of a streamed request what stays.
    loaded_tokens: int = 0
    rebuilt_tokens: int = 0

    @property
    def brought_tokens(self) -> int:
        return self.loaded_tokens + self.rebuilt_tokens + self.recomputed_tokens


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step that ran the model: what it computed, and what of the cache it read from the
    store (None: nothing)."""

    times: StepTimes
    prefilled_tokens: int
    decoded_tokens: int
    streamed: StreamedTokens | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prefix to look up again, after a chunk of it was lost."""

    key: SequenceKey
    salt: bytes
    tokens: list[int]
    is_streamed: bool
    # To be inspected first.
    suspects: Suspects | None = None


@dataclass(slots=True)
class StepOutput:
    """Everything that leaves the engine."""

    tokens: list[TokenEvent] = field(default_factory=list)
    finishes: list[FinishEvent] = field(default_factory=list)
    restores: list[RestoreEvent] = field(default_factory=list)
    writes: list[tuple[SequenceKey, list[WriteJob]]] = field(default_factory=list)
    # Chains to flush.
    flushes: list[SequenceKey] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    # Measured anew.
    profile: Profile | None = None
    # The model ran.
    step: StepEvent | None = None
    # What the lanes did, in restores and in the step.
    work: LaneTotals | None = None
    # Sequences that lost chunks and begin anew.
    loss_count: int = 0
    running_count: int = 0
    cache_used_bytes: int = 0

    @property
    def ran(self) -> bool:
        """Whether the model ran."""
        return self.step is not None

    @property
    def is_heard(self) -> bool:
        """Whether there is anything in it for who listens to a Run stream."""
        return bool(self.tokens or self.finishes or self.restores or self.profile is not None)

    @property
    def is_empty(self) -> bool:
        return not (
            self.is_heard
            or self.writes
            or self.flushes
            or self.lookups
            or self.step is not None
            or self.work is not None
            or self.loss_count
        )
