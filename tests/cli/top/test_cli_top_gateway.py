"""The gateway of `up --http` in `splitpoint top`: its counts, and rates of two readings."""

from __future__ import annotations

import dataclasses

from test_cli_top_rates import reading

from splitpoint_cli.request.observed import Gateway, GatewayCounts
from splitpoint_cli.top.bars import PLAIN
from splitpoint_cli.top.rates import Reading, first, following, rates_of_gateway
from splitpoint_cli.top.view import Frame

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
