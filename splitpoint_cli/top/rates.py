"""Rates of a running stack: the differences of two readings of its counters. Pure.

Counters restart with their process; then there is no rate until the next reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from splitpoint.client.answers import SchedulerStatus, Telemetry, Worker
from splitpoint.v1.kvstore_pb2 import GetStatsResponse
from splitpoint_cli.request.observed import Gateway, GatewayCounts, Status, Store


@dataclass(frozen=True, slots=True)
class Reading:
    """One status. `seconds`: of this process's monotonic clock."""

    seconds: float
    status: Status


class _Counting(Protocol):
    @property
    def uptime_seconds(self) -> float: ...


C = TypeVar("C", bound=_Counting)


@dataclass(frozen=True, slots=True)
class Window(Generic[C]):
    """The two latest different readings of one process. `before`: None after its start."""

    after: C
    before: C | None = None

    def next(self, told: C) -> Window[C]:
        """Return the window with a new reading; without change if the reading is the same."""
        if told.uptime_seconds == self.after.uptime_seconds:
            return self
        if told.uptime_seconds < self.after.uptime_seconds:
            return Window(told)  # a new process with new counters
        return Window(told, self.after)

    @property
    def seconds(self) -> float:
        """Seconds between both readings; 0 if there is one only."""
        return self.after.uptime_seconds - self.before.uptime_seconds if self.before else 0.0


@dataclass(frozen=True, slots=True)
class StoreTelling:
    """A store's counters, with the time of this process's clock."""

    uptime_seconds: float
    stats: GetStatsResponse


@dataclass(frozen=True, slots=True)
class GatewayTelling:
    """A gateway's counters, with the time of this process's clock."""

    uptime_seconds: float
    counts: GatewayCounts


@dataclass(frozen=True, slots=True)
class Readings:
    """The latest reading, and what it is compared with."""

    latest: Reading
    scheduler: Window[SchedulerStatus]
    workers: dict[str, Window[Telemetry]] = field(default_factory=dict)
    stores: dict[str, Window[StoreTelling]] = field(default_factory=dict)
    gateways: dict[str, Window[GatewayTelling]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if each process has two readings."""
        return (
            self.scheduler.before is not None
            and all(window.before is not None for window in self.workers.values())
            and all(window.before is not None for window in self.stores.values())
            and all(window.before is not None for window in self.gateways.values())
        )


def first(reading: Reading) -> Readings:
    return Readings(
        reading,
        Window(reading.status.scheduler),
        {
            worker.id: Window(worker.telemetry)
            for worker in reading.status.workers
            if worker.telemetry is not None
        },
        {
            store.address: Window(StoreTelling(reading.seconds, store.stats))
            for store in reading.status.stores
            if store.stats is not None
        },
        {
            gateway.url: Window(GatewayTelling(reading.seconds, gateway.counts))
            for gateway in reading.status.gateways
            if gateway.counts is not None
        },
    )


def following(readings: Readings, reading: Reading) -> Readings:
    """Return the readings with a new one; drop processes that are missing from it."""
    now = first(reading)
    stores = {}
    for address, told in now.stores.items():
        known = readings.stores.get(address)
        same = known is not None and _is_same_store(known.after.stats, told.after.stats)
        stores[address] = known.next(told.after) if known is not None and same else told
    return replace(
        now,
        scheduler=readings.scheduler.next(reading.status.scheduler),
        workers={
            worker: readings.workers[worker].next(window.after)
            if worker in readings.workers
            else window
            for worker, window in now.workers.items()
        },
        stores=stores,
        gateways={
            url: readings.gateways[url].next(window.after) if url in readings.gateways else window
            for url, window in now.gateways.items()
        },
    )


def with_newcomers(begun: Readings, readings: Readings) -> Readings:
    """Return `begun` with the first readings of processes that have started since."""

    def merged(before: dict[str, Window[C]], after: dict[str, Window[C]]) -> dict[str, Window[C]]:
        return before | {name: told for name, told in after.items() if told.before is None}

    has_restarted = readings.scheduler.before is None
    return replace(
        begun,
        scheduler=readings.scheduler if has_restarted else begun.scheduler,
        workers=merged(begun.workers, readings.workers),
        stores=merged(begun.stores, readings.stores),
        gateways=merged(begun.gateways, readings.gateways),
    )


def _is_same_store(before: GetStatsResponse, after: GetStatsResponse) -> bool:
    """Return True if both are of one process: a restarted store has the next epoch."""
    return (before.instance_id, before.epoch) == (after.instance_id, after.epoch)


@dataclass(frozen=True, slots=True)
class SchedulerRates:
    """Rates over the interval. None: nothing to count, or one reading only."""

    generated_per_second: float | None
    prompt_per_second: float | None
    ttft_seconds: float | None
    itl_seconds: float | None
    cached_share: float | None


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Over the interval; rates in bytes, tokens or steps per second, shares from 0 to 1.

    `accepted_share` is that of drafted tokens, `read_share` that of visible tokens in steps that
    select. `host_cpu_watts` is of all CPU packages of the
    host, for all processes. `measured_over_predicted` is since the worker started: few things
    are predicted in an interval.
    """

    steps_per_second: float | None = None
    generated_per_second: float | None = None
    prefilled_per_second: float | None = None
    tokens_per_step: float | None = None
    link_in: float | None = None
    link_out: float | None = None
    link_in_share: float | None = None
    compute_share: float | None = None
    loaded_share: float | None = None
    rebuilt_share: float | None = None
    recomputed_share: float | None = None
    accepted_share: float | None = None
    read_share: float | None = None
    measured_over_predicted: float | None = None
    host_cpu_watts: float | None = None


@dataclass(frozen=True, slots=True)
class StoreRates:
    """Over the interval, as above. `hit_share`: of the tokens that were asked for."""

    hit_share: float | None
    evicted_per_second: float | None
    sealed_per_second: float | None


@dataclass(frozen=True, slots=True)
class TierRates:
    """Bytes per second over the interval, as above."""

    read: float | None = None
    written: float | None = None


@dataclass(frozen=True, slots=True)
class GatewayRates:
    """Over the interval, as above. None for one interval after a restart, too."""

    requests_per_second: float | None = None
    failed_per_second: float | None = None


def scheduler_rates(window: Window[SchedulerStatus]) -> SchedulerRates:
    before, after = window.before, window.after
    if before is None:
        return SchedulerRates(None, None, None, None, None)
    return SchedulerRates(
        generated_per_second=_rate(
            after.generated_token_count - before.generated_token_count, window.seconds
        ),
        prompt_per_second=_rate(
            after.prompt_token_count - before.prompt_token_count, window.seconds
        ),
        ttft_seconds=_share(
            after.ttft_seconds_sum - before.ttft_seconds_sum, after.ttft_count - before.ttft_count
        ),
        itl_seconds=_share(
            after.itl_seconds_sum - before.itl_seconds_sum, after.itl_count - before.itl_count
        ),
        cached_share=_share(
            after.cached_token_count - before.cached_token_count,
            after.prompt_token_count - before.prompt_token_count,
        ),
    )


def worker_rates(window: Window[Telemetry]) -> WorkerRates:
    before, after = window.before, window.after
    ratio = _share(after.measured_seconds, after.predicted_seconds)
    if before is None:
        return WorkerRates(measured_over_predicted=ratio)
    seconds = window.seconds
    loaded = after.loaded_token_count - before.loaded_token_count
    rebuilt = after.rebuilt_token_count - before.rebuilt_token_count
    recomputed = after.recomputed_token_count - before.recomputed_token_count
    brought = loaded + rebuilt + recomputed
    energy = None
    if before.cpu_energy_joules is not None and after.cpu_energy_joules is not None:
        energy = after.cpu_energy_joules - before.cpu_energy_joules
    return WorkerRates(
        steps_per_second=_rate(after.step_count - before.step_count, seconds),
        generated_per_second=_rate(
            after.generated_token_count - before.generated_token_count, seconds
        ),
        prefilled_per_second=_rate(
            after.prefilled_token_count - before.prefilled_token_count, seconds
        ),
        tokens_per_step=_share(
            after.scheduled_token_count - before.scheduled_token_count,
            after.step_count - before.step_count,
        ),
        link_in=_rate(after.link_in_bytes - before.link_in_bytes, seconds),
        link_out=_rate(after.link_out_bytes - before.link_out_bytes, seconds),
        link_in_share=_busy(after.link_in_busy_seconds - before.link_in_busy_seconds, seconds),
        compute_share=_busy(after.compute_busy_seconds - before.compute_busy_seconds, seconds),
        loaded_share=_share(loaded, brought),
        rebuilt_share=_share(rebuilt, brought),
        recomputed_share=_share(recomputed, brought),
        accepted_share=_share(
            after.accepted_token_count - before.accepted_token_count,
            after.draft_token_count - before.draft_token_count,
        ),
        read_share=_share(
            after.selection_read_token_count - before.selection_read_token_count,
            after.selection_visible_token_count - before.selection_visible_token_count,
        ),
        measured_over_predicted=ratio,
        host_cpu_watts=None if energy is None else _rate(energy, seconds),
    )


def store_rates(window: Window[StoreTelling]) -> StoreRates:
    if window.before is None:
        return StoreRates(None, None, None)
    before, after = window.before.stats, window.after.stats
    return StoreRates(
        hit_share=_share(
            after.hit_token_count - before.hit_token_count,
            after.query_token_count - before.query_token_count,
        ),
        evicted_per_second=_rate(
            after.evicted_chunk_count - before.evicted_chunk_count, window.seconds
        ),
        sealed_per_second=_rate(
            after.sealed_chunk_count - before.sealed_chunk_count, window.seconds
        ),
    )


def tier_rates(window: Window[StoreTelling], tier: int) -> TierRates:
    """Return the rates of one tier of a store, by its number in the protocol."""
    if window.before is None:
        return TierRates()
    before = next((each for each in window.before.stats.tiers if each.tier == tier), None)
    after = next((each for each in window.after.stats.tiers if each.tier == tier), None)
    if before is None or after is None:
        return TierRates()
    return TierRates(
        read=_rate(after.read_bytes - before.read_bytes, window.seconds),
        written=_rate(after.written_bytes - before.written_bytes, window.seconds),
    )


def gateway_rates(window: Window[GatewayTelling]) -> GatewayRates:
    if window.before is None:
        return GatewayRates()
    before, after = window.before.counts, window.after.counts
    if after.request_count < before.request_count:  # a new process with new counters
        return GatewayRates()
    return GatewayRates(
        requests_per_second=_rate(after.request_count - before.request_count, window.seconds),
        failed_per_second=_rate(after.failed_count - before.failed_count, window.seconds),
    )


def link_limit(worker: Worker) -> tuple[float | None, str]:
    """Return the limit of a link's rate and its kind; None if it is not known."""
    if worker.emulated_link_bytes_per_second is not None:
        return worker.emulated_link_bytes_per_second, "emulated"
    if worker.telemetry is not None and worker.telemetry.link_ceiling_bytes_per_second:
        return worker.telemetry.link_ceiling_bytes_per_second, "ceiling"
    if worker.profile is not None:
        return worker.profile.link_bytes_per_second, "fitted"
    return None, ""


def rates_of(readings: Readings, worker: str) -> WorkerRates:
    window = readings.workers.get(worker)
    return WorkerRates() if window is None else worker_rates(window)


def rates_of_store(readings: Readings, store: Store) -> StoreRates:
    window = readings.stores.get(store.address)
    return StoreRates(None, None, None) if window is None else store_rates(window)


def rates_of_gateway(readings: Readings, gateway: Gateway) -> GatewayRates:
    window = readings.gateways.get(gateway.url)
    return GatewayRates() if window is None else gateway_rates(window)


def rates_of_tier(readings: Readings, store: Store, tier: int) -> TierRates:
    window = readings.stores.get(store.address)
    return TierRates() if window is None else tier_rates(window, tier)


def _rate(amount: float, seconds: float) -> float | None:
    """Return the rate; None if no time passed or a counter went back."""
    return amount / seconds if seconds > 0 and amount >= 0 else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and part >= 0 else None


def _busy(busy: float, seconds: float) -> float | None:
    """Return the busy share, at most 1: work is counted when it ends."""
    share = _rate(busy, seconds)
    return None if share is None else min(1.0, share)
