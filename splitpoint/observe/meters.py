"""The values of one process's metrics: counted as things happen, or read when somebody asks.

Names come from `splitpoint.observe.metrics`; whatever is not listed there cannot be measured.
Books that a service keeps anyway (slots by state, a queue's length) are read at each
scrape instead of being kept twice. Knows no network.
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
# Asks all sources at one moment.
Reader = Callable[[], list[Family]]


class Meters:
    """The metrics of one process.

    A metric is either counted, by the instrument that `counter` or `histogram` gives, or
    read, by a source that yields it at each scrape; never both. Instruments may be used by
    any thread. Raises ValueError for a metric that is not of this service, or not of the
    kind that was asked for: at once by instruments, at the scrape by sources.
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
        """A new one: ask once and keep it. With labels: `.labels(...)` before `.inc()`."""
        self._claim(metric, Kind.COUNTER)
        return Counter(_bare(metric), metric.help, metric.labels, registry=self.registry)

    def histogram(self, metric: Metric) -> Histogram:
        """A new one, with the metric's buckets."""
        self._claim(metric, Kind.HISTOGRAM)
        return Histogram(
            metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets
        )

    def read(self, source: Source) -> None:
        """Ask `source` at each scrape, in the thread that `read_by` chose."""
        self._sources.append(source)

    @contextmanager
    def reading(self, source: Source) -> Iterator[None]:
        """As `read`, for the length of the context: what is read is closed behind it."""
        self._sources.append(source)
        try:
            yield
        finally:
            self._sources.remove(source)

    def read_by(self, run: Callable[[Reader], list[Family]]) -> None:
        """How the sources are asked; the default is at once, by whoever scrapes."""
        self._run = run

    def collect(self) -> Iterable[Family]:
        """What the sources say now, and who this is; part of what `registry` collects."""
        yield self._build
        yield from self._run(self._read)

    def describe(self) -> Iterable[Family]:
        """Nothing: what is read is known when it is asked for."""
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
        # Here, by the thread that scrapes: files are read for it, and few processes are scraped.
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
    """As the library wants counters to be called: it adds the rest itself."""
    return metric.name.removesuffix("_total")


def _here(read: Reader) -> list[Family]:
    return read()
