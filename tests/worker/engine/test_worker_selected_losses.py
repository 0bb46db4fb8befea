"""Test sequences that read by selection when they leave the device, lose chunks, or end early."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from engine_runner import CPU, Transcript, make_engine
from store_runner import streamed
from test_worker_selected import WHOLE, Notes, always_on, check_left, lanes
from test_worker_streamed import CHUNK, GREEDY, NEW, Case, make_case, step_until_idle

from splitpoint.errors import FailedPrecondition
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.selection import Selection
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Call, Cancel
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Sequence, Stage
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import EmulatedLink, Lanes, SerialLanes
from worker_service.lanes.timeline import FETCHING_ROWS, Trace
from worker_service.store.verifier import Verifier
from worker_service.store.write_back import WriteFailed

__all__ = ["always_on", "lanes"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from make_case("llama", tmp_path_factory.mktemp("llama"))


def run_with(
    case: Case,
    engine: Engine,
    interrupt: Callable[[Sequence], None],
    *,
    salt: bytes = b"",
    tokens_before: int = 4,
) -> tuple[Transcript, Notes]:
    """Run a request that selects, and interrupt it once, between two steps, after some tokens."""
    notes = Notes(case, engine)
    case.runner.admit(
        engine,
        streamed("2", case.prompts[2], GREEDY, salt=salt, selection=WHOLE, resident_tokens=40),
    )
    transcript = Transcript()
    has_interrupted = False
    while not engine.is_idle or not transcript.finishes:
        transcript.add(case.runner.step(engine))
        running = engine.queues.running
        if not has_interrupted and len(transcript.tokens.get("2", [])) == tokens_before:
            has_interrupted = True
            assert running[0].selects
            engine.post(Call(lambda: interrupt(engine.queues.running[0])))
    assert has_interrupted
    check_left(engine)
    return transcript, notes


def test_a_preempted_sequence_computes_anew_what_it_computed_by_selection(
    llama: Case, lanes: Lanes
) -> None:
    engine = llama.engine(lanes)
    restored: list[int] = []

    def preempt(sequence: Sequence) -> None:
        assert sequence.first_approximate is not None
        restored.append(sequence.first_approximate)
        engine.queues.preempt(sequence)

    transcript, notes = run_with(llama, engine, preempt, salt=b"preempted")
    llama.check(transcript)
    # The prompt, and after it left all tokens, gave one exactly; then a step built the screens.
    assert len(notes.usages["2"]) == NEW - 4
    # The cold prompt, and the step that built, were exact.
    assert restored == [len(llama.prompts[2]) + 1]


def test_a_front_that_is_given_up_builds_the_screens_again(llama: Case, lanes: Lanes) -> None:
    engine = llama.engine(lanes)
    stored: list[int] = []

    def give_up(sequence: Sequence) -> None:
        assert sequence.reads is not None
        stored.append(len(sequence.reads.chunks))
        assert engine.page_manager.give_up_kept(sequence)
        assert engine.page_manager.give_up_kept(sequence)
        assert not engine.page_manager.give_up_kept(sequence)
        assert not sequence.reads.is_built

    transcript, notes = run_with(llama, engine, give_up)
    llama.check(transcript)
    assert stored == [6]
    counts = [usage.read_token_count for usage in notes.usages["2"]]
    visible = [usage.visible_token_count for usage in notes.usages["2"]]
    assert counts == visible
    assert len(counts) == NEW - 2


def test_screens_of_other_chunks_are_built_again(
    llama: Case, lanes: Lanes, caplog: pytest.LogCaptureFixture
) -> None:
    """They must never be: were they, one request reads everything for a step, and none ends."""
    engine = llama.engine(lanes)

    def confuse(sequence: Sequence) -> None:
        assert sequence.reads is not None
        sequence.reads.chunks.reverse()

    transcript, notes = run_with(llama, engine, confuse)
    llama.check(transcript)
    assert len(notes.usages["2"]) == NEW - 2
    assert "other chunks" in caplog.text


def test_a_store_that_went_away_costs_a_new_start(llama: Case, lanes: Lanes) -> None:
    engine = llama.engine(lanes)
    lost = FailedPrecondition("the KV store session changed", reason="STORE_LOST")
    transcript, notes = run_with(
        llama, engine, lambda each: engine.post(WriteFailed(each.key, lost))
    )
    llama.check(transcript)
    assert len(notes.usages["2"]) <= NEW - 2


def test_a_sequence_that_ends_in_the_middle_leaves_nothing(llama: Case, lanes: Lanes) -> None:
    engine = llama.engine(lanes)
    transcript, _ = run_with(llama, engine, lambda each: engine.post(Cancel(each.key)))
    assert transcript.finishes["2"].reason == "cancelled"


@pytest.mark.parametrize("serial", [False, True])
def test_a_chunk_lost_while_rows_are_read_costs_a_new_start(llama: Case, serial: bool) -> None:
    """Reuse a slot under the copies: the NaN that was read must not stay anywhere."""
    lanes: Lanes = SerialLanes(CPU) if serial else ThreadLanes(CPU)
    engine = llama.engine(lanes)
    lost: list[int] = []

    def lose(lane: Lane) -> None:
        victim = next((each for each in engine.queues.running if each.selects), None)
        if lane is not Lane.LINK_IN or victim is None or lost:
            return
        lost.append(len(victim.tokens))
        chunk, tensors = victim.stored[4], llama.runner.connection.tensors
        llama.runner.lose(chunk)
        for plane in (*tensors.keys, *tensors.values, *tensors.inputs):
            plane[chunk.slot] = float("nan")

    lanes.before = lose
    requests = [
        streamed(str(index), llama.prompts[index], GREEDY, salt=bytes([serial]), selection=chosen)
        for index, chosen in ((1, Selection()), (2, WHOLE))
    ]
    notes = Notes(llama, engine)
    llama.check(llama.runner.run(engine, requests))
    assert len(lost) == 1
    assert len(notes.usages["2"]) == NEW - 4
    check_left(engine)
    lanes.close()


def test_rows_of_a_damaged_chunk_give_no_token(llama: Case) -> None:
    """Compare what left the device since the screens were built, once rows of it are read."""
    engine = make_engine(
        llama.model,
        has_activations=True,
        cache_pages=80,
        lanes=SerialLanes(CPU),
        verifier=Verifier(0.0),
    )
    tensors = llama.runner.connection.tensors
    damaged: list[int] = []
    losses: list[int] = []
    llama.runner.after_step = lambda output: losses.extend([1] * output.loss_count)

    def damage() -> None:
        for sequence in engine.queues.running:
            # 79 tokens of the prompt: the fifth chunk is full, and stored, after one more.
            if sequence.selects and len(sequence.stored) == 5 and not damaged:
                assert sequence.reads is not None
                assert sequence.reads.chunks == sequence.stored
                damaged.append(sequence.stored[4].slot)
                for plane in tensors.keys:
                    plane[damaged] += 1

    request = streamed("1", llama.prompts[1], GREEDY, salt=b"damaged", selection=WHOLE)
    llama.runner.admit(engine, request)
    transcript = Transcript()
    while not transcript.finishes:
        transcript.add(llama.runner.step(engine))
        engine.post(Call(damage))
    llama.check(transcript)
    assert damaged
    assert losses == [1]
    step_until_idle(llama.runner, engine, transcript)
    check_left(engine)


def test_an_error_of_the_link_leaves_no_screens_in_part(llama: Case) -> None:
    lanes = ThreadLanes(CPU)
    engine = llama.engine(lanes)
    fetches = 0

    def fail(lane: Lane) -> None:
        nonlocal fetches
        selecting = any(each.selects for each in engine.queues.running)
        fetches += selecting and lane is Lane.LINK_IN
        if fetches == 6:
            raise OSError("the bus is gone")

    lanes.before = fail
    llama.runner.after_step = lambda _: None
    llama.runner.admit(engine, streamed("2", llama.prompts[2], GREEDY, selection=WHOLE))
    transcript = Transcript()
    with pytest.raises(OSError, match="the bus is gone"):
        step_until_idle(llama.runner, engine, transcript)
    lanes.before = None
    (sequence,) = engine.queues.running
    assert sequence.reads is not None
    assert not sequence.reads.is_built
    step_until_idle(llama.runner, engine, transcript)
    llama.check(transcript)
    check_left(engine)
    lanes.close()


def test_rows_of_the_next_layer_are_on_the_link_while_this_one_computes(llama: Case) -> None:
    """Measure by the spans' clock, on a link that is slower than a device that has to wait."""
    lanes = ThreadLanes(CPU, EmulatedLink(1e6))
    engine = llama.engine(lanes)
    engine.trace = Trace()
    few = Sampling(max_tokens=6, ignore_eos=True)
    selection = Selection.parsed("columns:0.3,full_layers=1")
    notes = Notes(llama, engine)
    llama.runner.run(engine, [streamed("2", llama.prompts[2], few, selection=selection)])
    spans = engine.trace.spans
    rows = [span for span in spans if span.name == FETCHING_ROWS and span.tokens]
    last = llama.model.shape.layer_count - 1
    for fetch in rows:
        attended = [
            span.start
            for span in spans
            if span.name == "attend" and span.layer == fetch.layer and span.start >= fetch.end
        ]
        # The layer attends them once they are there.
        assert attended
    before = [span for span in spans if span.name == "finish" and (span.layer or 0) < last]
    overlapping = [
        fetch
        for fetch in rows
        if any(
            each.layer == (fetch.layer or 0) - 1
            and fetch.start < each.end
            and each.start < fetch.end
            for each in before
        )
    ]
    assert len(overlapping) > len(rows) // 2
    usage = notes.sums("2")
    assert sum(span.amount for span in rows) == usage.link_bytes
    # A chunk of the exact layer costs as ever.
    assert engine.last_step is not None
    shape = llama.model.shape
    exact = 8 * CHUNK * shape.kv_bytes_per_token_layer
    assert engine.last_step.link_bytes == exact + notes.usages["2"][-1].link_bytes
    lanes.close()


CHOICES = ("full", "columns:0.999", "window:0.999,full_layers=0", "columns:0.3,int8")


@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_give_exact_text_where_all_is_read_and_leave_nothing(
    llama: Case, seed: int
) -> None:
    """Preempt, give up fronts, and let windows stay on the device, in tiles of any size."""
    rng = random.Random(seed)
    lanes: Lanes = rng.choice([SerialLanes, ThreadLanes])(CPU)
    engine = make_engine(
        llama.model,
        has_activations=True,
        lanes=lanes,
        staging_pages=rng.choice([3, 6, 48]),
        cache_pages=rng.choice([60, 90]),
        max_batched_tokens=rng.choice([16, 64]),
        window_pages=rng.choice([0, 1, 2]),
    )
    engine.tile_pages = min(engine.tile_pages, rng.randrange(1, 5))
    requests = [
        streamed(
            f"{number}-{number % 3}",
            llama.prompts[number % 3],
            GREEDY,
            salt=rng.choice([b"", bytes([seed, number])]),
            split=rng.choice([0, 20, 64]),
            resident_tokens=rng.choice([0, 16, 40]),
            schedule=rng.choice([Schedule.ROW, Schedule.PIPELINED]),
            selection=Selection.parsed(rng.choice(CHOICES)),
        )
        for number in range(6)
    ]

    def disturb() -> None:
        running = [each for each in engine.queues.running if each.stage is Stage.RUNNING]
        if running and rng.random() < 0.5:
            engine.queues.preempt(rng.choice(running))
        elif running:
            engine.page_manager.give_up_kept(rng.choice(running))

    notes = Notes(llama, engine)
    for each in requests:
        llama.runner.admit(engine, each)
    transcript = Transcript()
    while len(transcript.finishes) < len(requests):
        transcript.add(llama.runner.step(engine))
        if rng.random() < 0.2:
            engine.post(Call(disturb))
    step_until_idle(llama.runner, engine, transcript)
    for each in requests:
        tokens, ratio = transcript.tokens[each.request_id], each.selection.ratio
        assert len(tokens) == NEW
        if ratio != 0.3:
            assert tokens == llama.wanted[int(each.request_id[-1])], each.selection
    assert any(notes.usages)
    engine.cache.pages.check_integrity()
    check_left(engine)
    lanes.close()
