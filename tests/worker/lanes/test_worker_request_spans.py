"""What a traced request remembers of its steps: sums by lane, however many pieces there were."""

from __future__ import annotations

from splitpoint.observe.tracing import NO_SPAN
from splitpoint.planning.schedule import Lane
from worker_service.lanes.spans import LaneUse, RequestSpans, add_lanes
from worker_service.lanes.timeline import Span


def span(lane: Lane, first: float, last: float, *, tokens: int = 0, amount: float = 0) -> Span:
    return Span(lane, "load K,V", first, last, amount=amount, tokens=tokens)


STEPS = (
    [
        span(Lane.LINK_IN, 1.0, 1.5, tokens=16, amount=100),
        span(Lane.LINK_IN, 1.5, 1.75, tokens=8, amount=50),
        span(Lane.COMPUTE, 1.25, 2.0, amount=7),
    ],
    [
        span(Lane.LINK_IN, 2.0, 2.5, tokens=16, amount=100),
        span(Lane.WEIGHTS_IN, 2.25, 2.5, amount=30),
    ],
)


def test_steps_add_up_as_if_every_piece_were_counted_by_itself() -> None:
    requests = [RequestSpans(NO_SPAN), RequestSpans(NO_SPAN)]
    for number, pieces in enumerate(STEPS):
        lanes: dict[Lane, LaneUse] = {}
        add_lanes(lanes, pieces)
        for request in requests:
            request.stepped(number, number + 1, 1, lanes, is_prefill=False)
    expected: dict[Lane, LaneUse] = {}
    add_lanes(expected, [piece for pieces in STEPS for piece in pieces])
    for request in requests:
        assert request.decode.lanes == expected
        assert (request.decode.first, request.decode.last) == (0, 2)
        assert (request.decode.steps, request.decode.tokens) == (2, 2)
        assert not request.prefill.steps
    assert expected[Lane.LINK_IN] == LaneUse(1.0, 2.5, 1.25, 3, 40, 250)
