"""The outputs of an engine among several Run streams, without an engine. Under 1 s."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitpoint.errors import ResourceExhausted
from splitpoint.planning.plan import RestoreMethod
from splitpoint.speculation import DraftMethod
from worker_service.engine.messages import (
    DraftEvent,
    FinishEvent,
    PrefillEvent,
    RestoreEvent,
    StepEvent,
    StepOutput,
    TokenEvent,
)
from worker_service.engine.sampling import Choice
from worker_service.lanes.timeline import StepTimes
from worker_service.streams import OUTPUT_LIMIT, STREAM_LIMIT, Charges, Listener, RunStreams


def make_streams(now: float = 0.0) -> RunStreams:
    return RunStreams(StepOutput, clock=lambda: now)


def open_quiet(streams: RunStreams, count: int) -> list[Listener]:
    """Open streams that have taken what they heard of each other."""
    listeners = [streams.open() for _ in range(count)]
    for listener in listeners:
        while not listener.outputs.empty():
            listener.outputs.get_nowait()
    return listeners


def token(stream: int, index: int = 0) -> TokenEvent:
    return TokenEvent(("r", 1, stream), index, Choice(5))


def test_each_stream_gets_exactly_its_own_events_in_their_order() -> None:
    streams, rng = make_streams(), random.Random(1)
    listeners = [streams.open() for _ in range(3)]
    numbers = [each.stream for each in listeners]
    sent: dict[int, list[object]] = {number: [] for number in numbers}
    for step in range(200):
        output = StepOutput(running_count=step)
        for _ in range(rng.randrange(6)):
            # A stream that has ended, too.
            number = rng.choice([*numbers, 99])
            key = ("r", rng.randrange(3), number)
            event: object
            match rng.randrange(5):
                case 0:
                    event = TokenEvent(key, step, Choice(1))
                    output.tokens.append(event)
                case 1:
                    event = RestoreEvent(key, 1, 0, RestoreMethod.LOAD, 0.1)
                    output.restores.append(event)
                case 2:
                    event = FinishEvent(key, "stop")
                    output.finishes.append(event)
                case 3:
                    event = PrefillEvent(key, 7)
                    output.prefills.append(event)
                    output.step = StepEvent(StepTimes(0.1), 7, 0)
                case _:
                    output.tokens.append(TokenEvent(key, step, Choice(1)))
                    event = DraftEvent(key, DraftMethod.SUFFIX, 2, 1)
                    output.drafts.append(event)
                    sent.get(number, []).append(output.tokens[-1])
            sent.get(number, []).append(event)
        assert not streams.emit(output, numbers)
    for listener in listeners:
        outputs = []
        while not listener.outputs.empty():
            outputs.append(listener.outputs.get_nowait())
        got = [
            event
            for output in outputs
            for events in (
                *(output.tokens, output.restores, output.finishes, output.drafts),
                output.prefills,
            )
            for event in events
        ]
        assert sorted(map(repr, got)) == sorted(map(repr, sent[listener.stream]))
        steps = [output.running_count for output in outputs if output.has_news]
        assert steps == sorted(set(steps))


def test_only_a_stream_with_requests_hears_of_steps_without_its_tokens() -> None:
    streams = make_streams()
    busy, quiet = open_quiet(streams, 2)
    step = StepOutput(step=StepEvent(StepTimes.of(0.1, []), 5, 0))
    streams.emit(step, {busy.stream})
    assert (busy.outputs.qsize(), quiet.outputs.qsize()) == (1, 0)
    last = replace(step, tokens=[token(quiet.stream)])
    streams.emit(last, {busy.stream})
    assert quiet.outputs.get_nowait().step == step.step


def test_a_stream_that_takes_nothing_is_closed_and_the_others_go_on() -> None:
    streams = make_streams()
    slow, quick = open_quiet(streams, 2)
    for index in range(OUTPUT_LIMIT + 5):
        closed = streams.emit(
            StepOutput(tokens=[token(slow.stream, index), token(quick.stream, index)]), ()
        )
        if closed:
            break
        assert quick.outputs.get_nowait().tokens[0].index == index
    assert closed == [slow]
    assert slow.closed.is_set()
    assert not quick.closed.is_set()
    assert len(streams) == 1
    streams.emit(StepOutput(tokens=[token(quick.stream)]), ())
    assert not quick.outputs.empty()


def test_the_number_of_streams_is_bounded() -> None:
    streams = make_streams()
    listeners = [streams.open() for _ in range(STREAM_LIMIT)]
    with pytest.raises(ResourceExhausted, match="8 schedulers have a Run stream"):
        streams.open()
    streams.close(listeners[3])
    assert streams.open().stream not in {each.stream for each in listeners}


def test_a_new_stream_hears_at_once_what_the_others_hold() -> None:
    streams = make_streams()
    first = streams.open()
    assert first.outputs.empty()
    streams.charge(first, Charges(1000, 2, 3))
    second = streams.open()
    assert second.outputs.qsize() == 1
    others = streams.others_to_tell(second)
    assert others is not None
    assert others.charges == Charges(1000, 2, 3)


def test_charges_of_the_others_are_added_and_told_once() -> None:
    streams = make_streams(now=100.0)
    first, second, third = (streams.open() for _ in range(3))
    streams.charge(first, Charges(1000, 2, 3, wanted_bytes=50, waiting_since=90.0))
    streams.charge(second, Charges(200, 1, 0, wanted_bytes=70, waiting_since=95.0))
    others = streams.others_to_tell(third)
    assert others is not None
    assert (others.stream_count, others.busy_count) == (2, 2)
    assert others.charges == Charges(1200, 3, 3, wanted_bytes=50, waiting_since=90.0)
    assert streams.others_to_tell(third) is None
    streams.close(first)
    others = streams.others_to_tell(third)
    assert others is not None
    assert others.charges == Charges(200, 1, 0, wanted_bytes=70, waiting_since=95.0)
    streams.close(second)
    others = streams.others_to_tell(third)
    assert others is not None
    assert (others.stream_count, others.charges) == (0, Charges())
