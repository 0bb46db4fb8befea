"""Rates from two readings: what they are, and what they must never be."""

from __future__ import annotations

import dataclasses

import pytest
from told_workers import STORE, telemetry, worker

from splitpoint.client.answers import Queue, SchedulerStatus, Worker
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.v1.kvstore_pb2 import GetStatsResponse
from splitpoint_cli.request.observed import Gateway, GatewayCounts, Status, Store
from splitpoint_cli.top.bars import PLAIN
from splitpoint_cli.top.rates import (
    Reading,
    Readings,
    SchedulerRates,
    Window,
    WorkerRates,
    first,
    following,
    link_limit,
    rates_of,
    rates_of_gateway,
    rates_of_store,
    scheduler_rates,
    with_newcomers,
    worker_rates,
)
from splitpoint_cli.top.view import Frame


def scheduler(uptime: float, scale: int = 1) -> SchedulerStatus:
    return SchedulerStatus(
        uptime_seconds=uptime,
        running_count=2,
        waiting_count=1,
        completed_count=7 * scale,
        failed_count=0,
        rejected_count=0,
        failover_count=0,
        prompt_token_count=4000 * scale,
        cached_token_count=3000 * scale,
        generated_token_count=80 * scale,
        ttft_count=4 * scale,
        ttft_seconds_sum=2.0 * scale,
        itl_count=80 * scale,
        itl_seconds_sum=4.0 * scale,
    )


def stats(scale: int = 1, epoch: int = 1) -> GetStatsResponse:
    return GetStatsResponse(
        slot_count=100,
        free_slot_count=60,
        writing_slot_count=2,
        sealed_slot_count=37,
        quarantined_slot_count=1,
        leased_slot_count=5,
        query_token_count=1000 * scale,
        hit_token_count=800 * scale,
        evicted_chunk_count=6 * scale,
        sealed_chunk_count=20 * scale,
        epoch=epoch,
        instance_id=b"i" * 16,
    )


def reading(
    seconds: float,
    *workers: Worker,
    status: SchedulerStatus | None = None,
    store: GetStatsResponse | None = None,
) -> Reading:
    stores = () if store is None else (Store(STORE, store),)
    return Reading(
        seconds,
        Status(
            "127.0.0.1:1", True, (), workers, Queue((), 256), stores, status or scheduler(seconds)
        ),
    )


def test_rates_are_differences_over_the_workers_own_seconds() -> None:
    rates = worker_rates(Window(telemetry(14.0, 2), telemetry(10.0, 1)))
    assert rates.steps_per_second == 2.5
    assert rates.generated_per_second == 10
    assert rates.prefilled_per_second == 250
    assert rates.link_in == 50e6
    assert rates.link_out == 5e6
    assert rates.link_in_share == pytest.approx(0.375)
    assert rates.compute_share == pytest.approx(0.125)
    assert (rates.loaded_share, rates.rebuilt_share) == (0.6, 0.3)
    assert rates.recomputed_share == pytest.approx(0.1)
    assert rates.accepted_share == pytest.approx(0.75)
    assert rates.read_share == pytest.approx(0.125)
    assert rates.measured_over_predicted == pytest.approx(1.1)
    assert rates.host_cpu_watts is None


def test_energy_becomes_power() -> None:
    before = telemetry(10.0, cpu_energy_joules=500.0)
    assert worker_rates(
        Window(telemetry(12.0, cpu_energy_joules=700.0), before)
    ).host_cpu_watts == pytest.approx(100)
    # It became unreadable.
    assert worker_rates(Window(telemetry(12.0), before)).host_cpu_watts is None


def test_nothing_done_is_zero_and_shares_of_nothing_are_unknown() -> None:
    rates = worker_rates(Window(telemetry(12.0), telemetry(10.0)))
    assert (rates.steps_per_second, rates.link_in, rates.link_in_share) == (0, 0, 0)
    assert rates.loaded_share is None


def test_work_that_began_before_the_interval_makes_no_share_above_one() -> None:
    rates = worker_rates(Window(telemetry(10.5, 2), telemetry(10.0, 1)))
    assert rates.link_in_share == 1.0


def test_a_worker_that_started_again_has_no_rate_until_the_next_telling() -> None:
    readings = first(reading(0.0, worker(told=telemetry(5000.0, 100))))
    readings = following(readings, reading(2.0, worker(told=telemetry(1.0, 1))))
    rates = rates_of(readings, "0")
    assert (rates.steps_per_second, rates.link_in, rates.link_in_share) == (None, None, None)
    assert not readings.is_complete
    readings = following(readings, reading(4.0, worker(told=telemetry(3.0, 2))))
    assert rates_of(readings, "0").steps_per_second == 5
    assert readings.is_complete


def test_counters_that_go_back_although_time_does_not_give_no_rate() -> None:
    rates = worker_rates(Window(telemetry(12.0, 1), telemetry(10.0, 2)))
    assert rates == WorkerRates(measured_over_predicted=rates.measured_over_predicted)
    assert rates.measured_over_predicted == pytest.approx(1.1)


def test_the_same_telling_twice_keeps_the_rates() -> None:
    readings = first(reading(0.0, worker(told=telemetry(10.0))))
    readings = following(readings, reading(1.0, worker(told=telemetry(11.0, 2))))
    known = rates_of(readings, "0")
    readings = following(readings, reading(1.2, worker(told=telemetry(11.0, 2))))
    assert rates_of(readings, "0") == known
    assert known.steps_per_second == 10


def test_workers_come_fall_silent_and_go() -> None:
    readings = first(reading(0.0, worker("a", telemetry(10.0))))
    both = (worker("a"), worker("b", telemetry(1.0)))
    readings = following(readings, reading(2.0, *both))
    assert rates_of(readings, "a") == WorkerRates()
    assert rates_of(readings, "b").steps_per_second is None
    readings = following(readings, reading(4.0, worker("a", telemetry(14.0, 2))))
    assert list(readings.workers) == ["a"]


def test_a_scheduler() -> None:
    rates = scheduler_rates(Window(scheduler(12.0, 2), scheduler(10.0, 1)))
    assert rates == SchedulerRates(40, 2000, 0.5, 0.05, 0.75)
    idle = scheduler_rates(Window(scheduler(12.0), scheduler(10.0)))
    assert idle == SchedulerRates(0, 0, None, None, None)
    window = Window(scheduler(1000.0, 50)).next(scheduler(1.0))
    assert scheduler_rates(window) == SchedulerRates(None, None, None, None, None)


def after(readings: Readings, seconds: float, store: GetStatsResponse) -> Readings:
    return following(readings, reading(seconds, store=store))


def test_a_store_and_one_that_started_again() -> None:
    readings = after(first(reading(10.0, store=stats(1))), 12.0, stats(2))
    store = readings.latest.status.stores[0]
    rates = rates_of_store(readings, store)
    assert (rates.hit_share, rates.evicted_per_second, rates.sealed_per_second) == (0.8, 3, 10)
    # It adopted its arena and counts from the start; by then more than before is possible.
    readings = after(readings, 14.0, stats(9, epoch=2))
    rates = rates_of_store(readings, store)
    assert (rates.hit_share, rates.evicted_per_second) == (None, None)
    assert rates_of_store(after(readings, 16.0, stats(10, epoch=2)), store).hit_share == 0.8


def test_many_readings_of_one_interval_begin_where_each_was_first_seen() -> None:
    """As of a snapshot that waits for workers which tell late."""
    begun = first(reading(10, worker("early", telemetry(5)), worker("late"), store=stats()))
    readings = following(
        begun,
        reading(12, worker("early", telemetry(7)), worker("late", telemetry(1)), store=stats(2)),
    )
    assert not readings.is_complete
    begun = with_newcomers(begun, readings)
    readings = following(
        begun,
        reading(13, worker("early", telemetry(8)), worker("late", telemetry(2)), store=stats(3)),
    )
    assert readings.is_complete
    assert readings.scheduler.seconds == 3
    assert readings.stores[STORE].seconds == 3
    assert {name: window.seconds for name, window in readings.workers.items()} == {
        "early": 3,
        "late": 1,
    }
    # A worker that started again is compared with its first reading.
    again = following(begun, reading(14, worker("early", telemetry(0.5)), store=stats(1, epoch=2)))
    begun = with_newcomers(begun, again)
    readings = following(begun, reading(15, worker("early", telemetry(1)), store=stats(1, epoch=2)))
    assert readings.is_complete
    assert (readings.scheduler.seconds, readings.stores[STORE].seconds) == (5, 1)
    assert readings.workers["early"].seconds == 0.5


def test_what_a_link_is_compared_with() -> None:
    known = telemetry(1.0, link_ceiling_bytes_per_second=63e9)
    emulated = worker(told=known, emulated_link_bytes_per_second=184e6)
    assert link_limit(emulated) == (184e6, "emulated")
    assert link_limit(worker(told=known)) == (63e9, "ceiling")
    fitted, kind = link_limit(worker(told=telemetry(1.0)))
    assert (fitted, kind) == (BUILT_IN_PROFILES["a100-80"].link_bytes_per_second, "fitted")
    assert link_limit(dataclasses.replace(worker(), profile=None)) == (None, "")


# -- the gateway of `up --http` in `splitpoint top`: its counts, and rates of two readings ---

URL = "http://127.0.0.1:8000"
COUNTS = GatewayCounts(12, 2, 1, 3, 4, 5, 6)
SERVING = Gateway(URL, True, True, "", COUNTS)


def test_top_shows_rates_of_a_gateway() -> None:
    def seen(seconds: float, *gateways: Gateway) -> Reading:
        told = reading(seconds)
        return dataclasses.replace(told, status=dataclasses.replace(told.status, gateways=gateways))

    def with_counts(counts: GatewayCounts) -> Gateway:
        return dataclasses.replace(SERVING, counts=counts)

    begun = first(seen(10.0, SERVING))
    assert not begun.is_complete
    later = with_counts(dataclasses.replace(COUNTS, request_count=32, failed_count=4))
    readings = following(begun, seen(12.0, later))
    rates = rates_of_gateway(readings, later)
    assert (rates.requests_per_second, rates.failed_per_second) == (10.0, 0.5)
    text = "\n".join(line.plain for line in Frame("a:1", readings).lines(80, PLAIN))
    for part in (f"gateway {URL}  ready", "requests/s 10", "streams 5", "failed 4", "left 1"):
        assert part in text, text
    # Counters of a new process are no rate, and one that is away has none.
    again = with_counts(GatewayCounts(1))
    anew = following(readings, seen(14.0, again))
    assert rates_of_gateway(anew, again).requests_per_second is None
    away = Gateway(URL, False, False, "refused")
    gone = following(readings, seen(14.0, away))
    assert rates_of_gateway(gone, away).requests_per_second is None
    text = "\n".join(line.plain for line in Frame("a:1", gone).lines(80, PLAIN))
    assert f"gateway {URL}  no answer  refused" in text
