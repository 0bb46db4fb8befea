"""What `splitpoint status` says of a worker's selections. Under 1 s."""

from __future__ import annotations

from told_workers import telemetry, worker

from splitpoint.selection import SelectionMethod
from splitpoint_cli.request.status import selection_text

METHODS = (SelectionMethod.COLUMNS, SelectionMethod.QUEST)


def test_a_worker_says_what_it_selects_by_and_what_it_read() -> None:
    told = telemetry(1.0, 500.0)
    assert selection_text(worker("0", told, selection_methods=METHODS)) == (
        "selects by columns, quest; 1,000 steps read 12.5% of the tokens"
    )
    for idle in (None, telemetry(1.0, 0.0)):
        text = selection_text(worker("0", idle, selection_methods=METHODS))
        assert text == "selects by columns, quest"
