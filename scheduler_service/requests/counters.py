"""Counts what a scheduler has done since it started. The status and the metrics read them.

Pure: callers report named events with their times.
"""

from __future__ import annotations

import enum
from typing import Protocol

from scheduler_service.api.request import Times
from splitpoint.errors import SplitpointError
from splitpoint.observe import metrics
from splitpoint.observe.metrics import Metric
from splitpoint.planning.plan import Plan, Residency, RestoreMethod
from splitpoint.v1 import scheduler_pb2, types_pb2


class Outcome(enum.StrEnum):
    """How an accepted request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABANDONED = "abandoned"


# Error reasons with which a request can be turned away. Others count as OTHER, so that no
# text from outside becomes a metric label.
REJECTIONS = (
    "ALREADY_EXISTS",
    "CHAT_PROCESS_LOST",
    "CHAT_REFUSED",
    "CHAT_TOO_SLOW",
    "CONTEXT_EXCEEDED",
    "DEADLINE_EXCEEDED",
    "DRAINING",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "MODEL_NOT_FOUND",
    "NEVER_FITS",
    "NO_ACTIVATIONS",
    "NO_CHAT_TEMPLATE",
    "NO_TOKENIZER",
    "NO_WORKER",
    "QUEUE_FULL",
    "REQUEST_ID_TAKEN",
    "RESUME_BEYOND",
    "RESUME_LOGPROBS",
    "RESUME_MISMATCH",
    "RESUME_UNKNOWN",
    "TENANT_QUOTA",
    "TOKENIZER_BUSY",
    "TOO_MANY_CALLS",
    "WORKER_NOT_FOUND",
)
OTHER = "OTHER"
ABANDONED_REASON = "ABANDONED"


class Limit(enum.StrEnum):
    """What a request waits for once it runs, by its kappa_ratio and the worker's kappa_crit."""

    LINK = "link"
    DEVICE = "device"


class Resumption(enum.StrEnum):
    """How a client that has tokens already goes on."""

    # The request is known here: the client reads on.
    ATTACHED = "attached"
    # It is not: a worker is forced to repeat the client's tokens.
    FORCED = "forced"


class OnSample(Protocol):
    """Takes a value of a histogram. `labels`: their values in the metric's order."""

    def __call__(self, metric: Metric, value: float, /, *labels: str) -> None: ...


class Counters:
    """Totals since `started`, in seconds of the scheduler's monotonic clock.

    Calls `on_sample` with each value of a histogram, and its labels.
    """

    def __init__(self, started: float, on_sample: OnSample) -> None:
        self.started = started
        self.finished_counts = dict.fromkeys(Outcome, 0)
        self.rejected_counts = dict.fromkeys((*REJECTIONS, OTHER), 0)
        self.plan_counts = {(kind, method): 0 for kind in Residency for method in RestoreMethod}
        # Requests that were queued again because their worker was lost.
        self.failover_count = 0
        self.resumed_counts = dict.fromkeys(Resumption, 0)
        # Requests by what limits them, and how long they waited to be placed for the first time.
        self.placed_counts = dict.fromkeys(Limit, 0)
        self.waited_seconds = dict.fromkeys(Limit, 0.0)
        # Step messages that were dropped: of an attempt that was over, or with tokens
        # that had come before.
        self.late_count = 0
        self.duplicate_count = 0
        # Tokens of completed requests; generated ones are counted as they come.
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
        """Count a request that was never queued. An exception of another type is a bug."""
        reason = error.reason if isinstance(error, SplitpointError) else "INTERNAL"
        self.rejected_counts[reason if reason in self.rejected_counts else OTHER] += 1

    def resumed(self, how: Resumption) -> None:
        self.resumed_counts[how] += 1

    def placed(self, plan: Plan, kappa_crit: float, waited_seconds: float | None) -> None:
        """Count an attempt.

        Args:
            kappa_crit: of its worker; above it the link is the limit.
            waited_seconds: since the arrival; None: it is a retry.
        """
        self.plan_counts[plan.residency, plan.method] += 1
        kappa_ratio = plan.cached_tokens / max(plan.new_tokens, 1)
        self._on_sample(metrics.KAPPA_RATIO, kappa_ratio)
        if waited_seconds is not None:
            limit = Limit.LINK if kappa_ratio > kappa_crit else Limit.DEVICE
            self.placed_counts[limit] += 1
            self.waited_seconds[limit] += waited_seconds
            self._on_sample(metrics.QUEUE_SECONDS, waited_seconds, limit)

    def tokens_came(self, times: Times, count: int, now: float, resumed_count: int = 0) -> None:
        """Count new tokens, before `times` is updated with them.

        Args:
            resumed_count: tokens that the client brought along. With any, these are not the first.
        """
        self.generated_tokens += count
        if times.first_token is None and resumed_count:
            return
        if times.first_token is None:
            self.ttft_count += 1
            self.ttft_seconds += now - times.arrived
            self._on_sample(metrics.TTFT_SECONDS, now - times.arrived)
        elif times.last_token is not None:
            self.itl_count += 1
            self.itl_seconds += now - times.last_token
            self._on_sample(metrics.ITL_SECONDS, now - times.last_token)

    def completed(self, message: scheduler_pb2.GenerateComplete, resumed_count: int = 0) -> None:
        """Count a whole answer.

        Args:
            resumed_count: its tokens that the client brought along. With any, the times here are
                not those that the client saw; only the time per token made here is told.
        """
        stopped = message.finish_reason == types_pb2.FINISH_REASON_STOP
        self.finished_counts[Outcome.STOP if stopped else Outcome.LENGTH] += 1
        usage = message.usage
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        decode_seconds = message.total_seconds - message.ttft_seconds
        if not resumed_count:
            self._on_sample(metrics.REQUEST_SECONDS, message.total_seconds)
            self._on_sample(metrics.PREFILL_SECONDS, message.ttft_seconds - message.queue_seconds)
            self._on_sample(metrics.DECODE_SECONDS, decode_seconds)
        after_first = usage.completion_tokens - resumed_count - 1
        if after_first > 0:
            self._on_sample(metrics.TPOT_SECONDS, decode_seconds / after_first)
        self._on_sample(metrics.REQUEST_PROMPT_TOKENS, usage.prompt_tokens)
        self._on_sample(metrics.REQUEST_GENERATED_TOKENS, usage.completion_tokens)

    def failed(self, error: SplitpointError) -> None:
        """Count an accepted request that ended without its answer."""
        abandoned = error.reason == ABANDONED_REASON
        self.finished_counts[Outcome.ABANDONED if abandoned else Outcome.ERROR] += 1
