"""Restores from both ends: every row is as stored, whichever side is faster."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from local_stack import StackShape, serving_worker, start_store, stop_process
from long_runs import scaled
from stored_prefix import CPU, StoredPrefix, stored_prefix, tiny_prefix, token_ids
from stream_double import StreamDouble
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.errors import ChunkLost
from splitpoint.planning.bidirectional import LEAST_BLOCK_TOKENS
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import chunks_of
from splitpoint.transport.channels import open_channel
from splitpoint.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work
from worker_service.pipeline.executor import RestoreRun
from worker_service.pipeline.task_work import Prefix, Target
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.pipeline.two_ends import TwoEnds

CHUNK = 16
TOKENS = 470  # the last chunk is partial
PAGES = 32
BLOCK = 128
# Plain and grouped heads, of another width and in another number of layers: nothing is computed
# here but rows that are as stored, so no more of a family matters.
CASES = ("opt", "llama-3", "gemma3")


@pytest.fixture(scope="module", params=CASES)
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoredPrefix]:
    yield from tiny_prefix(request.param, tmp_path_factory, TOKENS)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredPrefix]:
    """A grouped-query model's prefix, for what does not depend on the family."""
    yield from tiny_prefix("llama-3", tmp_path_factory, TOKENS)


class PacedLanes(ThreadLanes):
    """Lanes on a clock of the test's own, where a token takes what the test says.

    A lane goes on only when the other one has come as far on that clock, so
    the order of requests for pieces is certain, however busy the machine is.

    Attributes:
        seconds: when the last piece ended.
    """

    def __init__(self, *, compute: float, link: float, layers: int) -> None:
        super().__init__(CPU)
        self.seconds = 0.0
        # A piece on the link is one layer of its tokens.
        self._token_seconds = {Lane.COMPUTE: compute, Lane.LINK_IN: link / layers}
        self._busy_until = {Lane.COMPUTE: 0.0, Lane.LINK_IN: 0.0}
        self._changed = threading.Condition()

    def _draw(self) -> tuple[Group, Piece] | None:
        drawn = super()._draw()
        if drawn is None:
            self.leave(Lane.LINK_IN)
        return drawn

    def _carry_out(self, lane: Lane, work: Work, ready: float) -> Span:
        self._begin(lane, work)
        span = super()._carry_out(lane, work, ready)
        self._end(lane)
        return span

    def leave(self, lane: Lane) -> None:
        """The lane has no more work: the other one need not wait for it."""
        with self._changed:
            self._busy_until[lane] = float("inf")
            self._changed.notify_all()

    def _begin(self, lane: Lane, work: Work) -> None:
        with self._changed:
            self._busy_until[lane] += work.tokens * self._token_seconds[lane]
            self.seconds = max(self.seconds, self._busy_until[lane])
            self._changed.notify_all()

    def _end(self, lane: Lane) -> None:
        """Until the clock says that the lane's piece has ended; compute is first in a tie."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: lane is min(self._busy_until, key=lambda each: self._busy_until[each]),
                timeout=30,
            )


@dataclass(frozen=True)
class Met:
    """How a restore from both ends went: [0, recomputed_tokens) was computed."""

    recomputed_tokens: int
    spans: list[Span]


def both_ends(
    transfer: CacheTransfer,
    lanes: Lanes,
    prefix: Prefix,
    target: Target,
    *,
    block: int,
    expected: int,
) -> tuple[RestoreRun, TwoEnds]:
    ends = TwoEnds.over_link(
        first_chunk=prefix.first_chunk,
        cached_tokens=prefix.cached_tokens,
        chunk_tokens=CHUNK,
        block_tokens=block,
        expected_tokens=expected,
        in_turn=not lanes.overlapping,
    )
    return RestoreRun(transfer, lanes, prefix, target, tile_tokens=block, ends=ends), ends


def restore_alone(
    lanes: Lanes, run: RestoreRun, ends: TwoEnds, front: Callable[[int, int], Work]
) -> list[Span]:
    """Carry a restore out; `front(first, last)` computes tokens."""
    computed = 0
    run.begin()
    try:
        while count := ends.front_tokens(computed):
            ended: list[None] = []
            piece = Piece(front(computed, computed + count), lambda e=ended: e.append(None))  # type: ignore[misc]
            lanes.run_piece(Lane.COMPUTE, run.group, piece)
            with run.group.changed:
                run.group.changed.wait_for(lambda e=ended: e or run.group.error)  # type: ignore[misc]
            if run.group.error is not None:
                break
            computed += count
            # As the restorer treats any restore: this one has no products, and waits for no slot.
            run.contend(not run.is_contended)
            assert run.compute() is None
        if isinstance(lanes, PacedLanes):
            lanes.leave(Lane.COMPUTE)
        with run.group.changed:
            run.group.changed.wait_for(lambda: run.is_done or run.group.error)
    finally:
        run.close()
        run.group.wait_quiet()
    if run.group.error is not None:
        raise run.group.error
    assert ends.has_met(computed)
    assert ends.recomputed_tokens == computed
    return run.group.take_spans()


@torch.inference_mode()
def restore_and_compare(
    stored: StoredPrefix,
    lanes: Lanes,
    *,
    expected: int,
    cached: int = TOKENS,
    pages: list[int] | None = None,
    block: int = BLOCK,
) -> Met:
    chunks = stored.chunks[: chunks_of(cached, CHUNK)]
    pages = pages or [(5 * index) % PAGES for index in range(len(chunks))]
    keys, values = stored.empty_cache(PAGES)
    transfer = stored.transfer()
    run, ends = both_ends(
        transfer,
        lanes,
        Prefix(chunks, 0, pages, stored.token_ids, cached, 0),
        Target(keys, values),
        block=block,
        expected=expected,
    )

    def front(first: int, last: int) -> Work:
        """Write what a prefill would compute."""

        def call() -> None:
            positions = torch.arange(first, last)
            at = torch.tensor(pages)[positions // CHUNK], slice(None), positions % CHUNK
            for layer, computed in enumerate(stored.computed.keys):
                keys[layer][at] = computed[first:last]
                values[layer][at] = stored.computed.values[layer][first:last]

        return Work("prefill", call, tokens=last - first)

    spans = restore_alone(lanes, run, ends, front)
    stored.tensors.check_current(chunks[ends.first_loaded_chunk :])
    met = Met(ends.recomputed_tokens, spans)
    spare = [page for page in range(PAGES) if page not in pages]
    met_at = met.recomputed_tokens
    for layer in range(stored.layout.layer_count):
        for planes, wanted in (
            (keys[layer], stored.computed.keys[layer]),
            (values[layer], stored.computed.values[layer]),
        ):
            found = stored.rows(planes, pages, cached)
            torch.testing.assert_close(found, wanted[:cached], rtol=1e-4, atol=1e-4)
            assert torch.equal(found[met_at:], wanted[met_at:cached]), "not what was stored"
            assert (planes[spare] == 1e4).all(), "a foreign page was written"
    check_spans(stored, met, cached)
    return met


def check_spans(stored: StoredPrefix, met: Met, cached: int) -> None:
    """Each token was computed or loaded, none both, and the bytes are those of whole chunks."""
    computed = [span for span in met.spans if span.lane is Lane.COMPUTE]
    loaded = [span for span in met.spans if span.lane is Lane.LINK_IN]
    layers = stored.layout.layer_count
    assert sum(span.tokens for span in computed) == met.recomputed_tokens
    assert sum(span.tokens for span in loaded) == layers * (cached - met.recomputed_tokens)
    assert met.recomputed_tokens in (cached, met.recomputed_tokens // CHUNK * CHUNK)
    chunks = chunks_of(cached, CHUNK) - chunks_of(met.recomputed_tokens, CHUNK)
    assert sum(s.amount for s in loaded) == 2 * chunks * layers * stored.layout.kv_slot_bytes


def test_a_restore_whose_front_nobody_computes_is_refused(one: StoredPrefix) -> None:
    """It would wait for ever."""
    lanes = SerialLanes(CPU)
    keys, values = one.empty_cache(PAGES)
    prefix = Prefix(one.chunks, 0, list(range(len(one.chunks))), one.token_ids, TOKENS, 0)
    run, _ = both_ends(
        one.transfer(), lanes, prefix, Target(keys, values), block=BLOCK, expected=TOKENS // 2
    )
    with pytest.raises(ValueError, match="owner that computes the front"):
        run.finish()


# -- every relation of speeds ----------------------------------------------------------


@pytest.mark.parametrize("compute", [1e-4, 0.3, 1.0, 3.0, 1e4])
def test_they_meet_where_both_are_done_at_once(stored: StoredPrefix, compute: float) -> None:
    """A token takes 1 on the link; expected is what is right, nothing is known of blocks."""
    lanes = PacedLanes(compute=compute, link=1.0, layers=stored.layout.layer_count)
    met = restore_and_compare(stored, lanes, expected=round(TOKENS / (1 + compute)))
    lanes.close()
    best = TOKENS * compute / (1 + compute)
    assert lanes.seconds <= best + max(LEAST_BLOCK_TOKENS * compute, CHUNK)
    if compute == 1e-4:
        assert met.recomputed_tokens == TOKENS
    if compute == 1e4:
        assert met.recomputed_tokens == 0


@pytest.mark.parametrize("compute", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_what_was_expected_need_not_be_right(
    one: StoredPrefix, compute: float, share: float
) -> None:
    lanes = PacedLanes(compute=compute, link=1.0, layers=one.layout.layer_count)
    restore_and_compare(one, lanes, expected=round(share * TOKENS))
    lanes.close()
    best = TOKENS * compute / (1 + compute)
    assert lanes.seconds <= best + 2 * max(LEAST_BLOCK_TOKENS * compute, CHUNK)


def test_blocks_and_pieces_shrink_towards_the_meeting_point(one: StoredPrefix) -> None:
    lanes = PacedLanes(compute=1.0, link=1.0, layers=one.layout.layer_count)
    met = restore_and_compare(one, lanes, expected=TOKENS // 2, block=256)
    lanes.close()
    for lane, least in ((Lane.COMPUTE, LEAST_BLOCK_TOKENS), (Lane.LINK_IN, CHUNK)):
        sizes = [s.tokens for s in met.spans if s.lane is lane and s.layer in (0, None)]
        largest = sizes.index(max(sizes))
        assert sizes[largest:] == sorted(sizes[largest:], reverse=True)
        assert sizes[-1] <= least


@pytest.mark.parametrize("cached", [1, CHUNK - 1, CHUNK, CHUNK + 1, 63, 64, 65, 100, 464])
def test_short_prefixes_and_partial_tails(one: StoredPrefix, cached: int) -> None:
    for compute, link in ((1.0, 1.0), (1.0, 50.0), (50.0, 1.0)):
        for expected in (0, cached // 2, cached):
            lanes = PacedLanes(compute=compute, link=link, layers=one.layout.layer_count)
            restore_and_compare(one, lanes, expected=expected, cached=cached)
            lanes.close()


def test_blocks_need_not_be_whole_chunks(one: StoredPrefix) -> None:
    """A worker's prefill budget may be any number."""
    for block in (1, 7, CHUNK + 3, 100, 10 * TOKENS):
        met = restore_and_compare(one, SerialLanes(CPU), expected=TOKENS, cached=100, block=block)
        assert met.recomputed_tokens == 100


def test_nothing_stored_is_nothing_to_do(one: StoredPrefix) -> None:
    keys, values = one.empty_cache(1)
    transfer, lanes = one.transfer(), SerialLanes(CPU)
    prefix = Prefix((), 0, [], [5], 0, 0)
    run, ends = both_ends(transfer, lanes, prefix, Target(keys, values), block=64, expected=0)
    assert run.is_done
    assert ends.front_tokens(0) == ends.recomputed_tokens == 0


def test_a_later_part_meets_behind_what_is_there(one: StoredPrefix) -> None:
    """The first chunks are on the device already."""
    first, pages = 9, list(range(len(one.chunks)))
    for expected in (0, 200, TOKENS):
        keys, values = one.empty_cache(PAGES)
        prefix = Prefix(one.chunks, first, pages, one.token_ids, TOKENS, 0)
        run, ends = both_ends(
            one.transfer(),
            SerialLanes(CPU),
            prefix,
            Target(keys, values),
            block=64,
            expected=expected,
        )
        run.begin()
        computed = first * CHUNK
        while count := ends.front_tokens(computed):
            computed += count
        assert run.is_done
        assert computed == first * CHUNK + ends.recomputed_tokens
        met = chunks_of(computed, CHUNK)
        for layer, wanted in enumerate(one.computed.keys):
            found = one.rows(keys[layer], pages[met:], TOKENS - met * CHUNK)
            assert torch.equal(found, wanted[met * CHUNK :])
            assert (keys[layer][:met] == 1e4).all()


# -- the serial twin, delays, losses, errors ---------------------------------------------


@pytest.mark.parametrize("expected", [0, 100, TOKENS // 2, TOKENS])
def test_the_serial_twin_meets_where_it_was_expected(stored: StoredPrefix, expected: int) -> None:
    lanes = SerialLanes(CPU)
    met = restore_and_compare(stored, lanes, expected=expected)
    assert abs(met.recomputed_tokens - expected) <= CHUNK / 2
    assert all(a.end <= b.start for a, b in itertools.pairwise(met.spans))


@pytest.mark.scaled
def test_runs_with_delayed_lanes_find_no_race(one: StoredPrefix) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    lanes = ThreadLanes(CPU)
    delays = dict.fromkeys(Lane, 0.0)
    lanes.before = lambda lane: time.sleep(rng.choice([0.0, delays[lane]]))
    shares = set()
    for _ in range(scaled(40, chaos=100)):
        delays = {lane: rng.choice([0.0, 2e-4, 1e-3]) for lane in Lane}
        cached = rng.randrange(1, TOKENS + 1)
        met = restore_and_compare(
            one,
            lanes,
            expected=rng.randrange(cached + 1),
            cached=cached,
            pages=rng.sample(range(PAGES), chunks_of(cached, CHUNK)),
            block=rng.choice([16, 64, 100, 256]),
        )
        shares.add(round(4 * met.recomputed_tokens / cached))
    lanes.close()
    assert len(shares) > 2, "they always met at the same place"


def begin_with(lanes: Lanes, first: Lane, action: Callable[[], None]) -> None:
    """No other lane begins before `first` has its first piece, where `action` runs once."""
    begun = threading.Event()

    def before(lane: Lane) -> None:
        if lane is not first:
            assert begun.wait(30)
        elif not begun.is_set():
            begun.set()
            action()

    lanes.before = before


@pytest.mark.parametrize("seed", range(10))
def test_who_gives_work_ahead_of_a_stream_misses_nothing(one: StoredPrefix, seed: int) -> None:
    """The host's side of CUDA lanes: pieces are under way when the next are claimed."""
    lanes = StreamLanes(torch.device("cuda"), StreamDouble(random.Random(seed)))
    restore_and_compare(one, lanes, expected=seed * TOKENS // 9, block=(32, 128, 256)[seed % 3])
    lanes.close()


@pytest.mark.parametrize("lanes", [ThreadLanes(CPU), SerialLanes(CPU)], ids=["threads", "serial"])
def test_a_chunk_lost_on_the_way_is_never_taken_for_a_prefix(
    lanes: Lanes, one: StoredPrefix, tmp_path: Path
) -> None:
    with stored_prefix(one.model, tmp_path, token_ids(200)) as stored:
        begin_with(lanes, Lane.LINK_IN, lambda: stored.lose(len(stored.chunks) - 1))
        with pytest.raises(ChunkLost):
            restore_and_compare(stored, lanes, expected=100, cached=200)
    # The lanes go on with other work.
    lanes.before = None
    restore_and_compare(one, lanes, expected=100)
    lanes.close()


def test_a_lost_chunk_that_nobody_read_does_not_matter(one: StoredPrefix, tmp_path: Path) -> None:
    with stored_prefix(one.model, tmp_path, token_ids(90)) as stored:
        stored.lose(5)
        met = restore_and_compare(stored, SerialLanes(CPU), expected=90, cached=90)
        assert met.recomputed_tokens == 90


@pytest.mark.parametrize("failing", [Lane.LINK_IN, Lane.COMPUTE])
def test_an_error_ends_both_lanes_and_leaves_no_copy_behind(
    one: StoredPrefix, failing: Lane
) -> None:
    def fail() -> None:
        raise OSError("the bus is gone")

    lanes = ThreadLanes(CPU)
    begin_with(lanes, failing, fail)
    with pytest.raises(OSError, match="the bus is gone"):
        restore_and_compare(one, lanes, expected=TOKENS // 2)
    lanes.before = None
    assert lanes.finish() == []
    restore_and_compare(one, lanes, expected=TOKENS // 2)
    lanes.close()


# -- a worker and its store ----------------------------------------------------------------


def admit(
    name: str, prompt: list[int], new_tokens: int, expected: int | None = None
) -> worker_pb2.RunRequest:
    """Restore by method TOKENS if a meeting point is expected, else by loading."""
    tokens, load = types_pb2.RESTORE_METHOD_TOKENS, types_pb2.RESTORE_METHOD_LOAD
    plan = types_pb2.Plan(
        residency=types_pb2.RESIDENCY_RESIDENT,
        method=load if expected is None else tokens,
        recomputed_tokens=expected or 0,
    )
    sampling = types_pb2.SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return worker_pb2.RunRequest(
        admit=worker_pb2.AdmitCommand(
            request_id=name, prompt_token_ids=prompt, sampling=sampling, plan=plan
        )
    )


RunStream = grpc.aio.StreamStreamCall[worker_pb2.RunRequest, worker_pb2.RunResponse]


async def answer(
    stream: RunStream, request: worker_pb2.RunRequest
) -> tuple[list[int], worker_pb2.RestoreReport]:
    await stream.write(request)
    tokens: list[int] = []
    reports: list[worker_pb2.RestoreReport] = []
    async for response in stream:
        for result in response.tokens:
            tokens += result.token_ids
        reports += response.restores
        if response.finishes:
            assert not response.finishes[0].error_code, response.finishes[0].error_message
            break
    return tokens, reports[0]


@pytest.mark.parametrize("case", ["opt", "qwen2-windows"])  # plain heads; grouped, with windows
async def test_a_worker_restores_from_both_ends_and_goes_on_with_the_same_tokens(
    case: str, tmp_path: Path, shm_folder: Path
) -> None:
    """A real store: one request seals the prefix, others bring it back and go on."""
    model, folder = build_tiny(case), write_tiny(case, tmp_path / "m")
    prefix, answered = clear_prompt(model, 150, 8)
    stored = [*prefix, *answered]
    # The last token's K and V were never needed.
    cached = len(stored) - 1
    assert cached % CHUNK, "a partial tail, whose activations are needed, too"
    addresses = f"unix:{tmp_path}/kv", f"unix:{tmp_path}/w"
    shape = StackShape(workers=1, shares_prefixes=False)
    async with AsyncExitStack() as cleanup:
        store = await start_store(folder, addresses[0], shm_folder / "store" / "arena", shape)
        cleanup.push_async_callback(stop_process, store)
        worker, _ = await cleanup.enter_async_context(
            serving_worker(folder, "0", addresses[1], addresses[0], shape)
        )
        channel = await cleanup.enter_async_context(open_channel(addresses[1]))
        stream = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        cleanup.callback(stream.cancel)
        tokens, report = await answer(stream, admit("first", prefix, 8))
        assert (tokens, report.method) == (answered, types_pb2.RESTORE_METHOD_NONE)
        for expected in (0, cached // 2, cached):
            # Something new each time, or the answer before would be found, too.
            prompt, wanted = clear_prompt(model, 9, 24, before=[*stored, 5 + expected % 97])
            tokens, report = await answer(stream, admit(f"at {expected}", prompt, 24, expected))
            assert tokens == wanted
            assert report.method == types_pb2.RESTORE_METHOD_TOKENS
            assert report.split_tokens == 0
            assert report.cached_tokens in (cached, cached + 1)
            if expected == 0:
                assert report.recomputed_tokens == report.compute_busy_seconds == 0
                assert report.link_busy_seconds > 0
            elif expected == cached:
                assert report.recomputed_tokens == report.cached_tokens
                assert report.compute_busy_seconds > 0
            else:
                assert 0 <= report.recomputed_tokens <= report.cached_tokens
        # What was restored so continues the chain: the longer sequence is found again.
        longer = [*prompt, *wanted]
        prompt, wanted = clear_prompt(model, 2, 8, before=longer)
        tokens, report = await answer(stream, admit("again", prompt, 8, len(longer) // 2))
        assert tokens == wanted
        assert report.cached_tokens == len(longer) - 1
        assert worker.engine.cache.pages.used_count == 0
        assert worker.engine.cache.input_pages.used_count == 0
