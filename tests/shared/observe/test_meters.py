"""The list of metrics, and the values of one process's."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from splitpoint.observe import metrics
from splitpoint.observe.meters import Meters, Reading
from splitpoint.observe.metrics import Kind, Metric, Needs, Service, all_metrics, metrics_of

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(registry: CollectorRegistry) -> Samples:
    """What a scrape would read, by name and labels."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- the list -----------------------------------------------------------------------------


def test_names_are_unique_and_as_prometheus_wants_them() -> None:
    names = [metric.name for metric in all_metrics()]
    assert len(set(names)) == len(names) > 80
    for metric in all_metrics():
        assert re.fullmatch(r"splitpoint_[a-z][a-z_]*[a-z]", metric.name)
        assert metric.help.endswith(".")
        assert metric.services
        for label in metric.labels:
            assert re.fullmatch(r"[a-z_]+", label)
            assert label not in ("le", "job", "instance")  # Prometheus's own
        assert list(metric.buckets) == sorted(set(metric.buckets))
        # Base units: no milliseconds, no megabytes, no percent.
        assert not re.search(r"_(ms|millis|us|mb|mib|gb|percent)(_|$)", metric.name)


def test_each_service_has_its_own_and_what_all_have() -> None:
    for service in Service:
        own = set(metrics_of(service))
        assert metrics.BUILD_INFO in own
        # The gateway serves no gRPC, and asks no Redis.
        of_grpc = {metrics.RPC_CALLS, metrics.REDIS_UP}
        assert own & of_grpc == (set() if service is Service.GATEWAY else of_grpc)
    assert {metric for service in Service for metric in metrics_of(service)} == set(all_metrics())
    assert Needs.STORE in {metric.needs for metric in metrics_of(Service.WORKER)}


@pytest.mark.parametrize(
    ("name", "kind", "buckets"),
    [
        ("splitpoint_things", Kind.COUNTER, ()),
        ("splitpoint_things_total", Kind.GAUGE, ()),
        ("splitpoint_seconds", Kind.HISTOGRAM, ()),
        ("splitpoint_seconds", Kind.GAUGE, (1.0,)),
    ],
)
def test_a_metric_that_contradicts_itself_is_refused(
    name: str, kind: Kind, buckets: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=name):
        Metric(name, kind, "Help.", (Service.WORKER,), buckets=buckets)


# -- values ---------------------------------------------------------------------------------


def test_counted_and_read_values_come_together() -> None:
    meters = Meters(Service.WORKER)
    steps = meters.counter(metrics.WORKER_STEPS)
    seconds = meters.histogram(metrics.WORKER_STEP_SECONDS)
    running = 3

    def source() -> Iterator[Reading]:
        yield Reading(metrics.WORKER_RUNNING, running)
        yield Reading(metrics.LINK_BYTES, 5, ("in", "kv"))
        yield Reading(metrics.LINK_BYTES, 7, ("out", "write_back"))

    meters.read(source)
    steps.labels("decode").inc()
    seconds.observe(0.002)
    found = samples(meters.registry)
    assert found["splitpoint_worker_steps_total", (("kind", "decode"),)] == 1
    assert found["splitpoint_worker_step_seconds_count", ()] == 1
    assert found["splitpoint_worker_step_seconds_bucket", (("le", "0.001"),)] == 0
    assert found["splitpoint_worker_step_seconds_bucket", (("le", "0.0025"),)] == 1
    assert found["splitpoint_worker_running_requests", ()] == 3
    assert (
        found["splitpoint_link_bytes_total", (("direction", "out"), ("method", "write_back"))] == 7
    )
    [version] = [dict(labels) for name, labels in found if name == metrics.BUILD_INFO.name]
    assert version["service"] == "worker"
    assert version["version"]
    assert found["process_resident_memory_bytes", ()] > 1 << 20
    assert ("process_open_fds", ()) in found
    assert not any(name.endswith("_created") for name, _ in found)
    running = 4
    assert samples(meters.registry)["splitpoint_worker_running_requests", ()] == 4


def test_a_source_may_go() -> None:
    meters = Meters(Service.KVSTORE)
    with meters.reading(lambda: [Reading(metrics.STORE_LEASES, 3)]):
        assert samples(meters.registry)["splitpoint_store_leases", ()] == 3
    assert ("splitpoint_store_leases", ()) not in samples(meters.registry)


def test_what_is_not_of_this_service_or_kind_is_refused() -> None:
    meters = Meters(Service.KVSTORE)
    with pytest.raises(ValueError, match="worker_steps_total is not a metric of kvstore"):
        meters.counter(metrics.WORKER_STEPS)
    with pytest.raises(ValueError, match="is a gauge, not a counter"):
        meters.counter(metrics.STORE_LEASES)
    meters.read(lambda: [Reading(metrics.TTFT_SECONDS, 1)])
    with pytest.raises(ValueError, match="ttft_seconds is not a metric of kvstore"):
        samples(meters.registry)


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (Reading(metrics.RPC_CALLS, 1, ("a", "b")), "is counted"),
        (Reading(metrics.STORE_SLOTS, 1), "has labels"),
        (Reading(metrics.STORE_LEASES, 1, ("surplus",)), "has labels"),
    ],
)
def test_a_source_that_yields_nonsense_fails_the_scrape(reading: Reading, words: str) -> None:
    meters = Meters(Service.KVSTORE)
    meters.counter(metrics.RPC_CALLS)
    meters.read(lambda: [reading])
    with pytest.raises(ValueError, match=words):
        samples(meters.registry)


def test_a_metric_has_one_instrument() -> None:
    meters = Meters(Service.KVSTORE)
    meters.counter(metrics.RPC_CALLS)
    with pytest.raises(ValueError, match=r"[Dd]uplicate"):
        meters.counter(metrics.RPC_CALLS)


def test_counting_from_threads_loses_nothing_while_it_is_read() -> None:
    meters = Meters(Service.KVSTORE)
    calls = meters.counter(metrics.RPC_CALLS)
    done = threading.Event()
    errors: list[Exception] = []

    def scrape() -> None:
        try:
            while not done.is_set():
                samples(meters.registry)
        except Exception as error:
            errors.append(error)

    def count(method: str) -> None:
        # New label values, too, while another thread iterates over them.
        for number in range(2000):
            calls.labels(method, str(number % 50)).inc()

    scraper = threading.Thread(target=scrape)
    counters = [threading.Thread(target=count, args=(f"m{i}",)) for i in range(4)]
    scraper.start()
    for thread in counters:
        thread.start()
    for thread in counters:
        thread.join()
    done.set()
    scraper.join()
    assert errors == []
    total = sum(
        value
        for (name, _), value in samples(meters.registry).items()
        if name == metrics.RPC_CALLS.name
    )
    assert total == 8000
