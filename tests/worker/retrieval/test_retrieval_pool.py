"""A bounded pool over a real arena: rows, screens and what is read belong to the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from selecting import cache_of
from stored_prefix import CPU, StoredPrefix, tiny_prefix
from test_retrieval_sequence_reads import CHUNK, PAGES, guess_at, reads_of

from splitpoint.selection import PoolPolicy, SelectionMethod
from splitpoint.shapes import Encoding
from worker_service.device.cache import DeviceCache
from worker_service.lanes.lanes import SerialLanes
from worker_service.retrieval.bounded_pool import BoundedPool, PoolStage
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.screen import OBSERVED_QUERIES, Guess, KeyScreen, TokenRows
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.pool_rows import move_rows, rows_of_slot, write_rows

STORED = 12 * CHUNK
PROMPT = 8
# The page that a chunk is on before it joins the pool; row and screen pages are odd.
PAGE = 2


# Encoding of the store, policy, method, and rule.
CASES = [
    *((Encoding.NATIVE, each, "columns", "0.3") for each in PoolPolicy),
    *((Encoding.NATIVE, each, "columns", "alpha=3,cap=0.4") for each in PoolPolicy),
    *((Encoding.NATIVE, PoolPolicy.COUNTER, each, "0.3") for each in ("infinigen", "lowrank")),
    (Encoding.NATIVE, PoolPolicy.COUNTER, "infinigen", "alpha=3,cap=0.4"),
    (Encoding.INT8, PoolPolicy.COUNTER, "columns", "0.3"),
    (Encoding.INT4, PoolPolicy.COUNTER, "infinigen", "0.3"),
]


@pytest.fixture(scope="module")
def prefix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoredPrefix]:
    encoding = getattr(request, "param", Encoding.NATIVE)
    with torch.inference_mode():
        yield from tiny_prefix("llama", tmp_path_factory, STORED, encoding)


def artifacts_of(prefix: StoredPrefix, method: str) -> Artifacts | None:
    """Return maps of no use to ranking; None if the method needs none."""
    if method == "columns":
        return None
    shape, random = prefix.model.shape, torch.Generator().manual_seed(3)
    names = ["skew"] if method == "infinigen" else ["query_map", "key_map"]
    size = (shape.kv_head_count, shape.head_dim, shape.head_dim)
    tensors = {
        f"layers.{layer}.{name}": torch.randn(size, generator=random) / shape.head_dim**0.5
        for layer in range(shape.layer_count)
        for name in names
    }
    return Artifacts(SelectionMethod(method), tensors, {})


@pytest.fixture
def slots(prefix: StoredPrefix) -> Iterator[list[StoredChunk]]:
    """Five slots that are granted."""
    granted = [
        (run.first_slot + offset, generation)
        for run in prefix.store.reserve(prefix.session_id, 5)
        for offset, generation in enumerate(run.generations)
    ]
    yield [StoredChunk.granted(slot, generation, CHUNK) for slot, generation in granted]
    prefix.store.sessions.release(prefix.session_id, [], granted)


def pool_of(reads: SequenceReads) -> BoundedPool:
    assert reads.pool is not None
    return reads.pool


def start(
    prefix: StoredPrefix, reads: SequenceReads, slots: list[StoredChunk], shared: int = 0
) -> None:
    pool = pool_of(reads)
    moving = pool.start(shared, len(reads.chunks), len(reads.chunks) * CHUNK - 3)
    assert moving is not None
    if reads.selection.policy is PoolPolicy.FIFO:
        assert moving.used_chunks == ()
    else:
        left = torch.zeros(len(reads.chunks))
        for layer in reads.layers:
            chunks = torch.from_numpy(moving.places[layer]).flatten() // CHUNK
            left += chunks.bincount(minlength=len(left))
        mean = left.sum() / (len(left) - shared)
        assert list(moving.used_chunks) == (left > mean).nonzero().flatten().tolist()
    own, slots[:] = slots[: moving.chunk_count], slots[moving.chunk_count :]
    move_rows(prefix.tensors, reads.row_numbers(moving.places), [each.slot for each in own])
    reads.pool_started(pool, own)


def write(
    prefix: StoredPrefix,
    cache: DeviceCache,
    reads: SequenceReads,
    slots: list[StoredChunk],
    index: int,
) -> None:
    """Let a chunk of the prefix join the pool, as if it had been computed on the device."""
    span = slice(index * CHUNK, (index + 1) * CHUNK)
    for planes, rows in (
        (cache.keys, prefix.computed.keys),
        (cache.values, prefix.computed.values),
    ):
        for layer, plane in enumerate(planes):
            plane[PAGE] = rows[layer][span].transpose(0, 1)
    pool = pool_of(reads)
    places, chunk = pool.make_room(span.stop - 3), None
    if places is None:
        chunk = slots.pop(0)
        heads = prefix.layout.kv_head_count
        targets = [rows_of_slot(chunk.slot, heads, CHUNK)] * prefix.layout.layer_count
    else:
        targets = reads.row_numbers(places)
    write_rows(cache, prefix.tensors, PAGE, targets)
    reads.pool_written(pool, PAGE, chunk)


def check(prefix: StoredPrefix, cache: DeviceCache, reads: SequenceReads, tokens: int) -> None:
    """Compare every place with the token that it is said to have: K, V, its score, and its row."""
    pool, position = pool_of(reads), tokens - 1
    slots = [chunk.slot for chunk in reads.chunks]
    for layer in reads.layers:
        positions = pool.positions(layer)
        assert pool.held(layer).all()
        screen = reads._screens.layer(layer)
        assert screen is not None
        keys, guess = prefix.computed.keys[layer], guess_at(prefix, layer, position)
        first = guess_at(prefix, layer, PROMPT * CHUNK - 1).queries
        # Its columns are those of the prompt, as the pool's were.
        for part in (keys[: PROMPT * CHUNK], keys[PROMPT * CHUNK : tokens]):
            if len(part):
                screen.extend(TokenRows(inputs=first, queries=first, keys=part))
        truth, found = screen.scores(guess)[0], reads._built[layer].scores(guess)[0]
        for head, held in enumerate(positions):
            assert len(set(held.tolist())) == len(held) == len(slots) * CHUNK
            assert {0, 1, *range(tokens - 3, tokens)} <= set(held.tolist())
            for planes, rows in (
                (prefix.tensors.keys, prefix.computed.keys),
                (prefix.tensors.values, prefix.computed.values),
            ):
                stored = planes[layer][slots, head].flatten(0, 1)
                native = torch.empty_like(rows[layer][held, head])
                prefix.tensors.codec.decode(stored, native)
                assert torch.equal(native, rows[layer][held, head])
            group = len(found) // len(positions)
            for query in range(head * group, (head + 1) * group):
                assert torch.allclose(found[query], truth[query, held], atol=1e-5)
    lanes = SerialLanes(CPU)
    for layer in reads.layers:
        # Of the next token, of which the device has nothing yet.
        guess = replace(guess_at(prefix, layer, position), first_position=tokens)
        lanes.wait_event(reads.begin(layer, guess))
    for layer in reads.layers:
        positions = pool.positions(layer)
        for head, places in enumerate(reads.tokens(layer)):
            wanted = places >= 0
            read = positions[head, places[wanted]]
            assert {0, 1, *range(tokens - 3, tokens)} <= set(read.tolist())
            for plane, rows in (
                (cache.keys, prefix.computed.keys),
                (cache.values, prefix.computed.values),
            ):
                in_pages = plane[layer][reads.row_pages, head].flatten(0, 1)[wanted]
                assert torch.equal(in_pages, rows[layer][read, head])


@torch.inference_mode()
@pytest.mark.parametrize(("prefix", "policy", "method", "rule"), CASES, indirect=["prefix"])
def test_what_is_left_is_where_it_is_said_to_be(
    prefix: StoredPrefix, slots: list[StoredChunk], policy: PoolPolicy, method: str, rule: str
) -> None:
    cache = cache_of(prefix, PAGES)
    text = f"{method}:{rule},columns=9,full_layers=0,sinks=2,recent=4,pool=0.45,policy={policy}"
    artifacts = artifacts_of(prefix, method)
    reads = reads_of(prefix, text, cache, SerialLanes(CPU), PROMPT, artifacts)
    pool = pool_of(reads)
    assert pool.is_due(PROMPT)
    assert not pool.is_due(PROMPT)
    start(prefix, reads, slots)
    assert (pool.chunk_count, pool.evicted_tokens) == (3, 5 * CHUNK)
    check(prefix, cache, reads, PROMPT * CHUNK)
    for index, chunks in ((8, 4), (9, 4), (10, 4), (11, 5)):
        write(prefix, cache, reads, slots, index)
        assert pool.chunk_count == len(reads.chunks) == chunks
        assert reads.pool_bytes == chunks * prefix.layout.chunk_bytes
        assert reads.stored_tokens == (index + 1) * CHUNK
        check(prefix, cache, reads, (index + 1) * CHUNK)
    evicted = reads.counts.evicted
    assert evicted == STORED - 5 * CHUNK
    if policy is PoolPolicy.FIFO:
        newest = [0, 1, *range(STORED - 5 * CHUNK + 2, STORED)]
        for layer in reads.layers:
            for head in pool.positions(layer):
                assert head.sort().values.tolist() == newest
    reads.drop()
    assert pool.stage is PoolStage.LOST


@torch.inference_mode()
def test_shared_chunks_stay_whole_and_are_not_written_over(
    prefix: StoredPrefix, slots: list[StoredChunk]
) -> None:
    cache = cache_of(prefix, PAGES)
    text = "columns:0.3,columns=9,full_layers=0,sinks=2,recent=4,pool=0.4"
    reads = reads_of(prefix, text, cache, SerialLanes(CPU), PROMPT)
    start(prefix, reads, slots, shared=3)
    # 40 % of five chunks, behind the three.
    assert reads.chunks[:3] == list(prefix.chunks[:3])
    assert pool_of(reads).chunk_count == 2
    for index in (8, 9):
        write(prefix, cache, reads, slots, index)
        check(prefix, cache, reads, (index + 1) * CHUNK)
        for layer in reads.layers:
            whole = pool_of(reads).positions(layer)[:, : 3 * CHUNK]
            assert (whole == torch.arange(3 * CHUNK)).all()


@torch.inference_mode()
def test_no_chunk_is_written_over_what_is_on_its_way(
    prefix: StoredPrefix, slots: list[StoredChunk]
) -> None:
    """Two chunks are left; six of their tokens must stay, so that one can be written over."""
    cache = cache_of(prefix, PAGES)
    text = "columns:0.3,columns=9,full_layers=0,sinks=2,recent=4,pool=0.3"
    reads = reads_of(prefix, text, cache, SerialLanes(CPU), PROMPT)
    start(prefix, reads, slots)
    pool, gone = pool_of(reads), []
    assert pool.chunk_count == 2
    assert pool.has_room
    gone.append(pool.make_room(9 * CHUNK - 3))
    assert not pool.has_room
    assert pool.empty_places == CHUNK
    # The chunk itself is none of the stored ones yet, nor does it count as evicted for them.
    assert reads.stored_tokens == PROMPT * CHUNK
    assert pool.written() is gone[0]
    assert reads.stored_tokens == 9 * CHUNK
    assert pool.has_room


@torch.inference_mode()
def test_a_pool_that_finds_no_room_leaves_everything(prefix: StoredPrefix) -> None:
    cache = cache_of(prefix, PAGES)
    text = "columns:0.3,columns=9,full_layers=0,sinks=2,recent=4,pool=0.5"
    reads = reads_of(prefix, text, cache, SerialLanes(CPU), PROMPT)
    pool = pool_of(reads)
    assert pool.start(0, PROMPT, PROMPT * CHUNK) is not None
    assert pool.empty_places == 4 * CHUNK
    assert not pool.held(0).all()
    pool.refused()
    assert (pool.stage, pool.empty_places) == (PoolStage.WHOLE, 0)
    check(prefix, cache, reads, PROMPT * CHUNK)
    # The store counts each attempt as a reservation that it refused.
    assert [count for count in range(PROMPT, 20) if pool.is_due(count)] == [16, 17, 18, 19]


@torch.inference_mode()
@pytest.mark.parametrize("policy", [PoolPolicy.LRU, PoolPolicy.COUNTER])
def test_what_steps_read_stays(
    prefix: StoredPrefix, slots: list[StoredChunk], policy: PoolPolicy
) -> None:
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    text = f"columns:0.1,columns=9,full_layers=0,sinks=2,recent=4,pool=0.45,policy={policy}"
    reads = reads_of(prefix, text, cache, lanes, PROMPT)
    start(prefix, reads, slots)
    write(prefix, cache, reads, slots, 8)
    pool, tokens = pool_of(reads), 9 * CHUNK
    before: dict[tuple[int, int], int] = {}
    for position in range(tokens, tokens + 9):
        guess = guess_at(prefix, 0, 20 * (position - tokens))
        lanes.wait_event(reads.begin(0, replace(guess, first_position=position)))
        # The last query decides for the one, all of them together for the other.
        if policy is PoolPolicy.COUNTER or position == tokens + 8:
            for head, places in enumerate(reads.tokens(0)):
                for place in places[places >= 0].tolist():
                    before[head, place] = before.get((head, place), 0) + 1
    places = pool.make_room(tokens + CHUNK - 3)
    assert places is not None
    for head, leaving in enumerate(places[0].tolist()):
        often = max(before.get((head, place), 0) for place in leaving)
        stay = set(range(4 * CHUNK)) - set(leaving)
        assert sum(before.get((head, place), 0) >= often for place in stay) > CHUNK
        if policy is PoolPolicy.LRU:
            assert often == 0


@torch.inference_mode()
@pytest.mark.parametrize("rule", ["0.3", "alpha=3,cap=0.4"])
def test_no_query_of_the_prompt_counts_for_a_later_token(prefix: StoredPrefix, rule: str) -> None:
    """The newest one is behind the stored tokens: it is that of the step that builds screens."""
    cache = cache_of(prefix, PAGES)
    text = f"columns:{rule},columns=9,full_layers=0,sinks=2,recent=4,pool=0.45"
    reads = reads_of(prefix, text, cache, SerialLanes(CPU), PROMPT)
    reads.drop()
    stored = PROMPT * CHUNK
    newest = stored + 5
    queries = range(newest + 1 - OBSERVED_QUERIES, newest + 1)
    for layer in reads.layers:
        asked = torch.cat([guess_at(prefix, layer, position).queries for position in queries])
        reads.observe(layer, asked)
        keys = prefix.computed.keys[layer][:stored]
        chunks = prefix.chunks[:PROMPT]
        reads.build(layer, keys, prefix.transfer(), chunks, 0, position=newest)
        counters = pool_of(reads)._layers[layer]._rank
        for place in range(queries[0], stored):
            # Those behind it, and its own.
            assert (counters[:, place] <= newest + 1 - place).all(), place
        assert (counters[:, :2] == OBSERVED_QUERIES).all()
        assert (counters[:, queries[0] : stored] >= 4).all()


@torch.inference_mode()
def test_alpha_ranks_a_chunk_that_is_on_its_way(
    prefix: StoredPrefix, slots: list[StoredChunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are on the device until it has been written, before the newest ones."""
    cache = cache_of(prefix, PAGES)
    text = "columns:alpha=3,cap=0.4,columns=9,full_layers=0,sinks=2,recent=4,pool=0.3"
    reads = reads_of(prefix, text, cache, SerialLanes(CPU), PROMPT)
    start(prefix, reads, slots)
    position = (PROMPT + 1) * CHUNK + 3
    screen, pages = reads._built[0], torch.tensor([PAGE, PAGE + 2])
    assert isinstance(screen, KeyScreen)
    for page, first in ((PAGE, PROMPT), (PAGE + 2, PROMPT + 1)):
        rows = prefix.computed.keys[0][first * CHUNK : (first + 1) * CHUNK]
        cache.keys[0][page] = rows.transpose(0, 1)
    asked: list[torch.Tensor] = []
    scores_of = screen.scores_of

    def noted(guess: Guess, keys: torch.Tensor) -> torch.Tensor:
        asked.append(keys.clone())
        return scores_of(guess, keys)

    monkeypatch.setattr(screen, "scores_of", noted)
    assert pool_of(reads).make_room(position - 3) is not None
    guess = replace(guess_at(prefix, 0, position), first_position=position)
    reads.begin(0, guess, on_device=pages)
    assert torch.equal(asked[0], prefix.computed.keys[0][PROMPT * CHUNK : position])


@torch.inference_mode()
def test_a_pool_that_is_refused_a_slot_is_written_over(
    prefix: StoredPrefix, slots: list[StoredChunk]
) -> None:
    cache = cache_of(prefix, PAGES)
    text = "columns:0.3,columns=9,full_layers=0,sinks=2,recent=4,pool=0.45"
    reads = reads_of(prefix, text, cache, SerialLanes(CPU), PROMPT)
    start(prefix, reads, slots)
    pool = pool_of(reads)
    assert pool.make_room(9 * CHUNK - 3) is None
    assert reads.pool_bytes == 3 * prefix.layout.chunk_bytes
    # Nothing may be behind it that would have to wait for what it becomes.
    assert not pool.has_room
    pool.growth_refused()
    assert pool.has_room
    for index in (8, 9, 10):
        write(prefix, cache, reads, slots, index)
        assert pool.chunk_count == len(reads.chunks) == 3
        check(prefix, cache, reads, (index + 1) * CHUNK)
    # Of 12 chunks five may stay, and it asks for one more.
    write(prefix, cache, reads, slots, 11)
    assert pool.chunk_count == len(reads.chunks) == 4
    check(prefix, cache, reads, STORED)
