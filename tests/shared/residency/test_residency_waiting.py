"""One request that fits later: waiting against streaming at once. Quick: below a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import Objective
from splitpoint.residency.load import DeviceRoom, RequestLoad
from splitpoint.residency.waiting import Running, WaitOrStream, wait_or_stream
from splitpoint.shapes import BUILT_IN_SHAPES

OPT = BUILT_IN_SHAPES["opt-6.7b"]
A100 = BUILT_IN_PROFILES["a100-pcie4"]
ROOM = DeviceRoom(has_activations=True, staging_tokens=1024, prefill_tokens=512)
ONE = RequestLoad(1088, 1024, 64)


def ask(running: Running, load: RequestLoad = ONE, **changes: object) -> WaitOrStream:
    room = replace(ROOM, **changes)  # type: ignore[arg-type]
    return wait_or_stream(OPT, A100, load, room, running)


@pytest.mark.parametrize("objective", Objective)
def test_a_short_wait_is_better_than_a_pull_per_step(objective: Objective) -> None:
    answer = ask(Running(8, 1000, steps_left=4), objective=objective)
    assert not answer.streams
    assert answer.wait_score < answer.stream_score


@pytest.mark.parametrize("objective", Objective)
def test_a_long_wait_for_a_short_answer_is_not(objective: Objective) -> None:
    load = replace(ONE, prompt_tokens=129, cached_tokens=64, answer_tokens=8)
    answer = ask(Running(1, 1000, steps_left=2000), load, objective=objective)
    assert answer.streams
    assert answer.stream_seconds < answer.wait_seconds


def test_the_wait_grows_with_the_steps_and_streaming_does_not() -> None:
    short, long = (ask(Running(4, 1000, steps_left=steps)) for steps in (10, 400))
    assert long.wait_seconds > short.wait_seconds
    assert long.stream_seconds == short.stream_seconds


def test_others_that_are_streamed_share_the_link() -> None:
    alone = ask(Running(4, 1000, steps_left=100))
    shared = ask(Running(4, 1000, steps_left=100, streamed_lengths=(1100, 1100)))
    assert shared.stream_seconds > 1.5 * alone.stream_seconds


def test_more_running_requests_weigh_against_streaming() -> None:
    """Latency counts the delay of every request that decodes beside the pull."""
    load = replace(ONE, answer_tokens=200)
    few = ask(Running(1, 1000, steps_left=3000), load)
    many = ask(Running(60, 1000, steps_left=3000), load)
    assert few.stream_score / few.wait_score < many.stream_score / many.wait_score
