"""Groups: work beside that of steps, with events, spans and errors of its own (1 s)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from stream_double import StreamDouble

from splitpoint.planning.schedule import Lane
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.groups import Claim, ComputeShare, Group, LaneShare, Piece, by_claim
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.lanes.work import Work

CPU = torch.device("cpu")


def nothing() -> None:
    return


def pieces_of(
    count: int, done: list[str], name: str = "piece", call: Callable[[int], None] | None = None
) -> Group:
    """Return a group of this number of copies, which note that they were done."""
    left = list(range(count))

    def draw() -> Piece | None:
        if not left:
            return None
        number = left.pop(0)

        def copy() -> None:
            if call is not None:
                call(number)
            done.append(f"{name} {number}")

        return Piece(Work(name, copy, 1, 1.0), nothing)

    return Group(draw)


def wait_done(group: Group, done: list[str], count: int) -> None:
    with group.changed:
        assert group.changed.wait_for(lambda: len(done) >= count or group.error, 30)
    group.wait_quiet()


@pytest.mark.parametrize("kind", [ThreadLanes, SerialLanes])
def test_a_step_neither_waits_for_a_group_nor_returns_its_spans(
    kind: type[ThreadLanes] | type[SerialLanes],
) -> None:
    lanes, done = kind(CPU), list[str]()
    group = pieces_of(5, done)
    lanes.attach(group)
    lanes.run(Lane.LINK_IN, Work("step", nothing))
    assert [span.name for span in lanes.finish()] == ["step"]
    wait_done(group, done, 5)
    assert done == [f"piece {number}" for number in range(5)]
    assert [span.name for span in group.take_spans()] == ["piece"] * 5
    assert lanes.finish() == []
    lanes.close()


def test_a_step_waits_for_one_piece_and_not_for_the_group() -> None:
    lanes, done, held = ThreadLanes(CPU), list[str](), threading.Event()
    begun = threading.Event()

    def hold(number: int) -> None:
        if number == 0:
            begun.set()
            assert held.wait(30)

    group = pieces_of(50, done, call=hold)
    lanes.attach(group)
    assert begun.wait(30)
    copied = lanes.run(Lane.LINK_IN, Work("step", lambda: done.append("step")))
    held.set()
    copied.wait()
    assert done.index("step") <= 2
    wait_done(group, done, 51)
    lanes.close()


def test_an_error_ends_its_own_group_alone() -> None:
    lanes, done = ThreadLanes(CPU), list[str]()

    def fail(number: int) -> None:
        if number == 2:
            raise OSError("the bus is gone")

    broken, sound = pieces_of(9, done, "broken", fail), pieces_of(5, done, "sound")
    for group in (broken, sound):
        lanes.attach(group)
    wait_done(sound, done, 7)
    assert isinstance(broken.error, OSError)
    assert sound.error is None
    assert [name for name in done if name.startswith("broken")] == ["broken 0", "broken 1"]
    lanes.run(Lane.LINK_IN, Work("step", nothing))
    assert [span.name for span in lanes.finish()] == ["step"]
    lanes.close()


def test_nothing_is_drawn_of_a_closed_group_and_it_becomes_quiet() -> None:
    lanes, done = ThreadLanes(CPU), list[str]()
    begun, held = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        begun.set()
        assert held.wait(30)

    group = pieces_of(9, done, call=hold)
    lanes.attach(group)
    assert begun.wait(30)
    group.close()
    lanes.detach(group)
    assert not group.is_quiet
    held.set()
    group.wait_quiet()
    lanes.close()
    assert done == ["piece 0"]


def test_an_error_in_a_draw_is_announced_also_after_an_empty_draw() -> None:
    ready, changes = False, list[int]()

    def draw() -> Piece | None:
        if ready:
            raise OSError("no slot")
        return None

    group = Group(draw, lambda: changes.append(1))
    assert group.draw() is None
    before = len(changes)
    assert group.draw() is None
    assert len(changes) == before, "nothing new"
    ready = True
    assert group.draw() is None
    assert isinstance(group.error, OSError)
    assert len(changes) == before + 1
    assert group.draw() is None
    assert len(changes) == before + 1


def test_memory_may_change_while_no_group_copies() -> None:
    lanes, done = ThreadLanes(CPU), list[str]()
    group = pieces_of(200, done)
    lanes.attach(group)
    with lanes.without_copies():
        before = len(done)
        lanes.run(Lane.LINK_IN, Work("step", nothing)).wait()
        assert len(done) == before
    wait_done(group, done, 200)
    lanes.close()


@pytest.mark.parametrize("seed", range(5))
def test_streams_do_the_pieces_of_a_group_beside_a_step(seed: int) -> None:
    cuda = StreamDouble(random.Random(seed))
    lanes: Lanes = StreamLanes(torch.device("cuda"), cuda)
    done: list[str] = []
    left = list(range(6))

    def draw() -> Piece | None:
        if not left:
            return None
        name = f"piece {left.pop(0)}"
        return Piece(Work(name, lambda: cuda.launch(lambda: done.append(name), 1.0)), nothing)

    group = Group(draw)
    lanes.attach(group)
    product = Piece(
        Work("product", lambda: cuda.launch(lambda: done.append("product"), 1.0)), nothing
    )
    lanes.run_piece(Lane.COMPUTE, group, product)
    with group.changed:
        assert group.changed.wait_for(lambda: len(done) == 7, 30)
    group.wait_quiet()
    assert [name for name in done if name != "product"] == [f"piece {n}" for n in range(6)]
    assert all(span.seconds == pytest.approx(1.0) for span in group.take_spans())
    lanes.close()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lane", [Lane.LINK_IN, Lane.COMPUTE, Lane.WEIGHTS_IN])
def test_a_device_that_is_lost_ends_its_groups_and_the_lanes(lane: Lane, seed: int) -> None:
    """Every call fails from then on: no piece stays under way, and nothing waits for ever."""
    cuda = StreamDouble(random.Random(seed))
    lanes = StreamLanes(torch.device("cuda"), cuda)
    lost = RuntimeError("an illegal memory access was encountered")

    def lose() -> None:
        cuda.error = lost

    def work(call: Callable[[], None]) -> Work:
        return Work("piece", lambda: cuda.launch(call, 1.0))

    left = [nothing, nothing, lose if lane is Lane.LINK_IN else nothing, *[nothing] * 9]
    group = Group(lambda: Piece(work(left.pop(0)), nothing) if left else None)
    lanes.attach(group)
    if lane is not Lane.LINK_IN:
        lanes.run_piece(lane, group, Piece(work(lose), nothing))
    with group.changed:
        assert group.changed.wait_for(lambda: group.error, 30)
    assert group.error is lost
    # Not even a piece that fails half way, and whose stream cannot be waited for.
    lanes.run_piece(Lane.COMPUTE, group, Piece(Work("piece", _fail), nothing))
    closing = threading.Thread(target=lanes.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert group.is_quiet


def _fail() -> None:
    raise OSError("the bus is gone")


# -- policy ----------------------------------------------------------------------------


def test_the_largest_saving_per_second_is_first_and_nobody_starves() -> None:
    short, long = Claim(saved=2.0, left=0.1), Claim(saved=2.0, left=1.0)
    assert by_claim([long, short]) == [1, 0]
    assert by_claim([Claim(8.0, 1.0), Claim(2.0, 1.0)]) == [0, 1]
    # A restore that waits overtakes any other that is served, sooner or later.
    waiting = [Claim(0.0, 1.0, waited=float(seconds)) for seconds in range(100)]
    first = [by_claim([short, claim])[0] for claim in waiting]
    assert first == sorted(first)
    assert first[0] == 0
    assert first[-1] == 1


def test_steps_and_restores_get_half_of_a_lane_that_both_want() -> None:
    rng, share = random.Random(7), LaneShare()
    used = {True: 0.0, False: 0.0}
    for _ in range(2000):
        by_step = share.steps_are_next
        seconds = rng.choice([0.001, 0.02]) if by_step else rng.choice([0.005, 0.03])
        share.used(seconds, by_step=by_step)
        used[by_step] += seconds
    assert used[True] == pytest.approx(used[False], abs=0.04)
    share.used(5.0, by_step=True)
    share.alone()
    assert share.steps_are_next


def test_products_take_their_share_of_the_time_whatever_one_takes() -> None:
    rng, share = random.Random(3), ComputeShare(0.1, 0.02)
    passed = spent = 0.0
    while passed < 100.0:
        while share.has_seconds:
            seconds = rng.choice([0.0005, 0.004, 0.3])
            share.spend(seconds)
            spent += seconds
        share.pass_time(0.02)
        passed += 0.02
    assert spent / passed == pytest.approx(0.1, rel=0.05)
