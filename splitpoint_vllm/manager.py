"""The scheduler's side: what the store has for each request, and what is decided about it.

One look-up for all blocks of a prompt is sent when the request arrives. Until its answer or its
deadline vLLM asks again later; then the answer stands for the request. What is found stays leased
until it is loaded or not wanted. A request whose load failed is not looked up again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from splitpoint_vllm.namespace import PAGE_KEY_BYTES
from splitpoint_vllm.pages import LoadedPages, StoredPages
from splitpoint_vllm.plan import LoadPlan, LoadPlanner, Reason
from splitpoint_vllm.store import Answer, Lookup, Page, PageFinder

log = logging.getLogger("vllm.splitpoint.manager")

# Blocks that are announced as stored at a time. The oldest of more are announced as removed.
MOST_ANNOUNCED = 1 << 18
# How long a request that waits for vLLM may keep what was found from eviction.
HOLD_SECONDS = 10.0
# Outcomes that a log line at INFO tells; the others are DEBUG.
_REFUSALS = frozenset({Reason.LATE, Reason.SLOWER, Reason.REMEASURED, Reason.FAILED})
_NO_PAGE = Page(0, 0, 0)


class Metric:
    """Names of the counters and histograms that vLLM shows."""

    REQUESTS = "vllm:splitpoint_requests"
    FOUND_TOKENS = "vllm:splitpoint_found_tokens"
    LOADED_TOKENS = "vllm:splitpoint_loaded_tokens"
    STORED_BLOCKS = "vllm:splitpoint_stored_blocks"
    UNSTORED_BLOCKS = "vllm:splitpoint_unstored_blocks"
    LOOKUP_SECONDS = "vllm:splitpoint_lookup_seconds"


@dataclass(slots=True)
class Outcome:
    """What became of one look-up, as the answer of the request tells it.

    Attributes:
        found_tokens: that the store had and this engine lacked.
        predicted_load_seconds, predicted_compute_seconds: for them. None: not measured before.
        load_seconds: that the load took. None: there was none, or it failed.
    """

    reason: Reason = Reason.MISS
    found_tokens: int = 0
    loaded_tokens: int = 0
    predicted_load_seconds: float | None = None
    predicted_compute_seconds: float | None = None
    load_seconds: float | None = None


@dataclass(slots=True)
class _Request:
    """One request that vLLM knows.

    Attributes:
        lookup: None: the store is not asked for this request.
        answer: of `lookup`, once it was there or late.
        is_spent: the answer's lease was given up.
        plan: and the found tokens that it is for.
        own_tokens: leading tokens that the engine's own cache has.
        problem: why the load failed. Empty: it did not.
        is_decided: `outcome` was counted.
        is_over: it ended, but its load has not.
        loaded: the outcome of an earlier look-up, whose pages were loaded.
    """

    lookup: Lookup | None = None
    answer: Answer | None = None
    block_keys: Sequence[OffloadKey] = ()
    is_spent: bool = False
    plan: tuple[int, LoadPlan] | None = None
    load_bytes: int = 0
    own_tokens: int = 0
    is_loading: bool = False
    problem: str = ""
    has_failed: bool = False
    outcome: Outcome = field(default_factory=Outcome)
    is_decided: bool = False
    is_over: bool = False
    loaded: Outcome | None = None


class SplitpointManager(OffloadingManager):
    """Begin with `start`; without it no request uses the store.

    Attributes:
        planner: decides whether what was found is loaded.
    """

    def __init__(self, lookup_seconds: float, announces: bool) -> None:
        """`announces`: tell vLLM's KV events of what is stored."""
        self.planner = LoadPlanner(time.monotonic)
        self._finder: PageFinder | None = None
        self._namespace = b""
        self._ranks = 1
        self._lookup_seconds = lookup_seconds
        self._requests: dict[str, _Request] = {}
        self._loading_bytes = 0
        # Blocks that workers store now, and those of them that they could not store.
        self._storing: set[OffloadKey] = set()
        self._unstored: set[OffloadKey] = set()
        self._announces = announces
        # In the order in which they were stored.
        self._announced: dict[OffloadKey, None] = {}
        self._events: list[OffloadingEvent] = []
        self._stats = OffloadingConnectorStats()
        self._next_look_at_leases = 0.0

    def start(self, finder: PageFinder, namespace: bytes, ranks: int) -> None:
        """Use the store from now on, for the pages of this many ranks."""
        self._finder, self._namespace, self._ranks = finder, namespace, ranks

    # -- look-ups --------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = _Request()
        return RequestOffloadingContext()

    def look_up(self, request_id: str, block_keys: Sequence[OffloadKey]) -> None:
        """Ask the store for all blocks of a request, in the order of the sequence."""
        if self._finder is None:
            return
        request = self._requests[request_id]
        if request.outcome.reason is Reason.LOADED:
            request.loaded = request.outcome
        request.outcome, request.is_decided, request.plan = Outcome(), False, None
        request.answer, request.is_spent, request.block_keys = None, False, block_keys
        request.lookup = self._finder.look_up(
            self._namespace, block_keys, self._ranks, self._lookup_seconds
        )

    def look_up_again(
        self, request_id: str, block_keys: Callable[[], Sequence[OffloadKey]]
    ) -> None:
        """Ask again if what was found before is not held any more, as after a preemption."""
        request = self._requests[request_id]
        if request.lookup is None or request.has_failed or request.is_loading:
            return
        answer = request.answer
        is_lost = (
            answer is not None
            and answer.connection is not None
            and self._finder is not None
            and answer.connection is not self._finder.connection
        )
        if request.is_spent or is_lost:
            self.look_up(request_id, block_keys())

    def is_waiting(self, request_id: str) -> bool:
        """Return True until there is an answer, or it is late."""
        request = self._requests[request_id]
        if request.lookup is None or request.answer is not None:
            return False
        answer = request.lookup.answer()
        if answer is None:
            return True
        request.answer = answer
        self._stats.observe_histogram(
            Metric.LOOKUP_SECONDS, time.monotonic() - request.lookup.begun
        )
        if self._announced and answer.connection is not None:
            self._note_evicted(request.block_keys, answer)
        return False

    def wait_for_answer(self, request_id: str, seconds: float) -> None:
        """Return when a request has its answer, at most so much later."""
        lookup = self._requests[request_id].lookup
        if lookup is not None:
            lookup.wait(seconds)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self.is_waiting(req_context.req_id):
            return LookupResult.RETRY
        request = self._requests[req_context.req_id]
        if request.answer is None or request.has_failed or request.is_spent:
            return LookupResult.MISS
        return LookupResult.HIT if key in request.answer.pages else LookupResult.MISS

    def plan(
        self, request_id: str, found_tokens: int, chunk_tokens: int, load_bytes: int
    ) -> LoadPlan:
        """Return how many of the found tokens are loaded.

        vLLM may ask in every step until it has blocks for the request: the first plan stands.
        """
        request = self._requests[request_id]
        if request.plan is None or request.plan[0] != found_tokens:
            plan = self.planner.plan(found_tokens, chunk_tokens, load_bytes, self._loading_bytes)
            request.plan = found_tokens, plan
            request.load_bytes = load_bytes * plan.tokens // found_tokens
            outcome = request.outcome
            outcome.found_tokens = found_tokens
            outcome.predicted_load_seconds = plan.load_seconds
            outcome.predicted_compute_seconds = plan.compute_seconds
        return request.plan[1]

    def cached(self, request_id: str, own_tokens: int) -> None:
        """Note how many leading tokens of a request the engine's own cache has."""
        self._requests[request_id].own_tokens = own_tokens

    def allocated(self, request_id: str, loaded_tokens: int) -> None:
        """Note that vLLM has blocks for a request and loads so many of its tokens into them."""
        request = self._requests[request_id]
        if loaded_tokens:
            request.is_loading = True
            request.outcome.loaded_tokens = loaded_tokens
            self._loading_bytes += request.load_bytes
        elif not request.is_decided:
            self._release(request)
            self._decide(request_id, request, self._refusal_of(request))

    @staticmethod
    def _refusal_of(request: _Request) -> Reason:
        if request.lookup is None:
            return Reason.DISABLED
        if request.answer is not None and request.answer.reason is not None:
            return request.answer.reason
        if request.plan is None:
            has_pages = request.answer is not None and bool(request.answer.pages)
            return Reason.LOCAL if has_pages and request.own_tokens else Reason.MISS
        # vLLM found as much in its own cache in the end, or what was to be loaded is refused.
        return Reason.LOCAL if request.plan[1].reason is Reason.LOADED else Reason.SLOWER

    # -- loads -----------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadedPages:
        request = self._requests[req_context.req_id]
        answer = request.answer
        if answer is None or answer.connection is None:  # the worker fails the load then
            return LoadedPages([(_NO_PAGE,) * self._ranks for _ in keys], None)
        nothing = (_NO_PAGE,) * self._ranks
        pages = [answer.pages.get(key, nothing) for key in keys]
        return LoadedPages(pages, answer.connection.arena_name)

    def load_ended(self, request_id: str, byte_count: int, seconds: float, problem: str) -> None:
        """Note how a rank's load ended, before `complete_load`. `problem`: empty if it was good."""
        request = self._requests.get(request_id)
        if problem:
            if request is not None:
                request.problem = problem
            return
        self.planner.measured_load(byte_count, seconds)
        if request is not None:
            request.outcome.load_seconds = max(seconds, request.outcome.load_seconds or 0.0)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None or not request.is_loading:
            return
        request.is_loading = False
        self._loading_bytes -= request.load_bytes
        self._release(request)
        reason = Reason.LOADED
        if request.problem:
            request.has_failed = True
            request.outcome.loaded_tokens, request.outcome.load_seconds = 0, None
            reason = Reason.FAILED
        elif request.plan is not None:
            reason = request.plan[1].reason
        self._decide(req_context.req_id, request, reason)
        if request.is_over:
            del self._requests[req_context.req_id]

    # -- stores ----------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Leave out what the store has, or what is being stored. Workers reserve and seal."""
        request = self._requests.get(req_context.req_id)
        wanted: list[OffloadKey] = []
        if request is not None and request.lookup is not None and self._is_connected:
            answer = request.answer
            known = {} if answer is None or request.has_failed else answer.pages
            wanted = [key for key in keys if key not in known and key not in self._storing]
        self._storing.update(wanted)
        return PrepareStoreOutput(wanted, StoredPages(self._namespace, wanted), [])

    @property
    def _is_connected(self) -> bool:
        return self._finder is not None and self._finder.connection is not None

    def unstored(self, keys: Collection[OffloadKey]) -> None:
        """Note blocks that a rank could not store, before `complete_store`."""
        self._unstored.update(keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._storing.difference_update(keys)
        lost = self._unstored.intersection(keys)
        self._unstored -= lost
        stored = [key for key in keys if key not in lost]
        if lost:
            self._stats.increase_counter(Metric.UNSTORED_BLOCKS, len(lost))
        if stored:
            self._stats.increase_counter(Metric.STORED_BLOCKS, len(stored))
            self._announce(stored, removed=False)

    # -- ends ------------------------------------------------------------------------------

    def outcome(self, request_id: str) -> dict[str, object]:
        """Return what the answer of a request tells."""
        request = self._requests.get(request_id)
        if request is None:
            return asdict(Outcome(Reason.DISABLED))
        if not request.is_decided:  # it ended before vLLM had blocks for it
            request.outcome.reason = self._refusal_of(request)
        best = request.loaded if request.loaded is not None else request.outcome
        if request.outcome.reason in (Reason.LOADED, Reason.FAILED):
            best = request.outcome
        return {**asdict(best), "reason": best.reason.value}

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is None:
            return
        if request.is_loading:  # aborted: the load goes on, and its pages stay until the end
            self._requests[req_context.req_id] = request
            request.is_over = request.is_decided = True
            return
        self._release(request)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        now = time.monotonic()
        if now < self._next_look_at_leases:
            return
        self._next_look_at_leases = now + HOLD_SECONDS / 10
        for request in self._requests.values():
            if request.is_loading or request.lookup is None or request.answer is None:
                continue
            if now - request.lookup.begun > HOLD_SECONDS:
                self._release(request)

    def _release(self, request: _Request) -> None:
        """Give up what was found for a request."""
        answer = request.answer
        if answer is None and request.lookup is not None:
            late = Answer(reason=Reason.LATE)
            answer = request.answer = (
                late if request.lookup.settle(late) else request.lookup.answer()
            )
        if answer is not None and not request.is_spent and self._finder is not None:
            self._finder.release(answer)
        request.is_spent = True

    def _decide(self, request_id: str, request: _Request, reason: Reason) -> None:
        outcome = request.outcome
        outcome.reason, was_decided = reason, request.is_decided
        request.is_decided = True
        if was_decided:
            return
        self._stats.increase_counter(Metric.REQUESTS, 1, (reason.value,))
        self._stats.increase_counter(Metric.FOUND_TOKENS, outcome.found_tokens)
        self._stats.increase_counter(Metric.LOADED_TOKENS, outcome.loaded_tokens)
        if self._finder is not None:
            self._finder.count(reason.value)
        level = logging.INFO if reason in _REFUSALS else logging.DEBUG
        if log.isEnabledFor(level):
            log.log(
                level, "Splitpoint: request %s: %s", request_id, _words(outcome, request.problem)
            )

    # -- vLLM's events, statistics and commands -----------------------------------------------

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if not self._announces:
            return
        for key in keys:
            if removed:
                self._announced.pop(key, None)
            else:
                self._announced[key] = None
        self._events.append(OffloadingEvent(keys, Medium.CPU, removed, Locality.LOCAL))
        over = len(self._announced) - MOST_ANNOUNCED
        if over > 0:
            self._announce(list(islice(self._announced, over)), removed=True)

    def _note_evicted(self, block_keys: Sequence[OffloadKey], answer: Answer) -> None:
        """Announce that blocks are gone which this engine stored and a look-up did not find."""
        gone = [key for key in block_keys if key in self._announced and key not in answer.pages]
        if gone:
            self._announce(gone, removed=True)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the blocks that this engine stored, and those of them that it found evicted."""
        events, self._events = self._events, []
        return events

    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def reset_cache(self) -> None:
        """Never load again what was stored before: the weights may have changed.

        Pages of the store are of other engines, too, and stay. This engine goes on in a
        namespace that no other one has.
        """
        self._namespace = hashlib.blake2b(
            self._namespace + os.urandom(16), digest_size=PAGE_KEY_BYTES
        ).digest()
        self._requests = {name: each for name, each in self._requests.items() if not each.is_over}
        for request in self._requests.values():
            self._release(request)
            request.is_loading = False
        self._loading_bytes = 0
        self._storing.clear()
        self._unstored.clear()
        self._announce(list(self._announced), removed=True)
        log.warning(
            "Splitpoint: the cache was reset: this engine shares no pages until it restarts"
        )

    def shutdown(self) -> None:
        if self._finder is not None:
            self._finder.close()


def _words(outcome: Outcome, problem: str) -> str:
    words = f"{outcome.reason.value}, {outcome.found_tokens} tokens found"
    if outcome.loaded_tokens:
        words += f", {outcome.loaded_tokens} loaded"
    if outcome.load_seconds is not None:
        words += f" in {outcome.load_seconds:.3f} s"
    if outcome.predicted_load_seconds is not None and outcome.predicted_compute_seconds is not None:
        words += (
            f" (predicted: {outcome.predicted_load_seconds:.3f} s to load, "
            f"{outcome.predicted_compute_seconds:.3f} s to compute)"
        )
    return f"{words}: {problem}" if problem else words
