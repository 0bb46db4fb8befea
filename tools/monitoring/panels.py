"""Dashboards as values: what is asked, in which unit, and what to do when it looks bad.

Knows neither Grafana's JSON (grafana_json.py) nor where answers come from.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# What Grafana fills in.
RATE_INTERVAL = "$__rate_interval"
WORKER = "$worker"
# Workers that the dashboard's variable names.
CHOSEN = '{worker=~"$worker"}'

FULL_WIDTH = 24


class Unit(enum.StrEnum):
    """Grafana's names."""

    NUMBER = "short"
    SHARE = "percentunit"
    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "cps"
    TOKENS_PER_SECOND = "si:tok/s"
    FLOPS = "flops"
    WATTS = "watt"
    JOULES = "joule"
    HERTZ = "hertz"
    CELSIUS = "celsius"
    YES_NO = "bool_yes_no"


class Form(enum.StrEnum):
    """How a panel is drawn."""

    LINES = "timeseries"
    STACK = "stack"
    NUMBER = "stat"
    # The labels are the message, the value is always 1.
    NAMES = "names"
    # As NAMES, a row for each series.
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of PromQL. `legend`: Grafana's, with {{label}}.

    Attributes:
        is_limit: a line to stay below, drawn dashed and never stacked.
        unit: None: the panel's.
        colour: Grafana's name; empty: chosen by Grafana, or by the panel's bounds.
    """

    expr: str
    legend: str
    is_limit: bool = False
    unit: Unit | None = None
    colour: str = ""

    def plain(self, window: str = "1m") -> str:
        """Without variables: every worker, rates over `window`."""
        return self.expr.replace(RATE_INTERVAL, window).replace(WORKER, ".*")


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        help: what it shows, and what to do when it looks bad.
        width: of Grafana's 24 columns.
        warn, alarm: from there on yellow and red; below instead of above, where
            `low_is_bad`.
        top: of the axis; None: whatever the values need.
        colours: Grafana's names by legend, where they mean something.
    """

    title: str
    unit: Unit
    help: str
    queries: tuple[Query, ...]
    form: Form = Form.LINES
    width: int = 8
    warn: float | None = None
    alarm: float | None = None
    low_is_bad: bool = False
    top: float | None = None
    colours: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.queries:
            raise ValueError(f"{self.title}: a panel asks something")
        if not 0 < self.width <= FULL_WIDTH:
            raise ValueError(f"{self.title}: {FULL_WIDTH} columns at most")
        if self.low_is_bad and (self.warn is None or self.alarm is None):
            raise ValueError(f"{self.title}: where little is bad, both bounds are said")
        if self.warn is not None and self.alarm is not None and self.warn != self.alarm:
            is_falling = self.alarm < self.warn
            if is_falling != self.low_is_bad:
                raise ValueError(f"{self.title}: the alarm lies on the wrong side of the warning")


def rate(metric: str, by: str = "", *, of: str = "") -> str:
    """PromQL: a counter's growth a second, summed by the labels of `by`.

    `of`: the selector, for one CHOSEN, or empty for all series.
    """
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{of}[{RATE_INTERVAL}]))"


def quantile(share: float, metric: str, by: str = "", *, of: str = "") -> str:
    """PromQL: of a histogram, over the same interval."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels, of=of)})"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one question."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name` is its file and its address."""

    name: str
    title: str
    help: str
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row.panels)
