"""All dashboards, and their files: `python -m tools.monitoring.dashboards` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.monitoring.grafana_json import dashboard_text
from tools.monitoring.link import LINK
from tools.monitoring.needs import ROOT, recording_rules
from tools.monitoring.overview import OVERVIEW
from tools.monitoring.power import POWER
from tools.monitoring.scheduler import SCHEDULER
from tools.monitoring.store import STORE

# In the order in which "why is it slow?" is asked.
DASHBOARDS = (OVERVIEW, LINK, STORE, SCHEDULER, POWER)

FOLDER = ROOT / "deploy" / "grafana" / "dashboards"


def files() -> Iterator[tuple[Path, str]]:
    """Every file, and what it should hold."""
    rules = recording_rules()
    for dashboard in DASHBOARDS:
        yield FOLDER / f"{dashboard.name}.json", dashboard_text(dashboard, rules)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
