"""Restores beside decoding: a step never waits for one, whatever happens to it (15 s)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, Transcript, admission, make_engine, run_all
from store_runner import StoreRunner, store_runner, wait_loaded
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.errors import ChunkLost
from splitpoint.planning.plan import RestoreMethod
from splitpoint.planning.schedule import Lane, TaskKind
from splitpoint.shapes import ArenaLayout
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Call, Cancel, RestoreEvent, SetPaused, Stop
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission, Sequence, Stage
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.model.decoder import Decoder
from worker_service.pipeline.executor import RestoreRun
from worker_service.store.verifier import Verifier

CHUNK = 16
SAMPLING = Sampling(max_tokens=6, ignore_eos=True)
METHODS = [(RestoreMethod.LOAD, 0), (RestoreMethod.LOAD, 80), (RestoreMethod.TOKENS, 0)]


class Case:
    """A prompt whose prefix is in the store, and others that are not."""

    def __init__(self, model: Decoder, runner: StoreRunner, prompts: list[list[int]]) -> None:
        self.model = model
        self.runner = runner
        self.prompts = prompts
        alone = make_engine(model, has_activations=True, lanes=SerialLanes(CPU))
        self.wanted = [
            run_all(alone, [admission("x", prompt, SAMPLING)]).tokens["x"] for prompt in prompts
        ]
        self.runner.run(self.engine(SerialLanes(CPU)), [admission("warm", prompts[0], SAMPLING)])

    def engine(self, lanes: Lanes, verifier: Verifier | None = None) -> Engine:
        return make_engine(self.model, has_activations=True, lanes=lanes, verifier=verifier)

    def restored(self, name: str, method: RestoreMethod, split: int) -> Admission:
        return replace(
            admission(name, self.prompts[0], SAMPLING),
            split_tokens=split,
            method=method,
            recomputed_tokens=48,
        )


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = write_tiny("llama", tmp_path_factory.mktemp("model"))
    reference = build_tiny("llama")
    prompts = [clear_prompt(reference, length, 6)[0] for length in (150, 9, 14)]
    model = Decoder.load(folder, CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, tmp_path_factory.mktemp("arena"), 96) as runner:
        yield Case(model, runner, prompts)


class Gate:
    """Holds the link of restores until it is opened."""

    def __init__(self, lanes: Lanes) -> None:
        self.is_open = threading.Event()
        self.reached = threading.Event()
        lanes.before = self._before

    def _before(self, lane: Lane) -> None:
        if lane is Lane.LINK_IN:
            self.reached.set()
            assert self.is_open.wait(60)


def step(case: Case, engine: Engine, transcript: Transcript) -> None:
    """Step once without waiting, and do what the store does."""
    held = engine.queues.running
    output = engine.step()
    transcript.add(output)
    case.runner.serve(engine, output)
    assert held is engine.queues.running


def to_the_end(case: Case, engine: Engine, transcript: Transcript) -> None:
    for _ in range(2000):
        transcript.add(case.runner.step(engine))
        if engine.is_idle:
            break
    assert engine.is_idle
    assert engine.cache.pages.used_count == 0
    assert engine.cache.input_pages.used_count == 0


@pytest.mark.parametrize(("method", "split"), METHODS)
def test_decoding_goes_on_while_a_restore_hangs(
    case: Case, method: RestoreMethod, split: int
) -> None:
    lanes = ThreadLanes(CPU)
    gate, engine, transcript = Gate(lanes), case.engine(lanes), Transcript()
    case.runner.admit(engine, case.restored("back", method, split))
    engine.admit(admission("other", case.prompts[1], SAMPLING))  # has no prefix to wait for
    for _ in range(40):
        step(case, engine, transcript)
        if "other" in transcript.finishes:
            break
    assert gate.reached.wait(30)
    assert transcript.tokens["other"] == case.wanted[1]
    assert "back" not in transcript.tokens
    gate.is_open.set()
    to_the_end(case, engine, transcript)
    assert transcript.tokens["back"] == case.wanted[0]
    lanes.close()


@pytest.mark.parametrize("event", ["cancel", "loss", "stop"])
@pytest.mark.parametrize(("method", "split"), METHODS)
def test_what_ends_a_restore_midway_leaves_its_pages_to_the_lane(
    case: Case, method: RestoreMethod, split: int, event: str
) -> None:
    lanes = ThreadLanes(CPU)
    gate, engine, transcript = Gate(lanes), case.engine(lanes), Transcript()
    case.runner.admit(engine, case.restored("back", method, split))
    step(case, engine, transcript)
    assert gate.reached.wait(30)
    sequence = engine.queues.running[0]
    pages = [page for page in sequence.pages if page is not None]
    assert pages
    if event == "stop":
        threading.Timer(0.05, gate.is_open.set).start()
        engine.post(Stop())
        engine.run(transcript.add)
        assert sequence.restoring is not None
        assert sequence.restoring.run.group.is_quiet
        case.runner.chains.clear()
        return
    if event == "cancel":
        engine.post(Cancel(sequence.key))
    else:
        assert sequence.match is not None
        case.runner.lose(sequence.match.chunks[-2])
        if method is RestoreMethod.LOAD:
            gate.is_open.set()
    step(case, engine, transcript)
    if event == "cancel":
        # The lane still writes into them.
        assert set(pages) <= {page for page in sequence.pages if page is not None}
        assert engine.cache.pages.used_count >= len(pages)
        gate.is_open.set()
    gate.is_open.set()
    to_the_end(case, engine, transcript)
    if event == "cancel":
        assert transcript.finishes["back"].reason == "cancelled"
    else:
        assert transcript.tokens["back"] == case.wanted[0]
    lanes.close()
    case.runner.run(case.engine(SerialLanes(CPU)), [admission("warm", case.prompts[0], SAMPLING)])


@pytest.mark.parametrize(("method", "split"), METHODS)
def test_a_paused_request_is_restored_and_then_waits(
    case: Case, method: RestoreMethod, split: int
) -> None:
    lanes, transcript = ThreadLanes(CPU), Transcript()
    gate, engine = Gate(lanes), case.engine(lanes)
    case.runner.admit(engine, case.restored("back", method, split))
    step(case, engine, transcript)
    [sequence] = engine.queues.running
    engine.post(SetPaused(("back", 0, 0), True))
    gate.is_open.set()
    until_restored(case, engine, transcript, sequence)
    for _ in range(5):
        step(case, engine, transcript)
    assert transcript.tokens == {}
    # Others may have its pages now.
    assert engine.queues._last_to_leave(engine.queues.running) is sequence
    engine.post(SetPaused(("back", 0, 0), False))
    to_the_end(case, engine, transcript)
    assert transcript.tokens["back"] == case.wanted[0]
    lanes.close()


def until_restored(case: Case, engine: Engine, transcript: Transcript, sequence: Sequence) -> None:
    """Step until a restore is over; its pieces wake the engine."""
    while sequence.stage is not Stage.RUNNING:
        engine.wait(30)
        step(case, engine, transcript)


def test_a_paused_restore_gives_the_staging_memory_to_the_next(case: Case) -> None:
    lanes, transcript = ThreadLanes(CPU), Transcript()
    gate, engine = Gate(lanes), case.engine(lanes)
    for name in ("first", "second"):
        # Each brings everything itself, and rebuilds half of it.
        each = case.restored(name, RestoreMethod.LOAD, 80)
        case.runner.admit(engine, replace(each, restores_all=True))
    step(case, engine, transcript)
    runs = {s.key[0]: s.restoring.run for s in engine.queues.running if s.restoring is not None}
    holders = [name for name, run in runs.items() if run is engine.restorer._slot_holder]
    assert len(holders) == 1
    engine.post(SetPaused((holders[0], 0, 0), True))
    step(case, engine, transcript)
    gate.is_open.set()
    other = next(name for name in runs if name not in holders)
    for _ in range(2000):
        transcript.add(case.runner.step(engine))
        if other in transcript.finishes:
            break
    assert transcript.tokens == {other: case.wanted[0]}
    engine.post(SetPaused((holders[0], 0, 0), False))
    to_the_end(case, engine, transcript)
    assert transcript.tokens[holders[0]] == case.wanted[0]
    lanes.close()


def test_one_without_staging_memory_loads_past_the_x_that_waits_for_it(case: Case) -> None:
    lanes, transcript = ThreadLanes(CPU), Transcript()
    gate, engine = Gate(lanes), case.engine(lanes)
    each = case.restored("back", RestoreMethod.LOAD, 80)
    case.runner.admit(engine, each)
    step(case, engine, transcript)
    assert gate.reached.wait(30)
    [sequence] = engine.queues.running
    assert sequence.restoring is not None
    run = sequence.restoring.run
    assert isinstance(run, RestoreRun)
    # As while another restore has it: everything is loaded but what is sent to be rebuilt.
    run._has_slots = False
    gate.is_open.set()
    tasks = run._tasks
    loads = {index for index, task in enumerate(tasks) if task.kind is TaskKind.LOAD}
    with run.group.changed:
        assert run.group.changed.wait_for(lambda: loads <= run._done, 30)
        sent = [tasks[index] for index in run._done if tasks[index].kind is TaskKind.SEND]
        assert len(sent) <= 1, "the one that was under way"
    run.lend_slots()
    to_the_end(case, engine, transcript)
    assert transcript.tokens["back"] == case.wanted[0]
    lanes.close()


def test_one_that_has_just_been_told_to_start_over_is_not_settled(case: Case) -> None:
    """A loss that is reported makes others start over, before theirs are looked at."""
    lanes, transcript = ThreadLanes(CPU), Transcript()
    gate, engine = Gate(lanes), case.engine(lanes)
    for name in ("first", "second"):
        each = case.restored(name, RestoreMethod.LOAD, 0)
        case.runner.admit(engine, replace(each, restores_all=True))
    step(case, engine, transcript)
    gate.is_open.set()
    first, second = engine.queues.running
    for sequence in (first, second):
        wait_loaded(sequence)
    results = engine.restorer.settle(engine.queues.running)
    assert next(results)[0] is first
    assert second.match is not None
    engine.queues.restart_after_loss(second, ChunkLost("a chunk is lost"))
    assert list(results) == []
    assert second.stage is not Stage.RUNNING
    to_the_end(case, engine, transcript)
    assert transcript.tokens == {"first": case.wanted[0], "second": case.wanted[0]}
    lanes.close()


def test_the_device_may_hold_more_than_the_store_whatever_the_method(tmp_path: Path) -> None:
    """Without activations the rows of another chunk are copied: no front is left to compute."""
    model = Decoder.load(write_tiny("llama", tmp_path), CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=False)
    common = [(7 * place) % 90 + 5 for place in range(86)]
    prompts = {name: [*common, *[10 * (index + 1)] * 30] for index, name in enumerate("ab")}
    alone = make_engine(model, lanes=SerialLanes(CPU), shares_prefixes=False)
    wanted = run_all(alone, [admission("b", prompts["b"], SAMPLING)]).tokens["b"]
    with store_runner(layout, tmp_path, 96) as runner:
        lanes = ThreadLanes(CPU)
        engine = make_engine(model, lanes=lanes)
        runner.run(engine, [admission("a", prompts["a"], SAMPLING)])
        request = replace(
            admission("b", prompts["b"], SAMPLING),
            method=RestoreMethod.TOKENS,
            recomputed_tokens=48,
        )
        runner.admit(engine, request)
        transcript, restores = Transcript(), list[RestoreEvent]()
        for _ in range(50):
            output = runner.step(engine)
            transcript.add(output)
            restores += output.restores
            if engine.is_idle:
                break
        assert [event.device_tokens for event in restores] == [len(common)]
        assert transcript.tokens["b"] == wanted
        lanes.close()


def test_random_interleavings_give_the_texts_of_requests_alone(case: Case) -> None:
    """Restores of all methods, other requests, pauses and cancels, on delayed lanes."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    verifier = Verifier(1.0, threads=1)
    lanes = ThreadLanes(CPU)
    lanes.before = lambda _: time.sleep(rng.choice([0.0, 0.0, 2e-4]))
    engine = case.engine(lanes, verifier)
    for number in range(12):
        transcript, cancelled = Transcript(), set()
        for index in range(rng.randrange(1, 5)):
            name = f"{number}.{index}"
            if rng.random() < 0.6:
                method, split = rng.choice(METHODS)
                each = replace(
                    case.restored(name, method, split),
                    restores_all=rng.random() < 0.7,
                    tile_tokens=rng.choice([0, 16, 64]),
                )
                case.runner.admit(engine, each)
            else:
                which = rng.randrange(len(case.prompts))
                case.runner.admit(engine, admission(name, case.prompts[which], SAMPLING))
        names = [sequence.key for sequence in engine.queues.waiting]
        for _ in range(rng.randrange(6)):
            step(case, engine, transcript)
            names = [sequence.key for sequence in engine.queues.running] or names
            if names and rng.random() < 0.3:
                key = rng.choice(names)
                cancelled.add(key[0])
                engine.post(Cancel(key))
        to_the_end(case, engine, transcript)
        for name, tokens in transcript.tokens.items():
            if name not in cancelled:
                assert tokens in case.wanted, name
    assert verifier.intact_count
    lanes.close()
    verifier.close()


def test_calls_run_between_steps_while_a_restore_hangs(case: Case) -> None:
    lanes = ThreadLanes(CPU)
    gate, engine = Gate(lanes), case.engine(lanes)
    called, outputs = threading.Event(), Transcript()
    case.runner.admit(engine, case.restored("back", RestoreMethod.LOAD, 0))
    thread = threading.Thread(target=engine.run, args=(outputs.add,))
    thread.start()
    assert gate.reached.wait(30)
    engine.post(Call(called.set))
    assert called.wait(30), "the engine waits for the restore"
    engine.post(Stop())
    gate.is_open.set()
    thread.join()
    case.runner.chains.clear()
