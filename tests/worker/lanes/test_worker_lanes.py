"""Lanes: order, events, errors, the emulated link; CUDA's streams by a double.

Durations are those of the spans' own clock, never of the test's; no GPU has
confirmed `StreamLanes`.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from stream_double import StreamDouble

from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Lane, RestoreWork, Schedule, restore_tasks, simulate
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.lanes import EmulatedLink, Event, Lanes, SerialLanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work

CPU = torch.device("cpu")
SIDE_LANES = (Lane.LINK_IN, Lane.WEIGHTS_IN)


def nothing() -> None:
    """Work that takes no time by itself."""


def copy(size_bytes: int, name: str = "copy", call: Callable[[], None] = nothing) -> Work:
    return Work(name, call, size_bytes, size_bytes)


@pytest.fixture
def threads() -> Iterator[ThreadLanes]:
    lanes = ThreadLanes(CPU)
    yield lanes
    lanes.close()


def of(lane: Lane, spans: Sequence[Span]) -> list[Span]:
    return sorted((span for span in spans if span.lane is lane), key=lambda span: span.start)


# -- order and events ----------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Work that is given to a lane after others; `after`: indices of earlier steps."""

    lane: Lane
    work: Work
    after: tuple[int, ...] = ()


def give(lanes: Lanes, steps: Sequence[Step]) -> None:
    events: list[Event] = []
    for step in steps:
        events.append(lanes.run(step.lane, step.work, [events[index] for index in step.after]))


@pytest.mark.parametrize("kind", [ThreadLanes, SerialLanes])
def test_nothing_begins_before_what_it_waits_for_however_lanes_are_delayed(
    kind: type[ThreadLanes] | type[SerialLanes],
) -> None:
    rng = random.Random(4)
    lanes = kind(CPU)
    lanes.before = lambda _: time.sleep(rng.choice([0.0, 0.0, 1e-4, 5e-4]))
    for _ in range(15):
        steps, done, broken = random_steps(rng)
        give(lanes, steps)
        spans = lanes.finish()
        assert not broken
        assert sorted(done) == list(range(len(steps)))
        by_number = {int(span.name): span for span in spans}
        assert len(by_number) == len(spans) == len(steps)
        for number, step in enumerate(steps):
            assert all(by_number[each].end <= by_number[number].start for each in step.after)
        for lane in Lane:
            mine = [number for number, step in enumerate(steps) if step.lane is lane]
            assert [number for number in done if steps[number].lane is lane] == mine
    lanes.close()


def random_steps(rng: random.Random) -> tuple[list[Step], list[int], list[int]]:
    """Forty pieces of work; which were done, in order, and which began too early."""
    done: list[int] = []
    broken: list[int] = []

    def step(number: int) -> Step:
        earlier = rng.sample(range(number), min(number, rng.randrange(4)))

        def call() -> None:
            if not set(earlier) <= set(done):
                broken.append(number)
            done.append(number)

        return Step(
            rng.choice([*SIDE_LANES, Lane.COMPUTE]), Work(str(number), call), tuple(earlier)
        )

    return [step(number) for number in range(40)], done, broken


def test_lanes_run_side_by_side_and_compute_is_the_callers_own_thread(threads: ThreadLanes) -> None:
    meeting = threading.Barrier(len(SIDE_LANES) + 1, timeout=30)
    seen: list[str] = []

    def meet() -> None:
        meeting.wait()  # broken, and an error, unless all lanes are in it at once
        seen.append(threading.current_thread().name)

    for lane in SIDE_LANES:
        threads.run(lane, Work("meet", meet))
    threads.run(Lane.COMPUTE, Work("meet", meet))
    threads.finish()
    assert len(set(seen)) == len(SIDE_LANES) + 1
    assert threading.current_thread().name in seen


def test_a_lanes_tensors_need_no_gradients(threads: ThreadLanes) -> None:
    modes: list[bool] = []
    threads.run(Lane.LINK_IN, Work("look", lambda: modes.append(torch.is_inference_mode_enabled())))
    threads.finish()
    assert modes == [True]


def test_the_serial_twin_does_each_call_in_the_callers_thread_before_it_returns() -> None:
    lanes = SerialLanes(CPU)
    seen: list[tuple[str, int]] = []
    for number, lane in enumerate(2 * [*SIDE_LANES, Lane.COMPUTE]):
        call = lambda n=number: seen.append((threading.current_thread().name, n))  # noqa: E731
        event = lanes.run(lane, Work(str(number), call))
        assert event.is_done
        assert seen[-1] == (threading.current_thread().name, number)
    spans = lanes.finish()
    assert [span.name for span in spans] == [str(number) for number in range(6)]
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    assert lanes.finish() == []


def test_spans_say_what_the_work_was(threads: ThreadLanes) -> None:
    threads.run(Lane.LINK_IN, Work("load", nothing, size_bytes=3, amount=5.0, layer=2, tokens=7))
    threads.run(Lane.COMPUTE, Work("build", nothing))
    first, second = sorted(threads.finish(), key=lambda span: span.name, reverse=True)
    assert (first.lane, first.name, first.layer, first.tokens, first.amount) == (
        *(Lane.LINK_IN, "load", 2),
        *(7, 5.0),
    )
    assert (second.lane, second.name, second.layer) == (Lane.COMPUTE, "build", None)
    assert threads.finish() == []


# -- errors --------------------------------------------------------------------------


def raiser(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_the_first_error_is_raised_once_everything_has_ended(threads: ThreadLanes) -> None:
    ended: list[str] = []
    go = threading.Event()

    def late() -> None:
        go.wait(30)
        ended.append("late")

    failed = threads.run(Lane.LINK_IN, Work("bad", raiser(OSError("first"))))
    threads.run(Lane.LINK_IN, Work("worse", raiser(OSError("second"))))
    behind = threads.run(Lane.WEIGHTS_IN, Work("late", late))
    with pytest.raises(OSError, match="first"):
        failed.wait()
    assert failed.is_done
    assert not behind.is_done
    threading.Timer(0.02, go.set).start()
    with pytest.raises(OSError, match="first"):
        threads.finish()
    assert ended == ["late"]
    # What was raised is over.
    threads.run(Lane.LINK_IN, Work("good", nothing))
    assert [span.name for span in threads.finish()] == ["good"]


def test_what_waits_for_something_that_failed_is_not_done(threads: ThreadLanes) -> None:
    seen: list[str] = []
    failed = threads.run(Lane.LINK_IN, Work("bad", raiser(OSError("the bus is gone"))))
    dependent = threads.run(Lane.WEIGHTS_IN, Work("never", lambda: seen.append("out")), [failed])
    threads.run(Lane.WEIGHTS_IN, Work("other", lambda: seen.append("other")))
    with pytest.raises(OSError, match="the bus is gone"):
        threads.run(Lane.COMPUTE, Work("never", lambda: seen.append("compute")), [dependent])
    threads.finish_after_error()
    assert seen == ["other"]
    assert threads.finish() == []


def slowly(seconds: float, done: list[Any], what: object) -> None:
    time.sleep(seconds)
    done.append(what)


def test_settling_waits_and_drops_errors_and_spans(threads: ThreadLanes) -> None:
    done: list[int] = []
    for number in range(20):
        threads.run(Lane.LINK_IN, Work("slow", partial(slowly, 1e-3, done, number)))
    threads.run(Lane.LINK_IN, Work("bad", raiser(ValueError("x"))))
    threads.finish_after_error()
    assert done == list(range(20))
    assert threads.finish() == []


def test_an_error_of_compute_is_raised_where_it_was_asked_for() -> None:
    for lanes in (ThreadLanes(CPU), SerialLanes(CPU)):
        with pytest.raises(ValueError, match="NaN"):
            lanes.run(Lane.COMPUTE, Work("bad", raiser(ValueError("NaN"))))
        lanes.close()


def test_closing_ends_every_thread_and_the_work_before_it() -> None:
    before = set(threading.enumerate())
    lanes = ThreadLanes(CPU)
    done: list[Lane] = []
    for lane in SIDE_LANES:
        lanes.run(lane, Work("slow", partial(slowly, 0.01, done, lane)))
    lanes.run(Lane.LINK_IN, Work("bad", raiser(ValueError("x"))))
    assert set(threading.enumerate()) > before
    lanes.close()
    assert set(threading.enumerate()) <= before
    assert set(done) == set(SIDE_LANES)


# -- the emulated link ---------------------------------------------------------------

RATE = 50e6
PIECE = 50_000
PIECE_SECONDS = PIECE / RATE


class VirtualClock:
    """Stands for the module `time`: only sleeps take time, and what `work` is told."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._own = threading.local()

    def perf_counter(self) -> float:
        with self._lock:
            self._own.read = self._now
            return self._now

    def sleep(self, seconds: float) -> None:
        """Sleep from the last time on that this thread has read."""
        with self._lock:
            self._now = max(self._now, getattr(self._own, "read", self._now) + seconds)

    def thread_time(self) -> float:
        return getattr(self._own, "worked", 0.0)

    def work(self, seconds: float) -> None:
        """Use the processor in this thread."""
        self._own.worked = self.thread_time() + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    made = VirtualClock()
    for module in ("lanes", "cpu"):
        monkeypatch.setattr(f"worker_service.lanes.{module}.time", made)
    return made


def linked(rate: float = RATE) -> ThreadLanes:
    return ThreadLanes(CPU, EmulatedLink(rate))


def meet(both: threading.Barrier) -> None:
    both.wait(60)


def follow_each_other(spans: Sequence[Span]) -> bool:
    return all(b.start == pytest.approx(a.end) for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("kind", [ThreadLanes, SerialLanes])
def test_transfers_take_what_the_rate_says_and_are_not_seen_before(
    clock: VirtualClock, kind: type[ThreadLanes] | type[SerialLanes]
) -> None:
    lanes: Lanes = kind(CPU, EmulatedLink(RATE))
    events = [lanes.run(Lane.LINK_IN, copy(PIECE)) for _ in range(40)]
    seen = []
    for event in events:
        event.wait()
        seen.append(clock.perf_counter())
    spans = of(Lane.LINK_IN, lanes.finish())
    lanes.close()
    assert [span.seconds for span in spans] == pytest.approx([PIECE_SECONDS] * 40)
    # Without gaps: the link is a copy engine, not the thread that stands for it.
    assert follow_each_other(spans)
    assert all(span.end <= moment + 1e-9 for span, moment in zip(spans, seen, strict=True))


def test_a_thread_that_wakes_late_makes_up_for_it(clock: VirtualClock) -> None:
    lanes = linked()
    all_given = threading.Event()
    late = iter([0.02, *[0.0] * 39])

    def wake(_: Lane) -> None:
        all_given.wait()
        clock.sleep(next(late))

    lanes.before = wake
    for _ in range(40):
        lanes.run(Lane.LINK_IN, copy(PIECE))
    all_given.set()
    spans = of(Lane.LINK_IN, lanes.finish())
    lanes.close()
    assert spans[-1].end - spans[0].start == pytest.approx(40 * PIECE_SECONDS)


def test_the_link_is_idle_until_what_a_transfer_waits_for_is_done(clock: VirtualClock) -> None:
    lanes = linked()
    lanes.run(Lane.LINK_IN, copy(PIECE))
    computed = lanes.run(Lane.COMPUTE, Work("compute", lambda: clock.sleep(0.02)))
    lanes.run(Lane.LINK_IN, copy(PIECE), [computed])
    first, second = of(Lane.LINK_IN, lanes.finish())
    lanes.close()
    assert second.start >= 0.02 > first.end
    assert second.seconds == pytest.approx(PIECE_SECONDS)


def test_both_directions_have_a_link_of_their_own(clock: VirtualClock) -> None:
    """The lane out is the calling thread of the write-back."""
    lanes = linked()
    outward: list[Span] = []
    both = threading.Barrier(2)

    def write_back() -> None:
        for number in range(30):
            call = nothing if number else partial(meet, both)
            outward.append(lanes.run_in_this_thread(Lane.LINK_OUT, copy(PIECE, call=call)))

    writer = threading.Thread(target=write_back)
    writer.start()
    for number in range(30):
        lanes.run(Lane.LINK_IN, copy(PIECE, call=nothing if number else partial(meet, both)))
    inward = of(Lane.LINK_IN, lanes.finish())
    writer.join()
    lanes.close()
    # Neither was ever held up by the other: each is as long as its own bytes take.
    spans = [*inward, *outward]
    assert [span.seconds for span in spans] == pytest.approx([PIECE_SECONDS] * 60)
    assert inward[0].start == outward[0].start == 0


def test_weights_share_the_link_with_the_cache_and_neither_starves(clock: VirtualClock) -> None:
    """Each lane's transfer goes on when the other's has its place on the link."""
    lanes = linked()
    both = threading.Barrier(2)
    for _ in range(30):
        for lane in SIDE_LANES:
            lanes.run(lane, copy(PIECE, call=partial(meet, both)))
    spans = sorted(lanes.finish(), key=lambda span: span.start)
    lanes.close()
    assert follow_each_other(spans)
    assert spans[-1].end - spans[0].start == pytest.approx(60 * PIECE_SECONDS)
    for first in range(0, 60, 2):
        assert {span.lane for span in spans[first : first + 2]} == {*SIDE_LANES}


def test_a_rate_that_changes_counts_from_the_next_transfer_on(clock: VirtualClock) -> None:
    lanes = linked()
    link = lanes.link
    assert link is not None

    def slow_down() -> None:
        link.bytes_per_second = RATE / 4

    for number in range(20):
        lanes.run(Lane.LINK_IN, copy(PIECE, call=slow_down if number == 9 else nothing))
    spans = of(Lane.LINK_IN, lanes.finish())
    lanes.close()
    seconds = [PIECE_SECONDS] * 10 + [4 * PIECE_SECONDS] * 10
    assert [span.seconds for span in spans] == pytest.approx(seconds)


def test_a_copy_slower_than_the_link_takes_its_own_time(clock: VirtualClock) -> None:
    lanes = linked(1e15)
    lanes.run(Lane.LINK_IN, copy(PIECE, call=lambda: clock.work(0.005)))
    lanes.run(Lane.LINK_IN, copy(PIECE))
    first, second = of(Lane.LINK_IN, lanes.finish())
    lanes.close()
    assert first.seconds == pytest.approx(0.005)
    assert second.start >= first.end


def test_compute_takes_no_time_on_the_link() -> None:
    lanes = linked(1.0)
    lanes.run(Lane.COMPUTE, copy(1 << 40))
    lanes.finish()
    lanes.close()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        EmulatedLink(rate)
    assert caught.value.field == "link_rate"


def test_a_gpu_has_a_link_of_its_own() -> None:
    cuda = torch.device("cuda")
    for overlapped in (True, False):
        with pytest.raises(InvalidArgument, match="only be emulated on a CPU"):
            lanes_of(cuda, overlapped=overlapped, link=EmulatedLink(1e9))


def test_the_lanes_of_a_cpu() -> None:
    link = EmulatedLink(1e9)
    for overlapped, kind in ((True, ThreadLanes), (False, SerialLanes)):
        lanes = lanes_of(CPU, overlapped=overlapped, link=link)
        assert type(lanes) is kind
        assert lanes.link is link
        lanes.close()


# -- CUDA's streams, by a double -----------------------------------------------------

CUDA = torch.device("cuda")


def stream_lanes(seed: int = 0) -> tuple[StreamLanes, StreamDouble]:
    cuda = StreamDouble(random.Random(seed))
    return StreamLanes(CUDA, cuda), cuda


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("schedule", list(Schedule))
def test_streams_keep_every_order_that_was_asked_for_and_no_other(
    schedule: Schedule, seed: int
) -> None:
    work = RestoreWork(3, 0, 130, 288, chunk_tokens=16, tile_tokens=32, slots=2)
    tasks = restore_tasks(work, schedule)
    lanes, cuda = stream_lanes(seed)
    done: list[int] = []
    broken: list[int] = []

    def step_of(number: int) -> Step:
        task = tasks[number]

        def happen() -> None:
            if not set(task.after) <= set(done):
                broken.append(number)
            done.append(number)

        call = lambda: cuda.launch(happen, seconds=task.tokens)  # noqa: E731
        return Step(task.lane, Work(str(number), call), task.after)

    give(lanes, [step_of(number) for number in range(len(tasks))])
    assert cuda.synchronized == 0, "the host waited without being asked to"
    spans = lanes.finish()
    assert not broken
    assert sorted(done) == list(range(len(tasks)))
    found = max(s.end for s in spans) - min(s.start for s in spans)
    # Two streams, one for each resource: no wait too many either.
    assert found == pytest.approx(simulate(tasks, lambda task: task.tokens).seconds, abs=1e-3)
    assert lanes.finish() == []


@pytest.mark.parametrize("seed", range(5))
def test_events_are_used_again_once_nothing_refers_to_them(seed: int) -> None:
    lanes, cuda = stream_lanes(seed)
    kept: list[tuple[Event, list[str]]] = []
    counts = []
    for step in range(6):
        seen: list[str] = []
        late = partial(cuda.launch, partial(seen.append, "copy"), 2.0)
        for number in range(5):
            copied = lanes.run(Lane.LINK_IN, Work("copy", late))
            lanes.run(Lane.COMPUTE, Work("read", lambda: cuda.launch(nothing, 1.0)), [copied])
            if step == number == 0:
                kept.append((copied, seen))
        spans = lanes.finish()
        assert [span.seconds for span in of(Lane.LINK_IN, spans)] == pytest.approx([2.0] * 5)
        assert len(seen) == 5
        del copied
        counts.append(cuda.made)
    # One more may be needed while the event that is kept is not given back.
    assert counts[-1] <= counts[0] + 1
    assert kept[0][0].is_done


@pytest.mark.parametrize("seed", range(5))
def test_a_lane_begins_after_what_compute_was_given_before(seed: int) -> None:
    lanes, cuda = stream_lanes(seed)
    seen: list[str] = []
    for _ in range(3):
        cuda.launch(lambda: seen.append("before"), seconds=3.0)
        lanes.run(Lane.LINK_IN, Work("copy", lambda: cuda.launch(lambda: seen.append("copy"), 1.0)))
        [span] = lanes.finish()
        assert span.seconds == pytest.approx(1.0)
    assert seen == ["before", "copy"] * 3


@pytest.mark.parametrize("seed", range(5))
def test_a_lane_begins_after_what_compute_was_given_since_spans_were_collected(seed: int) -> None:
    lanes, cuda = stream_lanes(seed)
    seen: list[str] = []
    found: list[Span] = []

    def give(lane: Lane, name: str) -> None:
        lanes.run(lane, Work(name, lambda: cuda.launch(lambda: seen.append(name), 1.0)))

    for step in range(3):
        give(Lane.COMPUTE, f"step {step}")
        give(Lane.WEIGHTS_IN, f"weights {step}")  # for the next step, maybe under way still
        found += lanes.collect()
        cuda.launch(partial(seen.append, f"pages given back {step}"), 1.0)
        give(Lane.LINK_IN, f"into the pages {step}")
    found += lanes.finish()
    for step in range(3):
        assert seen.index(f"pages given back {step}") < seen.index(f"into the pages {step}")
    assert len(found) == len({span.name for span in found}) == 9
    assert [span.seconds for span in found] == pytest.approx([1.0] * 9)


def test_spans_end_when_the_host_saw_the_last_of_them_end() -> None:
    lanes, cuda = stream_lanes()
    cuda.launch(nothing, seconds=1000.0)  # the device is far behind the host
    lanes.run(Lane.LINK_IN, Work("copy", lambda: cuda.launch(nothing, 1.0)))
    lanes.run(Lane.LINK_IN, Work("copy", lambda: cuda.launch(nothing, 2.0)))
    before = time.perf_counter()
    first, second = lanes.finish()
    assert before - 1e-6 <= second.end <= time.perf_counter() + 1e-6
    assert (first.seconds, second.seconds) == pytest.approx((1.0, 2.0))
    assert second.start == pytest.approx(first.end)


def test_settling_waits_for_work_that_failed_half_way() -> None:
    lanes, cuda = stream_lanes()
    seen: list[str] = []

    def half() -> None:
        cuda.launch(lambda: seen.append("half"), 1.0)
        raise OSError("out of streams")

    with pytest.raises(OSError, match="out of streams"):
        lanes.run(Lane.WEIGHTS_IN, Work("half", half))
    assert cuda.current is cuda.default
    lanes.finish_after_error()
    assert seen == ["half"]
