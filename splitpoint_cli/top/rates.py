"""Rates of a running stack: the differences of two readings of its counters. Pure.

Counters restart with their process; then there is no rate until the next reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from splitpoint.client.answers import SchedulerStatus, Telemetry, Worker
from splitpoint.v1.kvstore_pb2 import GetStatsResponse, TierStats
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

    def change(self, *counts: Callable[[C], float]) -> float:
        """Return by how much the sum of the counts grew; 0 if there is one reading only."""
        if self.before is None:
            return 0.0
        return sum(count(self.after) - count(self.before) for count in counts)

    def rate(self, count: Callable[[C], float]) -> float | None:
        """Return its change in a second; None if no time passed or the counter went back."""
        change, seconds = self.change(count), self.seconds
        return change / seconds if seconds > 0 and change >= 0 else None

    def busy(self, seconds: Callable[[C], float]) -> float | None:
        """Return the busy share, at most 1: work is counted when it ends."""
        share = self.rate(seconds)
        return None if share is None else min(1.0, share)

    def share(self, part: Callable[[C], float], *whole: Callable[[C], float]) -> float | None:
        """Return the change of `part` by that of `whole`; None if `whole` did not grow."""
        return _share(self.change(part), self.change(*whole))


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

    generated_per_second: float | None = None
    prompt_per_second: float | None = None
    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    cached_share: float | None = None


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

    hit_share: float | None = None
    evicted_per_second: float | None = None
    sealed_per_second: float | None = None


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
    return SchedulerRates(
        generated_per_second=window.rate(lambda now: now.generated_token_count),
        prompt_per_second=window.rate(lambda now: now.prompt_token_count),
        ttft_seconds=window.share(lambda now: now.ttft_seconds_sum, lambda now: now.ttft_count),
        itl_seconds=window.share(lambda now: now.itl_seconds_sum, lambda now: now.itl_count),
        cached_share=window.share(
            lambda now: now.cached_token_count, lambda now: now.prompt_token_count
        ),
    )


def worker_rates(window: Window[Telemetry]) -> WorkerRates:
    def loaded(now: Telemetry) -> float:
        return now.loaded_token_count

    def rebuilt(now: Telemetry) -> float:
        return now.rebuilt_token_count

    def recomputed(now: Telemetry) -> float:
        return now.recomputed_token_count

    before, after = window.before, window.after
    has_energy = before is not None and None not in (
        before.cpu_energy_joules,
        after.cpu_energy_joules,
    )
    return WorkerRates(
        steps_per_second=window.rate(lambda now: now.step_count),
        generated_per_second=window.rate(lambda now: now.generated_token_count),
        prefilled_per_second=window.rate(lambda now: now.prefilled_token_count),
        tokens_per_step=window.share(
            lambda now: now.scheduled_token_count, lambda now: now.step_count
        ),
        link_in=window.rate(lambda now: now.link_in_bytes),
        link_out=window.rate(lambda now: now.link_out_bytes),
        link_in_share=window.busy(lambda now: now.link_in_busy_seconds),
        compute_share=window.busy(lambda now: now.compute_busy_seconds),
        loaded_share=window.share(loaded, loaded, rebuilt, recomputed),
        rebuilt_share=window.share(rebuilt, loaded, rebuilt, recomputed),
        recomputed_share=window.share(recomputed, loaded, rebuilt, recomputed),
        accepted_share=window.share(
            lambda now: now.accepted_token_count, lambda now: now.draft_token_count
        ),
        read_share=window.share(
            lambda now: now.selection_read_token_count,
            lambda now: now.selection_visible_token_count,
        ),
        measured_over_predicted=_share(after.measured_seconds, after.predicted_seconds),
        host_cpu_watts=window.rate(lambda now: now.cpu_energy_joules or 0.0)
        if has_energy
        else None,
    )


def store_rates(window: Window[StoreTelling]) -> StoreRates:
    return StoreRates(
        hit_share=window.share(
            lambda now: now.stats.hit_token_count, lambda now: now.stats.query_token_count
        ),
        evicted_per_second=window.rate(lambda now: now.stats.evicted_chunk_count),
        sealed_per_second=window.rate(lambda now: now.stats.sealed_chunk_count),
    )


def tier_rates(window: Window[StoreTelling], tier: int) -> TierRates:
    """Return the rates of one tier of a store, by its number in the protocol."""

    def of(told: StoreTelling) -> TierStats:
        return next(each for each in told.stats.tiers if each.tier == tier)

    return TierRates(
        read=window.rate(lambda now: of(now).read_bytes),
        written=window.rate(lambda now: of(now).written_bytes),
    )


def gateway_rates(window: Window[GatewayTelling]) -> GatewayRates:
    requests = window.rate(lambda now: now.counts.request_count)
    if requests is None:  # one reading, or a new process with new counters
        return GatewayRates()
    return GatewayRates(requests, window.rate(lambda now: now.counts.failed_count))


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
    return StoreRates() if window is None else store_rates(window)


def rates_of_gateway(readings: Readings, gateway: Gateway) -> GatewayRates:
    window = readings.gateways.get(gateway.url)
    return GatewayRates() if window is None else gateway_rates(window)


def rates_of_tier(readings: Readings, store: Store, tier: int) -> TierRates:
    window = readings.stores.get(store.address)
    return TierRates() if window is None else tier_rates(window, tier)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and part >= 0 else None
