"""Totals of what a worker has done since it started, for its metrics and its telemetry.

Updated and read on the event loop, with or without a Run stream. It knows neither
Prometheus nor the protocol.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass

from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.selection import UNUSED
from splitpoint.speculation import DraftMethod
from worker_service.engine.messages import RestoreEvent, StepEvent, StepOutput
from worker_service.fetching.results import FetchTotals
from worker_service.lanes.timeline import LaneTotals
from worker_service.store.write_back import SequenceKey, WriteTotals


class StepKind(enum.StrEnum):
    """Kinds of steps, by what they compute."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @classmethod
    def of(cls, step: StepEvent) -> StepKind:
        if step.prefilled_tokens and step.decoded_tokens:
            return cls.MIXED
        return cls.PREFILL if step.prefilled_tokens else cls.DECODE


class Traffic(enum.StrEnum):
    """Kinds of bytes that cross the link to the device."""

    KV = "kv"
    ACTIVATIONS = "activations"
    WEIGHTS = "weights"


class Way(enum.StrEnum):
    """Ways in which K and V of a cached token come onto the device."""

    LOADED = "loaded"
    REBUILT = "rebuilt"  # from activations
    RECOMPUTED = "recomputed"  # from token ids


class Predicted(enum.StrEnum):
    """Kinds of work whose seconds are predicted."""

    RESTORE = "restore"
    STEP = "step"


def predictions(output: StepOutput) -> Iterator[tuple[Predicted, float, float]]:
    """Yield (kind, predicted seconds, measured seconds) of what was predicted."""
    for event in output.restores:
        if event.brought_tokens and event.predicted_restore_seconds > 0:
            yield Predicted.RESTORE, event.predicted_restore_seconds, event.restore_seconds
    if output.step is not None and output.step.times.predicted_seconds:
        yield Predicted.STEP, output.step.times.predicted_seconds, output.step.times.seconds


# Combinations that occur: a streamed step never computes tokens from their ids.
WAYS = (
    *((Residency.RESIDENT, way) for way in Way),
    (Residency.STREAMED, Way.LOADED),
    (Residency.STREAMED, Way.REBUILT),
)
# Methods that bring tokens onto the device.
METHODS: tuple[RestoreMethod, ...] = tuple(
    method for method in RestoreMethod if method is not RestoreMethod.NONE
)
# Methods that draft.
DRAFTERS = (DraftMethod.SELF, DraftMethod.SUFFIX, DraftMethod.MODEL)


@dataclass(slots=True)
class FirstTokenSeconds:
    """Where the time to a first token behind a restored prefix went.

    Attributes:
        link: copies of the restore, each counted alone.
        restore: device work of the restore: K and V rebuilt from activations or from token ids.
        prefill: device work of the tokens behind the prefix.
        total: the restore from its beginning to its end, and the steps of that prefill.
    """

    link: float = 0.0
    restore: float = 0.0
    prefill: float = 0.0
    total: float = 0.0

    def add(self, other: FirstTokenSeconds) -> None:
        self.link += other.link
        self.restore += other.restore
        self.prefill += other.prefill
        self.total += other.total


class RestoredRequests:
    """Sums `FirstTokenSeconds` over resident requests that restored a prefix.

    A request counts at its first token behind the restore, so that all sums are of the same
    requests; one that ends before it does not count.
    """

    def __init__(self) -> None:
        self.seconds = FirstTokenSeconds()
        self._under_way: dict[SequenceKey, FirstTokenSeconds] = {}

    def add(self, output: StepOutput) -> None:
        for event in output.restores:
            if event.brought_tokens and event.is_whole:
                self._under_way[event.key] = FirstTokenSeconds(
                    event.link_busy_seconds,
                    event.compute_busy_seconds,
                    total=event.restore_seconds,
                )
        if self._under_way and output.step is not None:
            self._add_step(output, output.step)
        for token in output.tokens:
            if (done := self._under_way.pop(token.key, None)) is not None:
                self.seconds.add(done)
        for finish in output.finishes:
            self._under_way.pop(finish.key, None)

    def _add_step(self, output: StepOutput, step: StepEvent) -> None:
        """Add a step to the requests that it prefilled: of its device work their tokens' share."""
        # A single token that is left is computed like a decode.
        counts = {event.key: 1 for event in output.tokens}
        counts |= {event.key: event.token_count for event in output.prefills}
        for key in self._under_way.keys() & counts.keys():
            mine = self._under_way[key]
            mine.prefill += step.times.compute_busy * counts[key] / step.scheduled_tokens
            mine.total += step.times.seconds


class Counters:
    """Totals in bytes, seconds and tokens. Every kind has an entry from the start.

    Attributes:
        written, fetched: totals that write-back and the fetcher update.
        restored: of requests with a restored prefix, the seconds up to their first tokens.
        device_tokens: cached tokens that no restore had to bring.
        cache_tokens: tokens of restores under RESIDENT, of streamed steps under STREAMED.
        drafts: times that a step verified drafts of a sequence, by method.
        drafted_tokens, accepted_tokens: tokens of these drafts, and those that the text has.
        selected: what sequences read by selection.
        grammars, grammar_seconds: structured outputs that were compiled or found, and how long
            requests waited for that.
        split_tokens: the latest split of a restore or of a streamed step; None before.
        predicted_seconds, measured_seconds: seconds of work that was predicted.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.steps = dict.fromkeys(StepKind, 0)
        self.step_seconds = 0.0
        self.prefilled_tokens = 0
        self.decoded_tokens = 0
        self.generated_tokens = 0
        self.chunk_losses = 0
        self.preemptions = 0
        self.link_in_bytes = dict.fromkeys(Traffic, 0)
        self.link_in_seconds = 0.0
        self.compute_seconds = 0.0
        self._compute_reported = 0.0
        self.rebuild_seconds = 0.0
        self.prefill_seconds = 0.0
        self.written = WriteTotals()
        self.fetched = FetchTotals()
        self.restored = RestoredRequests()
        self.cache_tokens = dict.fromkeys(WAYS, 0)
        self.device_tokens = 0
        self.restores = dict.fromkeys(METHODS, 0)
        self.drafts = dict.fromkeys(DRAFTERS, 0)
        self.drafted_tokens = dict.fromkeys(DRAFTERS, 0)
        self.accepted_tokens = dict.fromkeys(DRAFTERS, 0)
        self.selected = UNUSED
        self.grammars = 0
        self.grammar_seconds = 0.0
        self.split_tokens: int | None = None
        self.predicted_seconds = dict.fromkeys(Predicted, 0.0)
        self.measured_seconds = dict.fromkeys(Predicted, 0.0)

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def compute_until_now(self, under_way: float) -> float:
        """Return compute seconds with those of the step under way; the result never decreases.

        For a moment, a step that has just ended is neither counted nor under way.
        """
        self._compute_reported = max(self._compute_reported, self.compute_seconds + under_way)
        return self._compute_reported

    def tokens_by(self, way: Way) -> int:
        """Return the cached tokens that came this way, in restores and in steps."""
        return sum(count for (_, each), count in self.cache_tokens.items() if each is way)

    def grammar_ready(self, seconds: float) -> None:
        """Count a request whose grammar is ready after this many seconds."""
        self.grammars += 1
        self.grammar_seconds += seconds

    def add(self, output: StepOutput) -> None:
        """Add the work that a step's output reports."""
        self.generated_tokens += len(output.tokens)
        self.chunk_losses += output.loss_count
        self.preemptions += output.preemption_count
        for draft in output.drafts:
            self.drafts[draft.method] += 1
            self.drafted_tokens[draft.method] += draft.drafted
            self.accepted_tokens[draft.method] += draft.accepted
        for selection in output.selections:
            self.selected += selection.usage
        self.restored.add(output)
        for event in output.restores:
            self._add_restore(event)
        if output.step is not None:
            self._add_step(output.step)
        if output.work is not None:
            self._add_work(output.work)
        for what, predicted, measured in predictions(output):
            self.predicted_seconds[what] += predicted
            self.measured_seconds[what] += measured

    def _add_step(self, step: StepEvent) -> None:
        self.steps[StepKind.of(step)] += 1
        self.step_seconds += step.times.seconds
        self.prefilled_tokens += step.prefilled_tokens
        self.decoded_tokens += step.decoded_tokens
        streamed = step.streamed
        if streamed is not None:
            self.cache_tokens[Residency.STREAMED, Way.LOADED] += streamed.loaded
            self.cache_tokens[Residency.STREAMED, Way.REBUILT] += streamed.rebuilt
            self.split_tokens = streamed.split

    def _add_restore(self, event: RestoreEvent) -> None:
        self.device_tokens += event.device_tokens
        if not event.brought_tokens:
            return
        self.restores[event.method] += 1
        self.cache_tokens[Residency.RESIDENT, Way.LOADED] += event.loaded_tokens
        self.cache_tokens[Residency.RESIDENT, Way.REBUILT] += event.rebuilt_tokens
        self.cache_tokens[Residency.RESIDENT, Way.RECOMPUTED] += event.recomputed_tokens
        if event.method is not RestoreMethod.TOKENS:
            self.split_tokens = event.split_tokens

    def _add_work(self, work: LaneTotals) -> None:
        self.link_in_bytes[Traffic.KV] += work.kv_bytes
        self.link_in_bytes[Traffic.ACTIVATIONS] += work.activation_bytes
        self.link_in_bytes[Traffic.WEIGHTS] += work.weight_bytes
        self.link_in_seconds += work.link_seconds
        self.compute_seconds += work.compute_seconds
        self.rebuild_seconds += work.rebuild_seconds
        self.prefill_seconds += work.prefill_seconds
