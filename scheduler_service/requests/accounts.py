"""What a scheduler has done since it started: one set of books, written by named events.

The operators' status and the metrics both read them. Pure: whoever reports an event
brings the times. Knows neither gRPC nor Prometheus.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from scheduler_service.api.request import Times
from splitpoint.errors import SplitpointError
from splitpoint.planning.planner import Plan, Residency, RestoreMethod
from splitpoint.v1 import scheduler_pb2, types_pb2


class Sample(enum.Enum):
    """What has a distribution, not only a total. Seconds; KAPPA is a ratio, the last two tokens."""

    TTFT = enum.auto()
    ITL = enum.auto()
    QUEUE = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    TPOT = enum.auto()
    REQUEST = enum.auto()
    KAPPA = enum.auto()
    PROMPT_TOKENS = enum.auto()
    GENERATED_TOKENS = enum.auto()


class Outcome(enum.StrEnum):
    """How an accepted request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABANDONED = "abandoned"


# Why a request can be turned away: the reasons of the errors. Whatever is not listed
# counts as OTHER, so that no text from outside ever becomes a name here.
REJECTIONS = (
    "ALREADY_EXISTS",
    "CONTEXT_EXCEEDED",
    "DEADLINE_EXCEEDED",
    "DRAINING",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "MODEL_NOT_FOUND",
    "NEVER_FITS",
    "NO_ACTIVATIONS",
    "NO_TOKENIZER",
    "NO_WORKER",
    "QUEUE_FULL",
    "REQUEST_ID_TAKEN",
    "TENANT_QUOTA",
    "TOO_MANY_CALLS",
    "WORKER_NOT_FOUND",
)
OTHER = "OTHER"
ABANDONED_REASON = "ABANDONED"


class Accounts:
    """Totals since `started`, a moment on the scheduler's monotonic clock.

    `on_sample` hears of each measured value, for whoever keeps distributions.
    """

    def __init__(self, started: float, on_sample: Callable[[Sample, float], None]) -> None:
        self.started = started
        self.finished_counts = dict.fromkeys(Outcome, 0)
        self.rejected_counts = dict.fromkeys((*REJECTIONS, OTHER), 0)
        self.plan_counts = {(kind, method): 0 for kind in Residency for method in RestoreMethod}
        self.failover_count = 0
        # Step messages that were not taken: of an attempt that no longer counts, or
        # with tokens that had been delivered.
        self.late_count = 0
        self.duplicate_count = 0
        # Of completed requests, but for the generated ones, which count as they come.
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.ttft_count = 0
        self.ttft_seconds = 0.0
        self.itl_count = 0
        self.itl_seconds = 0.0
        self._on_sample = on_sample

    @property
    def completed_count(self) -> int:
        return self.finished_counts[Outcome.STOP] + self.finished_counts[Outcome.LENGTH]

    @property
    def failed_count(self) -> int:
        return self.finished_counts[Outcome.ERROR]

    @property
    def cancelled_count(self) -> int:
        """Requests that their client gave up before the end."""
        return self.finished_counts[Outcome.ABANDONED]

    @property
    def rejected_count(self) -> int:
        return sum(self.rejected_counts.values())

    # -- events, in the order of a request's life ------------------------------------------

    def rejected(self, error: Exception) -> None:
        """Turned away: it never was in the queue. What is no error of ours is a bug."""
        reason = error.reason if isinstance(error, SplitpointError) else "INTERNAL"
        self.rejected_counts[reason if reason in self.rejected_counts else OTHER] += 1

    def placed(self, plan: Plan, waited_seconds: float | None) -> None:
        """A worker was told. `waited_seconds` since the arrival; None: it was placed before."""
        self.plan_counts[plan.residency, plan.method] += 1
        self._on_sample(Sample.KAPPA, plan.cached_tokens / max(plan.new_tokens, 1))
        if waited_seconds is not None:
            self._on_sample(Sample.QUEUE, waited_seconds)

    def tokens_came(self, times: Times, count: int, now: float) -> None:
        """New tokens of a request whose `times` do not know of them yet."""
        self.generated_tokens += count
        if times.first_token is None:
            self.ttft_count += 1
            self.ttft_seconds += now - times.arrived
            self._on_sample(Sample.TTFT, now - times.arrived)
        elif times.last_token is not None:
            self.itl_count += 1
            self.itl_seconds += now - times.last_token
            self._on_sample(Sample.ITL, now - times.last_token)

    def came_late(self) -> None:
        self.late_count += 1

    def came_twice(self) -> None:
        self.duplicate_count += 1

    def failed_over(self) -> None:
        """A request was queued again because its worker was lost."""
        self.failover_count += 1

    def completed(self, message: scheduler_pb2.GenerateComplete) -> None:
        stopped = message.finish_reason == types_pb2.FINISH_REASON_STOP
        self.finished_counts[Outcome.STOP if stopped else Outcome.LENGTH] += 1
        usage = message.usage
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        decode_seconds = message.total_seconds - message.ttft_seconds
        self._on_sample(Sample.REQUEST, message.total_seconds)
        self._on_sample(Sample.PREFILL, message.ttft_seconds - message.queue_seconds)
        self._on_sample(Sample.DECODE, decode_seconds)
        if usage.completion_tokens > 1:
            self._on_sample(Sample.TPOT, decode_seconds / (usage.completion_tokens - 1))
        self._on_sample(Sample.PROMPT_TOKENS, usage.prompt_tokens)
        self._on_sample(Sample.GENERATED_TOKENS, usage.completion_tokens)

    def failed(self, error: SplitpointError) -> None:
        """An accepted request ended without its answer."""
        abandoned = error.reason == ABANDONED_REASON
        self.finished_counts[Outcome.ABANDONED if abandoned else Outcome.ERROR] += 1
