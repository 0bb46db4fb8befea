"""The values of one process's metrics: counted as things happen, or read when somebody asks.

Names come from `splitpoint.metrics`; whatever is not listed there cannot be measured.
Books that a service keeps anyway (slots by state, a queue's length) are read at each
scrape instead of being kept twice. Knows no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from splitpoint.metrics import BUILD_INFO, Kind, Metric, Service, metrics_of

# A second series per counter, of when it was made: nothing here is asked for that.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Reading:
    """One value at the moment of a scrape. `labels`: values in the metric's order."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Source = Callable[[], Iterable[Reading]]
Family = CounterMetricFamily | GaugeMetricFamily


class Meters:
    """The metrics of one process.

    A metric is either counted, by the instrument that `counter` or `histogram` gives, or
    read, by a source that yields it at each scrape; never both. Instruments may be used
    by any thread. Raises ValueError for a metric that is not of this service.
    """

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._own = frozenset(metrics_of(service))
        self._sources: list[Source] = []
        self._run: Callable[[Callable[[], list[Family]]], Iterable[Family]] = _here
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.read(self._build)

    def counter(self, metric: Metric) -> Counter:
        """A new one: ask once and keep it. With labels: `.labels(...)` before `.inc()`."""
        self._check(metric, Kind.COUNTER)
        return Counter(
            metric.name.removesuffix("_total"), metric.help, metric.labels, registry=self.registry
        )

    def gauge(self, metric: Metric) -> Gauge:
        """A new one, for what changes where nobody could read it later."""
        self._check(metric, Kind.GAUGE)
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def histogram(self, metric: Metric) -> Histogram:
        """A new one, with the metric's buckets."""
        self._check(metric, Kind.HISTOGRAM)
        return Histogram(
            metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets
        )

    def read(self, source: Source) -> None:
        """Ask `source` at each scrape, in the thread that `read_by` chose."""
        self._sources.append(source)

    def read_by(self, run: Callable[[Callable[[], list[Family]]], Iterable[Family]]) -> None:
        """How the sources are called; the default is at once, by whoever scrapes."""
        self._run = run

    def collect(self) -> Iterable[Family]:
        """What the sources say now; part of what `registry` collects."""
        return self._run(self._read)

    def describe(self) -> Iterable[Family]:
        """Nothing: what is read is known when it is asked for."""
        return ()

    def _read(self) -> list[Family]:
        families: dict[Metric, Family] = {}
        for source in self._sources:
            for reading in source():
                metric = reading.metric
                if metric not in families:
                    families[metric] = self._family(metric)
                families[metric].add_metric(reading.labels, reading.value)
        return list(families.values())

    def _family(self, metric: Metric) -> Family:
        if metric.kind is Kind.COUNTER:
            self._check(metric, Kind.COUNTER)
            name = metric.name.removesuffix("_total")
            return CounterMetricFamily(name, metric.help, labels=metric.labels)
        self._check(metric, Kind.GAUGE)
        return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)

    def _build(self) -> Iterator[Reading]:
        import importlib.metadata  # slow to load, and few processes are scraped

        version = importlib.metadata.version("splitpoint")
        yield Reading(BUILD_INFO, 1, (self._service.value, version))

    def _check(self, metric: Metric, kind: Kind) -> None:
        if metric not in self._own:
            raise ValueError(f"{metric.name} is not a metric of {self._service}")
        if metric.kind is not kind:
            raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")


def _here(read: Callable[[], list[Family]]) -> Iterable[Family]:
    return read()
