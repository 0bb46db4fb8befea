"""The values of one process's metrics: counted at each event, or read at each scrape.

Only metrics in `splitpoint.observe.metrics` can be measured. Values that a service keeps
anyway (slots by state, a queue's length) are read at each scrape. Knows no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from splitpoint.observe.metrics import BUILD_INFO, Kind, Metric, Service, metrics_of

# Without this, each counter has a second series with the time of its creation.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Reading:
    """One value at a scrape. `labels`: their values in the metric's order."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Source = Callable[[], Iterable[Reading]]
Family = CounterMetricFamily | GaugeMetricFamily
# Reads all sources at one moment.
Reader = Callable[[], list[Family]]


class Meters:
    """The metrics of one process.

    A metric is either counted, by an instrument from `counter` or `histogram`, or read from
    a source at each scrape, never both. Any thread may use instruments. Raises ValueError
    for a metric of another service or kind: instruments at once, sources at the scrape.
    """

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._own = frozenset(metrics_of(service))
        self._counted: set[Metric] = set()
        self._sources: list[Source] = []
        self._run: Callable[[Reader], list[Family]] = _here
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def counter(self, metric: Metric) -> Counter:
        """Return a new counter; call once and keep it. With labels: `.labels(...).inc()`."""
        self._claim(metric, Kind.COUNTER)
        return Counter(_bare(metric), metric.help, metric.labels, registry=self.registry)

    def histogram(self, metric: Metric) -> Histogram:
        """Return a new histogram with the metric's buckets."""
        self._claim(metric, Kind.HISTOGRAM)
        return Histogram(
            metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets
        )

    def read(self, source: Source) -> None:
        """Read `source` at each scrape, in the thread that `read_by` set."""
        self._sources.append(source)

    @contextmanager
    def reading(self, source: Source) -> Iterator[None]:
        """Read `source` at each scrape until the end of the block."""
        self._sources.append(source)
        try:
            yield
        finally:
            self._sources.remove(source)

    def read_by(self, run: Callable[[Reader], list[Family]]) -> None:
        """Set how sources are read; by default in the thread of the scrape."""
        self._run = run

    def collect(self) -> Iterable[Family]:
        """Yield the build info and the sources' values; `registry` calls this."""
        yield self._build
        yield from self._run(self._read)

    def describe(self) -> Iterable[Family]:
        """Return nothing: sources name their metrics at the scrape."""
        return ()

    def _read(self) -> list[Family]:
        families: dict[Metric, Family] = {}
        for source in self._sources:
            for reading in source():
                family = families.get(reading.metric)
                if family is None:
                    family = families[reading.metric] = self._family(reading.metric)
                if len(reading.labels) != len(reading.metric.labels):
                    raise ValueError(f"{reading.metric.name} has labels {reading.metric.labels}")
                family.add_metric(reading.labels, reading.value)
        return list(families.values())

    def _family(self, metric: Metric) -> Family:
        if metric in self._counted:
            raise ValueError(f"{metric.name} is counted: it cannot be read as well")
        if metric.kind is Kind.COUNTER:
            self._check(metric, Kind.COUNTER)
            return CounterMetricFamily(_bare(metric), metric.help, labels=metric.labels)
        self._check(metric, Kind.GAUGE)
        return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)

    @cached_property
    def _build(self) -> Family:
        # At the first scrape, since it reads files and few processes are scraped.
        import importlib.metadata

        try:
            version = importlib.metadata.version("splitpoint")
        except importlib.metadata.PackageNotFoundError:  # run from a bare source tree
            version = "unknown"
        family = GaugeMetricFamily(BUILD_INFO.name, BUILD_INFO.help, labels=BUILD_INFO.labels)
        family.add_metric((self._service.value, version), 1)
        return family

    def _claim(self, metric: Metric, kind: Kind) -> None:
        self._check(metric, kind)
        self._counted.add(metric)

    def _check(self, metric: Metric, kind: Kind) -> None:
        if metric not in self._own:
            raise ValueError(f"{metric.name} is not a metric of {self._service}")
        if metric.kind is not kind:
            raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")


def _bare(metric: Metric) -> str:
    """Return a counter's name without `_total`, which the library adds."""
    return metric.name.removesuffix("_total")


def _here(read: Reader) -> list[Family]:
    return read()
