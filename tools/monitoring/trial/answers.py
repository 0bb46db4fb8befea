"""Ask every panel's queries and every recorded series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.monitoring.dashboards import dashboards, recording_rules
from tools.monitoring.trial.prometheus import Series

Ask = Callable[[str], Sequence[Series]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one query. `sample`: latest value of the first series; None if empty."""

    place: str
    panel: str
    legend: str
    series_count: int
    sample: float | None


def answers(ask: Ask) -> Iterator[Answer]:
    """Yield one for each query of each panel, then one for each recorded series."""
    for dashboard in dashboards():
        for panel in dashboard.panels():
            for query in panel.queries:
                yield _answer(dashboard.name, panel.title, query.legend, ask(query.plain()))
    for name in recording_rules():
        yield _answer("recording rules", name, "", ask(name))


def _answer(place: str, panel: str, legend: str, found: Sequence[Series]) -> Answer:
    sample = found[0].points[-1][1] if found else None
    return Answer(place, panel, legend, len(found), sample)
