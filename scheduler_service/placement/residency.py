"""Waits for device memory, or streams at once: for a request that fits a worker, but not now.

While it waits, the others decode as before. If it is streamed, each of their steps lasts as
long as its pull, too. With R running requests that each have W steps to go until enough memory is
free, and A tokens to generate,

    wait      finishes after W t + start + (A - 1) step(R); the others after W t
    stream    finishes after start' + (A - 1) T; the others after W steps, of which the
              first A - 1 take T

where t is a step now and T one with the new pull. LATENCY compares the mean finishing time
of all R + 1, THROUGHPUT the time until all of them have finished: both generate the same
tokens.

For THROUGHPUT, and while weights cross the link in every step, a request that fits may be streamed,
too: `streamed_in_full_batch`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from scheduler_service.placement.account import Need, WorkerAccount
from scheduler_service.placement.demand import Demand
from scheduler_service.placement.footprint import Fits, footprint_of
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Objective, Reason, ReasonKind, Residency
from splitpoint.residency.full_batch import (
    WORTH_IT,
    BatchRoom,
    MixedBatch,
    full_batch,
    residents_alone,
)
from splitpoint.residency.seconds import DeviceRoom, PieceSeconds, RequestLoad
from splitpoint.shapes import ModelShape, chunks_of

# Batches that are kept of a worker: lengths and numbers of requests make new ones.
_MOST_KEPT = 256
_Batches = dict[tuple[BatchRoom, int], "tuple[MixedBatch, Reason] | None"]


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request on the worker: its tokens, the steps that it is expected to need, its pages."""

    length: int
    steps_left: int
    pages: int
    is_streamed: bool


def streamed_instead(
    demand: Demand,
    account: WorkerAccount,
    need: Need,
    expected_answer: Callable[[Demand], int],
    objective: Objective,
) -> Fits | None:
    """Return how a request is streamed that lacks memory; None if it had better wait.

    None, too, if the client asked for a residency or a way to restore, or if nothing but a
    place in the batch is missing, or if the store is not exact: streaming would read back what the
    request itself stored. `expected_answer`: the expected length of a request's answer.
    """
    worker, missing = account.facts, need.pages - account.free_pages
    if demand.residency is not None or demand.forced is not None:
        return None
    if worker.encoding.is_lossy or need.is_streamed or missing <= 0:
        return None
    selection = worker.followed(demand.selection)
    streamed = footprint_of(demand.token_count, Residency.STREAMED, worker, selection)
    if not isinstance(streamed, Fits):
        return None
    load = RequestLoad(
        demand.known_count,
        demand.cached_tokens(worker.worker_id),
        demand.steps_left(expected_answer(demand)),
    )
    others = [
        RunningRequest(
            each.demand.known_count,
            each.demand.steps_left(expected_answer(each.demand)),
            each.pages,
            each.is_streamed,
        )
        for each in account.running.values()
    ]
    reason = reason_to_stream(worker, load, missing, others, objective)
    return None if reason is None else replace(streamed, reasons=(reason,))


def reason_to_stream(
    worker: WorkerFacts,
    load: RequestLoad,
    missing_pages: int,
    running: Sequence[RunningRequest],
    objective: Objective,
) -> Reason | None:
    """Return why a request had better be streamed now; None if it had better wait.

    `load`: all that is known of it, delivered tokens included, and what is expected still.
    `missing_pages`: pages that must become free before it is resident.
    """
    profile = worker.profile
    if not running or not (profile.step_compute_seconds or profile.memory_seconds_per_byte):
        return None  # nothing is known about the length of a step
    found = wait_or_stream(
        worker.shape,
        profile,
        load,
        _room_of(worker, objective),
        Running(
            len(running),
            sum(each.length for each in running) // len(running),
            _steps_until_free(running, missing_pages),
            tuple(each.length for each in running if each.is_streamed),
        ),
    )
    if found.stream_score > WORTH_IT * found.wait_score:
        return None
    seconds = (found.stream_seconds, found.wait_seconds)
    return Reason(ReasonKind.STREAM_NOW, (*seconds, objective.value))


class FullBatches:
    """The answers of `best_batch`, which a queue asks for again with each look at a worker."""

    def __init__(self) -> None:
        # The worker's facts then, and its batches by room and length.
        self._kept: WeakKeyDictionary[WorkerAccount, tuple[WorkerFacts, _Batches]] = (
            WeakKeyDictionary()
        )

    def best(
        self, account: WorkerAccount, room: BatchRoom, length: int
    ) -> tuple[MixedBatch, Reason] | None:
        """Return `best_batch` by the costs that are known of the worker now."""
        facts, found = self._kept.get(account, (account.facts, {}))
        if facts is not account.facts or len(found) >= _MOST_KEPT:
            found = {}
        self._kept[account] = (account.facts, found)
        if (room, length) not in found:
            found[room, length] = best_batch(account.facts, room, length)
        return found[room, length]


def streamed_in_full_batch(
    demand: Demand,
    account: WorkerAccount,
    need: Need,
    waiting_count: Callable[[], int],
    batches: FullBatches,
) -> Fits | None:
    """Return how a request is streamed that has room; None if it had better be resident.

    Weights on the host cross the link once for a whole batch, so a resident request is to leave
    pages for the others that wait, as far as there are places. None, too, if the client asked for
    a residency or a way to restore, or if the store is not exact. `waiting_count` returns how many
    waiting requests can start here, this one included.
    """
    worker = account.facts
    if not worker.profile.host_weight_bytes or need.is_streamed or worker.encoding.is_lossy:
        return None
    if demand.residency is not None or demand.forced is not None:
        return None
    waiting = max(1, waiting_count())
    others = min(waiting, account.free_places) - 1
    if account.free_pages - need.pages >= others * worker.streamed_page_count:
        return None
    selection = worker.followed(demand.selection)
    streamed = footprint_of(demand.token_count, Residency.STREAMED, worker, selection)
    if not isinstance(streamed, Fits):
        return None
    slots = worker.store_slot_count
    room = BatchRoom(
        account.page_count,
        min(worker.max_batch_size, account.running_count + waiting),
        max(1, need.pages),
        streamed.size_bytes // worker.page_bytes,
        None if slots is None else slots // streamed.slot_count,
    )
    chunks = chunks_of((demand.prompt_count + demand.token_count) // 2, worker.chunk_tokens)
    best = batches.best(account, room, chunks * worker.chunk_tokens)
    if best is None:
        return None
    batch, reason = best
    if need.pages <= account.free_pages and batch.resident == room.most_resident:
        return None
    # What is free is for others: it keeps no more than it must.
    return replace(streamed, reasons=(reason, *streamed.reasons[1:]), spare_bytes=0)


def best_batch(
    worker: WorkerFacts, room: BatchRoom, length: int
) -> tuple[MixedBatch, Reason] | None:
    """Return the batch in which requests of this length are streamed beside residents, and why.

    None if residents alone have about the most tokens per second.
    """
    profile = worker.profile
    if not (profile.step_compute_seconds or profile.memory_seconds_per_byte):
        return None  # nothing is known about the length of a step
    pieces = PieceSeconds(worker.shape, profile, _room_of(worker, Objective.THROUGHPUT))
    full = full_batch(pieces, room, length)
    residents = residents_alone(pieces, room, length)
    if not full.is_worth_streaming(residents):
        return None
    count = full.resident + full.streamed
    rates = (full.tokens_per_second, residents.tokens_per_second)
    return full, Reason(ReasonKind.FULL_BATCH, (count, full.streamed, *rates))


def _steps_until_free(running: Iterable[RunningRequest], missing_pages: int) -> int:
    """Return the decode steps until requests that end have freed this many pages.

    Shared pages count as freed with each of their holders, so the wait may take longer.
    """
    steps = 0
    for each in sorted(running, key=lambda request: request.steps_left):
        if missing_pages <= 0:
            break
        missing_pages -= each.pages
        steps = each.steps_left
    return steps


def _room_of(worker: WorkerFacts, objective: Objective) -> DeviceRoom:
    return DeviceRoom(
        has_activations=worker.has_activations,
        chunk_tokens=worker.chunk_tokens,
        staging_tokens=worker.staging_tokens,
        prefill_tokens=worker.max_batched_tokens,
        schedule=worker.schedule,
        encoding=worker.encoding,
        objective=objective,
    )


@dataclass(frozen=True, slots=True)
class Running:
    """Requests that decode on the device at present.

    Attributes:
        count: of them, at least 1.
        mean_length: tokens of each, on average.
        steps_left: decode steps until enough memory is free, as far as is expected.
        streamed_lengths: lengths of those among them that are streamed.
    """

    count: int
    mean_length: int
    steps_left: int
    streamed_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitOrStream:
    """The two answers. Seconds until the request itself has finished.

    Attributes:
        wait_score, stream_score: seconds that the objective compares.
    """

    wait_seconds: float
    stream_seconds: float
    wait_score: float
    stream_score: float


def wait_or_stream(
    shape: ModelShape, profile: Profile, load: RequestLoad, room: DeviceRoom, running: Running
) -> WaitOrStream:
    """Compare both for one request."""
    pieces = PieceSeconds(shape, profile, room)
    steps, left, others = load.step_count, running.steps_left, running.count
    before = _step(pieces, running, running.streamed_lengths)
    with_pull = _step(pieces, running, (*running.streamed_lengths, load.mean_length))
    beside = pieces.step(others, load.mean_length)
    wait_ends = left * before
    wait = wait_ends + pieces.start(load) + steps * beside
    start = pieces.streamed_start(load)
    stream = start + steps * with_pull
    delayed = min(steps, left)
    stream_ends = start + delayed * with_pull + (left - delayed) * before
    if room.objective is Objective.THROUGHPUT:
        wait_score, stream_score = max(wait, wait_ends), max(stream, stream_ends)
    else:
        wait_score = (wait + others * wait_ends) / (others + 1)
        stream_score = (stream + others * stream_ends) / (others + 1)
    return WaitOrStream(wait, stream, wait_score, stream_score)


def _step(pieces: PieceSeconds, running: Running, streamed: tuple[int, ...]) -> float:
    """Return a step of what is running, with these sequences streamed."""
    resident = max(0, running.count - len(running.streamed_lengths))
    if not streamed:
        return pieces.step(resident, running.mean_length)
    return pieces.streamed_step(
        len(streamed), sum(streamed) // len(streamed), resident_count=resident
    )
