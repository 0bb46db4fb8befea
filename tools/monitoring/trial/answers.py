"""What every panel and every recording rule answers, and which of them say nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.monitoring.dashboards import DASHBOARDS
from tools.monitoring.grafana_json import marked_title
from tools.monitoring.needs import recording_rules
from tools.monitoring.trial.prometheus import Series

Ask = Callable[[str], Sequence[Series]]


@dataclass(frozen=True, slots=True)
class Answer:
    """To one query. `sample`: the latest value of the first series; None: nothing came."""

    place: str
    panel: str
    legend: str
    series_count: int
    sample: float | None


def answers(ask: Ask) -> Iterator[Answer]:
    """One for each query of each panel, then one for each recorded series."""
    rules = recording_rules()
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels():
            for query in panel.queries:
                title = marked_title(panel, rules)
                yield _answer(dashboard.name, title, query.legend, ask(query.plain()))
    for name in rules:
        yield _answer("recording rules", name, "", ask(name))


def _answer(place: str, panel: str, legend: str, found: Sequence[Series]) -> Answer:
    sample = found[0].points[-1][1] if found else None
    return Answer(place, panel, legend, len(found), sample)
