"""Test requests whose pool is bounded: what they hold, leave and go on with, in real arenas."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_runner import CPU, Transcript, admission
from store_runner import store_runner, streamed
from test_worker_selected import Notes, always_on, check_left, lanes
from test_worker_streamed import CHUNK, GREEDY, Case, make_case

from kvstore_service.integrity.checker import IntegrityChecker
from splitpoint.errors import FailedPrecondition
from splitpoint.selection import PoolPolicy, Selection
from splitpoint.shapes import ArenaLayout
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Call, StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Sequence
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.store.write_back import WriteFailed

__all__ = ["always_on", "lanes"]

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = Sampling(max_tokens=3 * CHUNK, ignore_eos=True)
SOAK_SECONDS = 600


def pooled(fraction: float, policy: PoolPolicy = PoolPolicy.COUNTER) -> Selection:
    text = f"columns:0.3,full_layers=0,sinks=2,recent=4,pool={fraction},policy={policy}"
    return Selection.parsed(text)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from make_case("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def slow_pools(llama: Case) -> Iterator[Callable[[int], None]]:
    """Let the store do what pools want some steps later."""
    yield partial(setattr, llama.runner, "pool_steps")
    llama.runner.pool_steps = 0


def held_slots(case: Case) -> int:
    """Return the slots that the store cannot give to others."""
    pool = case.runner.store.pool
    return pool.slot_count - pool.free_count - pool.reclaimable_count()


class Held:
    """Slots that the store cannot give to others, after each step."""

    def __init__(self, case: Case, engine: Engine) -> None:
        self.counts: list[int] = []
        self.notes = Notes(case, engine)
        note = case.runner.after_step

        def after(output: StepOutput) -> None:
            note(output)
            self.counts.append(held_slots(case))

        case.runner.after_step = after


def private_slots(case: Case, transcript: Transcript, name: str) -> int:
    """Return the slots that one request alone would hold at its end, if it read everything."""
    tokens = len(case.prompts[int(name) % 3]) + len(transcript.tokens[name])
    return (tokens - 1) // CHUNK


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.4])
def test_a_pool_bounds_and_frees_host_memory(llama: Case, fraction: float) -> None:
    """Without the prompt's chunks, which the store may evict, beside one that has no limit."""
    engine = llama.engine(SerialLanes(CPU))
    held = Held(llama, engine)
    salt = bytes([int(10 * fraction)])
    request = streamed("2", llama.prompts[2], LONG, salt=salt, selection=pooled(fraction))
    transcript = llama.runner.run(engine, [request])
    assert transcript.finishes["2"].error is None
    usage = held.notes.sums("2")
    whole = private_slots(llama, transcript, "2")
    last = int(fraction * whole + 1e-6)
    # The prompt's eight chunks were stored, and then moved; one more is on its way at times.
    decoding = [each for each in held.counts[held.counts.index(max(held.counts)) + 1 :] if each]
    assert decoding == sorted(decoding)
    assert decoding[0] == int(fraction * 8 + 1e-6)
    assert decoding[-1] == last
    assert usage.pool_bytes == last * llama.runner.layout.chunk_bytes
    assert usage.evicted_token_count == (whole - last) * CHUNK
    assert held_slots(llama) == 0
    check_left(engine)
    # Nothing that it computed by its pool is a prefix, nor is what it did not keep gone.
    store, tokens = llama.runner.store, [*llama.prompts[2], *transcript.tokens["2"]]
    assert store.peek(salt, tokens).cached_tokens == len(llama.prompts[2]) // CHUNK * CHUNK


def test_exact_requests_beside_pools_are_those_of_full_attention(llama: Case, lanes: Lanes) -> None:
    """With the prompts of the pools, whose chunks are shared, and with others."""
    engine = llama.engine(lanes)
    notes = Notes(llama, engine)
    # Their own chunks alone are limited, which are those of the answers.
    longer = Sampling(max_tokens=5 * CHUNK, ignore_eos=True)
    pools = [
        streamed(f"pool-{policy}", llama.prompts[2], longer, selection=pooled(0.4, policy))
        for policy in PoolPolicy
    ]
    exact = [
        streamed(str(index), prompt, GREEDY, salt=salt)
        for index, (prompt, salt) in enumerate(
            (prompt, salt) for salt in (b"", b"other") for prompt in llama.prompts
        )
    ]
    requests = [*pools, *exact, admission("6", llama.prompts[0], GREEDY)]
    transcript = llama.runner.run(engine, requests)
    for name in map(str, range(7)):
        assert transcript.tokens[name] == llama.wanted[int(name) % 3], name
    for each in pools:
        assert transcript.finishes[each.request_id].error is None
        assert notes.sums(each.request_id).evicted_token_count > 0
    assert held_slots(llama) == 0
    check_left(engine)


def test_chunks_that_others_use_stay_where_they_are(llama: Case) -> None:
    engine = llama.engine(SerialLanes(CPU))
    seen: list[tuple[int, int, bool]] = []

    def note(_: StepOutput) -> None:
        for each in engine.queues.running:
            if each.has_pool and each.reads is not None and each.reads.pool is not None:
                sealed = [chunk.is_sealed for chunk in each.reads.chunks]
                shared = each.reads.pool.shared_chunks
                kept = each.cached_chunks == tuple(each.reads.chunks[:shared])
                seen.append((shared, sum(sealed), kept))

    llama.runner.after_step = note
    prompt, salt = llama.prompts[2], b"shared"
    llama.runner.run(engine, [streamed("2", prompt, GREEDY, salt=salt)])
    requests = [
        streamed("whole", [*prompt[:88], 7, 8, 9], LONG, salt=salt),
        streamed("pool", prompt, LONG, salt=salt, selection=pooled(0.4)),
    ]
    transcript = llama.runner.run(engine, requests)
    assert transcript.finishes["pool"].error is None
    # 88 of its 128 tokens are those of the other, which has leased the last chunk, too.
    assert set(seen) == {(6, 6, True)}
    assert held_slots(llama) == 0
    check_left(engine)


def run_with(
    case: Case, engine: Engine, interrupt: Callable[[Sequence], None], salt: bytes
) -> tuple[Transcript, Notes]:
    """Run a request with a pool, and interrupt it once while the pool is bound."""
    notes = Notes(case, engine)
    request = streamed("2", case.prompts[2], LONG, salt=salt, selection=pooled(0.4))
    case.runner.admit(engine, request)
    transcript, done = Transcript(), False
    while not engine.is_idle or not transcript.finishes:
        transcript.add(case.runner.step(engine))
        running = engine.queues.running
        if (
            not done
            and running
            and running[0].has_pool
            and len(transcript.tokens.get("2", [])) > 20
        ):
            done = True
            engine.post(Call(lambda: interrupt(engine.queues.running[0])))
    assert done
    assert held_slots(case) == 0
    check_left(engine)
    return transcript, notes


def preempt(engine: Engine, sequence: Sequence) -> None:
    assert not engine.page_manager.give_up_kept(sequence)
    engine.queues.preempt(sequence)


def drop(engine: Engine, sequence: Sequence) -> None:
    assert sequence.reads is not None
    sequence.reads.drop()


def lose_store(engine: Engine, sequence: Sequence) -> None:
    lost = FailedPrecondition("the KV store session changed", reason="STORE_LOST")
    engine.post(WriteFailed(sequence.key, lost))


@pytest.mark.parametrize("how", [preempt, drop, lose_store])
def test_a_pool_that_is_lost_is_computed_anew(
    llama: Case, how: Callable[[Engine, Sequence], None]
) -> None:
    """All tokens so far are computed exactly, and the next ones from all of them, until evicted."""
    engine = llama.engine(SerialLanes(CPU))
    transcript, notes = run_with(
        llama, engine, lambda each: how(engine, each), how.__name__.encode()
    )
    assert transcript.finishes["2"].error is None
    assert len(transcript.tokens["2"]) == LONG.max_tokens
    whole = private_slots(llama, transcript, "2")
    # It evicted as much as without the interruption, and before it.
    assert notes.sums("2").evicted_token_count > (whole - int(0.4 * whole)) * CHUNK


def test_a_slot_that_was_taken_away_costs_a_new_start(llama: Case) -> None:
    """As when the store restarts: the slots of its pool are no longer granted."""
    engine = llama.engine(SerialLanes(CPU))
    losses: list[int] = []

    def take_away(sequence: Sequence) -> None:
        assert sequence.reads is not None
        chunk = sequence.reads.chunks[-1]
        assert not chunk.is_sealed
        session = llama.runner.connection.session_id
        llama.runner.store.sessions.release(session, [], [(chunk.slot, chunk.generation)])
        llama.runner.chains[sequence.key].pool_slots.remove((chunk.slot, chunk.generation))
        note = llama.runner.after_step

        def after(output: StepOutput) -> None:
            note(output)
            losses.append(output.loss_count)

        llama.runner.after_step = after

    transcript, _ = run_with(llama, engine, take_away, b"taken")
    assert transcript.finishes["2"].error is None
    assert sum(losses) == 1


@pytest.mark.parametrize("steps", [0, 3 * CHUNK])
def test_a_store_without_room_for_a_pool_keeps_the_chunks(
    llama: Case, steps: int, tmp_path: Path
) -> None:
    """Of 12 slots it takes 8 for its prompt: what stays of them would want 6 more."""
    layout = ArenaLayout.of(llama.model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, tmp_path, 12) as runner:
        case = Case(llama.model, runner, llama.prompts, llama.wanted)
        runner.pool_steps = steps
        engine = case.engine(SerialLanes(CPU), room_pages=1)
        notes = Notes(case, engine)
        request = streamed("2", case.prompts[2], LONG, selection=pooled(0.8))
        transcript = case.runner.run(engine, [request])
        assert transcript.finishes["2"].error is None
        usage = notes.sums("2")
        assert (usage.evicted_token_count, usage.pool_bytes) == (0, 0)
        assert usage.step_count > 2 * CHUNK
        check_left(engine)


@pytest.mark.parametrize("steps", [0, 3 * CHUNK])
def test_a_store_without_a_slot_more_has_the_pool_written_over(
    llama: Case, steps: int, slow_pools: Callable[[int], None]
) -> None:
    """A full store stops its growth, and nothing else: not a request that waits for a page."""
    slow_pools(steps)
    engine = llama.engine(SerialLanes(CPU), room_pages=1)
    notes, pool = Notes(llama, engine), llama.runner.store.pool
    note, session = llama.runner.after_step, llama.runner.connection.session_id
    taken: list[tuple[int, int]] = []

    def take(output: StepOutput) -> None:
        note(output)
        count = pool.free_count + pool.reclaimable_count()
        if count and any(each.has_pool for each in engine.queues.running):
            for run in llama.runner.store.reserve(session, count):
                taken.extend((run.first_slot + at, each) for at, each in enumerate(run.generations))

    llama.runner.after_step = take
    request = streamed("2", llama.prompts[2], LONG, salt=bytes([steps]), selection=pooled(0.6))
    transcript = llama.runner.run(engine, [request])
    llama.runner.store.sessions.release(session, [], taken)
    llama.runner.after_step = note
    llama.warm()
    assert transcript.finishes["2"].error is None
    assert len(transcript.tokens["2"]) == LONG.max_tokens
    usage = notes.sums("2")
    slots = usage.pool_bytes // llama.runner.layout.chunk_bytes
    # If late, it asks for one more right behind the release of those that it had.
    assert slots == int(0.6 * 8) + (1 if steps else 0)
    whole = private_slots(llama, transcript, "2")
    # Its last chunks may still be on their way.
    late = 3 if steps else 0
    assert whole - late <= slots + usage.evicted_token_count // CHUNK <= whole
    assert held_slots(llama) == 0
    check_left(engine)


@pytest.mark.parametrize("steps", [1, 3 * CHUNK])
@pytest.mark.parametrize("rule", ["0.1", "alpha=3,cap=0.1"])
def test_a_request_goes_on_while_its_pool_is_on_its_way(
    llama: Case, steps: int, rule: str, slow_pools: Callable[[int], None]
) -> None:
    """Chunks pile up on the device meanwhile, until it has no page to go on with."""
    slow_pools(steps)
    engine = llama.engine(SerialLanes(CPU), room_pages=1)
    notes = Notes(llama, engine)
    selection = Selection.parsed(f"columns:{rule},full_layers=0,sinks=2,recent=4,pool=0.4")
    salt = f"{steps} {rule}".encode()
    request = streamed("2", llama.prompts[2], LONG, salt=salt, selection=selection)
    transcript = llama.runner.run(engine, [request])
    assert transcript.finishes["2"].error is None
    assert len(transcript.tokens["2"]) == LONG.max_tokens
    whole = private_slots(llama, transcript, "2")
    usage = notes.sums("2")
    # Its last chunks may still be on their way.
    late = 1 if steps == 1 else 3
    assert whole - late <= usage.evicted_token_count // CHUNK + int(0.4 * whole) <= whole
    assert held_slots(llama) == 0
    check_left(engine)


@pytest.mark.chaos
@pytest.mark.timeout(2 * SOAK_SECONDS)
def test_soak(llama: Case, lanes: Lanes) -> None:
    """Ten minutes of pools beside exact requests, some interrupted: no slot stays, texts do."""
    rng = random.Random(32)
    engine = llama.engine(lanes)
    interrupts = (preempt, drop, lose_store)
    ended, deadline, rounds = 0, time.monotonic() + SOAK_SECONDS, 0
    used: list[int] = []
    while time.monotonic() < deadline:
        rounds += 1
        for name in map(str, range(12)):
            index, salt = int(name) % 3, rng.choice([b"", b"a", bytes([rounds % 256])])
            if rng.random() < 0.5:
                selection = pooled(rng.choice([0.8, 0.6, 0.4]), rng.choice([*PoolPolicy]))
                name, sampling = f"pool-{name}", Sampling(rng.randrange(20, 90), ignore_eos=True)
            else:
                selection, sampling = Selection(), GREEDY
            request = streamed(name, llama.prompts[index], sampling, salt=salt, selection=selection)
            llama.runner.admit(engine, request)
        transcript = Transcript()
        while not engine.is_idle or len(transcript.finishes) < 12:
            transcript.add(llama.runner.step(engine))
            bound = [each for each in engine.queues.running if each.has_pool]
            if bound and rng.random() < 0.01:
                rng.choice(interrupts)(engine, rng.choice(bound))
        for name, tokens in transcript.tokens.items():
            assert transcript.finishes[name].error is None
            if not name.startswith("pool"):
                assert tokens == llama.wanted[int(name) % 3]
            ended += 1
        assert ended == 12 * rounds
        assert held_slots(llama) == 0
        store = llama.runner.store
        assert IntegrityChecker(store.pool, store.sessions).check_integrity() == []
        check_left(engine)
        used.append(_resident_bytes())
    # Reported only: the process grew alike in the same rounds without pools.
    print(f"{rounds} rounds, {ended} requests, {used[0] >> 20} MiB, {used[-1] >> 20} MiB at last")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
