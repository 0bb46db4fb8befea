"""One request that fits the device, but not now: wait for memory, or be streamed at once.

While it waits, the others decode as before. If it is streamed, each of their steps lasts as
long as its pull, too. With R running requests that each have W steps to go until enough memory is
free, and A tokens to generate,

    wait      finishes after W t + start + (A - 1) step(R); the others after W t
    stream    finishes after start' + (A - 1) T; the others after W steps, of which the
              first A - 1 take T

where t is a step now and T one with the new pull. LATENCY compares the mean finishing time
of all R + 1, THROUGHPUT the time until all of them have finished: both generate the same
tokens. Pure: what is running is told by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Objective
from splitpoint.residency.load import DeviceRoom, RequestLoad
from splitpoint.residency.seconds import PieceSeconds
from splitpoint.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Running:
    """Requests that decode on the device at present.

    Attributes:
        count: of them, at least 1.
        mean_length: tokens of each, on average.
        steps_left: decode steps until enough memory is free, as far as is expected.
        streamed_lengths: lengths of those among them that are streamed.
    """

    count: int
    mean_length: int
    steps_left: int
    streamed_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitOrStream:
    """The two answers. Seconds until the request itself has finished.

    Attributes:
        streams: True if streaming at once is better under the objective.
        wait_score, stream_score: seconds that the objective compares.
    """

    streams: bool
    wait_seconds: float
    stream_seconds: float
    wait_score: float
    stream_score: float


def wait_or_stream(
    shape: ModelShape, profile: Profile, load: RequestLoad, room: DeviceRoom, running: Running
) -> WaitOrStream:
    """Compare both for one request."""
    pieces = PieceSeconds(shape, profile, room)
    steps, left, others = load.step_count, running.steps_left, running.count
    before = _step(pieces, running, running.streamed_lengths)
    with_pull = _step(pieces, running, (*running.streamed_lengths, load.mean_length))
    beside = pieces.step(others, load.mean_length)
    wait_ends = left * before
    wait = wait_ends + pieces.start(load) + steps * beside
    start = pieces.streamed_start(load)
    stream = start + steps * with_pull
    delayed = min(steps, left)
    stream_ends = start + delayed * with_pull + (left - delayed) * before
    if room.objective is Objective.THROUGHPUT:
        wait_score, stream_score = max(wait, wait_ends), max(stream, stream_ends)
    else:
        wait_score = (wait + others * wait_ends) / (others + 1)
        stream_score = (stream + others * stream_ends) / (others + 1)
    return WaitOrStream(stream_score < wait_score, wait, stream, wait_score, stream_score)


def _step(pieces: PieceSeconds, running: Running, streamed: tuple[int, ...]) -> float:
    """Return a step of what is running, with these sequences streamed."""
    resident = max(0, running.count - len(running.streamed_lengths))
    if not streamed:
        return pieces.step(resident, running.mean_length)
    return pieces.streamed_step(
        len(streamed), sum(streamed) // len(streamed), resident_count=resident
    )
