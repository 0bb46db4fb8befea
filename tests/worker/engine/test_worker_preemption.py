"""Requests are admitted by what they hold, and leave the device for earlier ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_runner import CPU, Transcript, admission, make_engine, run_all
from long_runs import scaled
from sequence_world import CHUNK as SMALL
from sequence_world import SHAPE, World
from store_runner import StoreRunner, store_runner, streamed
from tiny_models import VOCABULARY, write_tiny

from splitpoint.shapes import ArenaLayout, chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.device.claims import Claim
from worker_service.device.memory import MemoryPlan
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Cancel, SetPaused, StepOutput
from worker_service.engine.pages import PageManager
from worker_service.engine.queues import SequenceQueues
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission, Sequence, Stage
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder

CHUNK = 16
CHAOS = pytest.mark.chaos
HISTORIES = scaled(60, chaos=1000)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Decoder.load(write_tiny("llama", tmp_path_factory.mktemp("m")), CPU, torch.float32)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreRunner]:
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, tmp_path_factory.mktemp("store"), 4000) as opened:
        yield opened


@pytest.mark.scaled
@pytest.mark.parametrize("has_store", [True, False])
def test_random_histories_keep_every_page_and_end(has_store: bool) -> None:
    """Admit, grow, leave, return, cancel, pause, lose chunks, writes and the store, or all."""
    preemptions, selected = 0, Counter[str]()
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        world = World(rng, has_store=has_store)
        try:
            _live_through(world, rng)
        except Exception as error:
            raise AssertionError(f"history {seed}") from error
        preemptions += world.preemptions
        selected += world.selector.log
    print("preemptions", preemptions, selected)
    assert preemptions > HISTORIES
    if has_store:
        assert min(selected[what] for what in ("built", "extended", "dropped")) > HISTORIES / 2


def _live_through(world: World, rng: random.Random) -> None:
    longest = world.cache.plan.page_count * 4
    for number in range(rng.randrange(2, 25)):
        prompt = rng.randrange(1, max(2, longest - 2))
        sampling = Sampling(
            max_tokens=rng.randrange(1, max(2, longest - prompt)), ignore_eos=rng.random() < 0.5
        )
        world.admit(str(number), prompt, sampling)
        for _ in range(rng.randrange(4)):
            world.step(losing=0.02)
        live = world.live()
        if not live:
            continue
        one, luck = rng.choice(live), rng.random()
        if luck < 0.1:
            world.queues.cancel(one.key)
        elif luck < 0.4:
            world.queues.set_paused(one.key, not one.paused)
        elif luck < 0.45:
            world.fail_a_write()
        elif luck < 0.47 and world.has_store:
            world.lose_store()
        elif luck < 0.55:
            world.store_is_up = world.has_store
    if rng.random() < 0.1:
        for sequence in world.live():
            world.queues.cancel(sequence.key)
    for sequence in world.live():
        world.queues.set_paused(sequence.key, False)
    for _ in range(20_000):
        if world.queues.is_empty:
            break
        assert world.step(prompt_store=True) or world.queues.is_empty, "deadlock"
    world.step()  # what was cancelled last
    world.cache.pages.check_integrity()
    assert world.cache.pages.used_count == world.cache.claims.promised_count == 0
    assert world.cache.input_pages.used_count == world.cache.claims.room_used == 0
    for name, each in world.admissions.items():
        finish = world.transcript.finishes[name]
        tokens = world.transcript.tokens.get(name, [])
        if finish.reason == "length":
            assert len(tokens) == each.sampling.max_tokens
        elif finish.reason == "stop":
            assert tokens[-1] == 1


def test_paused_requests_leave_for_one_that_could_run() -> None:
    """Nothing else would free their pages: no request that could run waits for them."""
    world = World(random.Random(5), has_store=True)
    for number in range(world.batch):
        world.admit(str(number), 3, Sampling(max_tokens=4, ignore_eos=True))
    world.step(prompt_store=True)
    for sequence in world.live():
        world.queues.set_paused(sequence.key, True)
    world.admit("late", 3, Sampling(max_tokens=2, ignore_eos=True))
    for _ in range(10):
        world.step(prompt_store=True)
    assert "late" in world.transcript.finishes
    assert len(world.transcript.finishes) == 1


def test_a_restore_waits_for_prefix_pages_that_leave_with_their_only_holder() -> None:
    """What a later sequence shares is missing once that sequence has made room by leaving."""
    layout = ArenaLayout.of(SHAPE, chunk_tokens=SMALL, has_activations=False)
    plan = MemoryPlan(
        budget_bytes=0,
        weight_bytes=0,
        workspace_bytes=0,
        page_bytes=SHAPE.page_bytes(SMALL),
        page_count=11,
        input_page_count=0,
        room_page_count=0,
    )
    cache = DeviceCache(layout, plan, CPU)
    pages = PageManager(cache, shares_prefixes=True)
    queues = SequenceQueues(cache, pages, None, 3)
    sampling = Sampling(max_tokens=1)
    early = Sequence(admission("early", [2] * 20 + [3] * 20, sampling), None)
    late = Sequence(admission("late", [2] * 24, sampling), None)
    for sequence in (early, late):
        queues.add(sequence)
        queues.waiting.remove(sequence)
        sequence.enter(Stage.ADMITTED)
        queues.running.append(sequence)
    assert pages.claim(late)
    pages.take_prefix(late)
    pages.allocate_prefix(late, range(0), 6)
    late.computed = 24
    pages.step_passed(late)
    # The early one was admitted when 8 pages of its prefix were in use; 5 are now.
    assert cache.claims.promise(early.claim, 2, uses_room=False)
    other = Claim()
    assert cache.claims.promise(other, 3, uses_room=False)
    held = [cache.claims.allocate(other) for _ in range(3)]
    assert (pages.spare_count, pages.missing_count(early)) == (0, 3)
    assert not queues.can_restore(early)
    assert queues.waiting == [late]
    for page in held:
        assert page is not None
        cache.claims.free(other, page)
    cache.claims.end(other)
    assert queues.can_restore(early)
    pages.take_prefix(early)
    assert (early.claim.promised, early.claim.held) == (10, 5)


# -- with the real model ------------------------------------------------------------------

OTHERS = (
    Sampling(max_tokens=35, ignore_eos=True),
    Sampling(max_tokens=30, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True),
    Sampling(max_tokens=25, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
    Sampling(max_tokens=40, temperature=0.7, seed=1, frequency_penalty=0.4, ignore_eos=True),
)


def requests_of(
    count: int, *, salt: bytes = b"", streams: bool = False, longer: int = 0
) -> list[Admission]:
    made = []
    for index in range(count):
        prompt, sampling = prompt_of(10 + 11 * index % 60, index), OTHERS[index % len(OTHERS)]
        sampling = replace(sampling, max_tokens=sampling.max_tokens + longer)
        if streams and index % 3 == 2:
            made.append(
                streamed(str(index), prompt, sampling, salt=salt, resident_tokens=CHUNK * index)
            )
        else:
            made.append(admission(str(index), prompt, sampling))
    return made


@pytest.mark.parametrize("has_store", [True, False])
def test_texts_are_those_of_undisturbed_requests(
    model: Decoder, runner: StoreRunner, has_store: bool
) -> None:
    """Sampled, penalised, with log-probabilities, streamed: in a sixth of their memory."""
    requests = requests_of(12, streams=has_store, longer=50)
    roomy = make_engine(model, has_activations=has_store, lanes=SerialLanes(CPU))
    sizes = [chunks_of(each.final_tokens, CHUNK) for each in requests]
    assert sum(sizes) <= roomy.memory_plan.device_page_count, "one of them may have to leave"
    runner.after_step = lambda _: None
    wanted = (runner.run(roomy, requests) if has_store else run_all(roomy, requests)).tokens
    longest = max(sizes)
    engine = make_engine(
        model,
        has_activations=has_store,
        cache_pages=2 * longest,
        has_store=has_store,
        lanes=SerialLanes(CPU),
    )
    counts = {"preemptions": 0, "losses": 0}

    def note(output: StepOutput) -> None:
        counts["preemptions"] += output.preemption_count
        counts["losses"] += output.loss_count

    transcript = Transcript()
    runner.after_step = note
    for each in requests:
        if has_store:
            runner.admit(engine, each)
        else:
            engine.admit(each)
    while not (transcript.tokens and engine.is_idle):
        output = runner.step(engine) if has_store else engine.step()
        if not has_store:
            note(output)
        transcript.add(output)
    assert transcript.tokens == wanted
    print(counts)
    assert counts["preemptions"] > 1
    assert counts["losses"] == 0
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0


@pytest.mark.parametrize(
    "histories", [range(4), pytest.param(range(4, 300), marks=[CHAOS, pytest.mark.timeout(900)])]
)
def test_random_histories_with_the_real_model_keep_their_texts(
    model: Decoder, runner: StoreRunner, histories: range
) -> None:
    """Pause and cancel requests, in memory of several sizes."""
    roomy = make_engine(model, has_activations=True, lanes=SerialLanes(CPU))
    runner.after_step = lambda _: None
    wanted = runner.run(roomy, requests_of(9)).tokens
    preemptions = 0
    for history in histories:
        rng = random.Random(history)
        requests = requests_of(9, salt=b"%d" % (history % 3), streams=True)
        longest = max(chunks_of(each.final_tokens, CHUNK) for each in requests)
        engine = make_engine(
            model,
            has_activations=True,
            cache_pages=rng.randrange(longest, 3 * longest),
            lanes=SerialLanes(CPU),
        )
        transcript, cancelled = _run_disturbed(runner, engine, requests, rng)
        preemptions += transcript[1]
        for name, tokens in transcript[0].tokens.items():
            expected = wanted[name][: len(tokens)] if name in cancelled else wanted[name]
            assert tokens == expected, (history, name)
        assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
    assert preemptions > len(histories)


def _run_disturbed(
    runner: StoreRunner, engine: Engine, requests: list[Admission], rng: random.Random
) -> tuple[tuple[Transcript, int], set[str]]:
    """Return the transcript, the number of preemptions, and who was cancelled."""
    cancelled: set[str] = set()
    paused: set[str] = set()
    transcript, preemptions = Transcript(), 0
    for each in requests:
        runner.admit(engine, each)
    for number in range(5000):
        output = runner.step(engine)
        transcript.add(output)
        preemptions += output.preemption_count
        if engine.is_idle:
            return (transcript, preemptions), cancelled
        name = rng.choice(requests).request_id
        luck = rng.random()
        if luck < 0.01:
            cancelled.add(name)
            engine.post(Cancel((name, 0, 0)))
        elif luck < 0.1 and number < 100:
            engine.post(SetPaused((name, 0, 0), True))
            paused.add(name)
        elif luck < 0.3 or number >= 100:
            for each_name in paused:
                engine.post(SetPaused((each_name, 0, 0), False))
            paused.clear()
    raise AssertionError("a deadlock")
