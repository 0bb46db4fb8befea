"""The rows that a selection chose lie in device pages, and only what was missing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from selecting import cache_of, empty_reads, maple_artifacts
from stored_prefix import CPU, StoredPrefix, tiny_prefix

from splitpoint.planning.schedule import Lane
from splitpoint.residency.selecting import selection_pages
from splitpoint.selection import Selection
from splitpoint.shapes import Encoding
from worker_service.device.cache import DeviceCache
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.retrieval import sequence_reads
from worker_service.retrieval.sequence_reads import SequenceReads, building_bytes
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.columns import ColumnScreen
from worker_service.selection.screen import AttentionShape, Guess, TokenRows
from worker_service.selection.screen_factory import Screens
from worker_service.selection.token_choice import choose

CHUNK = 16
STORED = 12 * CHUNK
PAGES = 40


@pytest.fixture(scope="module")
def prefix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoredPrefix]:
    encoding = getattr(request, "param", Encoding.NATIVE)
    with torch.inference_mode():
        yield from tiny_prefix("llama", tmp_path_factory, STORED, encoding)


def reads_of(
    prefix: StoredPrefix,
    text: str,
    cache: DeviceCache,
    lanes: Lanes,
    chunks: int = 12,
    artifacts: Artifacts | None = None,
) -> SequenceReads:
    """Return reads of the first chunks, built; their pages are spread over the cache."""
    selection = Selection.parsed(text)
    pages = selection_pages(prefix.model.shape, selection, STORED, CHUNK)
    free = list(range(1, PAGES, 2))
    reads = empty_reads(
        *(prefix, selection, cache, lanes),
        pages=pages,
        free=free,
        final_tokens=STORED,
        artifacts=artifacts,
    )
    build(prefix, reads, chunks)
    return reads


def build(prefix: StoredPrefix, reads: SequenceReads, chunks: int) -> None:
    for layer in reads.layers:
        reads.observe(layer, guess_at(prefix, layer, chunks * CHUNK - 1).queries)
        keys = prefix.computed.keys[layer][: chunks * CHUNK]
        reads.build(layer, keys, prefix.transfer(), prefix.chunks[:chunks], 0)


def guess_at(prefix: StoredPrefix, layer: int, position: int) -> Guess:
    """Return what the layer asks at a position, from X that was computed."""
    model = prefix.model
    inputs = prefix.computed.inputs[layer][position : position + 1]
    rotary = model.rotary(torch.tensor([position]))
    queries = model.layers[layer].project(inputs, rotary)[0]
    return Guess(inputs, queries, position)


def check_rows(prefix: StoredPrefix, cache: DeviceCache, reads: SequenceReads) -> None:
    """Assert that each row of the pages is K and V of the token that it is said to hold."""
    for layer in reads.layers:
        for head, held in enumerate(reads.tokens(layer)):
            assert len(set(held.tolist())) == reads.row_count
            for plane, truth in (
                (cache.keys, prefix.computed.keys),
                (cache.values, prefix.computed.values),
            ):
                rows = plane[layer][reads.row_pages, head].flatten(0, 1)
                assert torch.equal(rows, truth[layer][held, head])


def step(prefix: StoredPrefix, reads: SequenceReads, lanes: Lanes, position: int) -> None:
    for layer in reads.layers:
        lanes.wait_event(reads.begin(layer, guess_at(prefix, layer, position)))


SERVED = (
    "columns:0.2",
    "columns:0.2,int8",
    "window:0.2",
    "columns:budget_tokens=40",
)


@torch.inference_mode()
@pytest.mark.parametrize("text", SERVED)
@pytest.mark.parametrize(
    ("prefix", "lanes_type"),
    [
        (Encoding.NATIVE, SerialLanes),
        (Encoding.NATIVE, ThreadLanes),
        (Encoding.INT8, ThreadLanes),
        (Encoding.INT4, ThreadLanes),
    ],
    indirect=["prefix"],
)
def test_rows_are_those_of_the_store_and_only_missing_ones_cross_the_link(
    prefix: StoredPrefix, text: str, lanes_type: type[Lanes]
) -> None:
    cache, lanes = cache_of(prefix, PAGES), lanes_type(CPU)
    reads = reads_of(prefix, f"{text},full_layers=0", cache, lanes)
    assert reads.is_built
    assert reads.row_count == 48
    held = [set[tuple[int, int]]() for _ in reads.layers]
    fetched = 0
    for position in (STORED - 1, STORED - 5, STORED - 9):
        step(prefix, reads, lanes, position)
        check_rows(prefix, cache, reads)
        for place, layer in enumerate(reads.layers):
            rows = enumerate(reads.tokens(layer).tolist())
            now = {(head, token) for head, row in rows for token in row}
            fetched += len(now - held[place])
            held[place] = now
    spans = [span for span in lanes.finish() if span.lane is Lane.LINK_IN]
    counts = reads.counts
    assert counts.fetched == fetched == sum(span.tokens for span in spans)
    head_bytes = 2 * prefix.layout.kv_row_bytes
    assert counts.link_bytes == fetched * head_bytes == sum(span.amount for span in spans)
    assert counts.read == 3 * len(reads.layers) * len(reads.tokens(0)) * 48
    assert counts.visible == counts.read * STORED // 48
    assert 0 < counts.reused == counts.wanted - counts.fetched
    lanes.close()


@torch.inference_mode()
def test_it_holds_the_tokens_that_choose_would_read(prefix: StoredPrefix) -> None:
    """The first step fills all rows: it chooses as many tokens as there are rows."""
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    reads = reads_of(prefix, "columns:0.25,columns=9,full_layers=0", cache, lanes)
    step(prefix, reads, lanes, STORED - 1)
    for layer in reads.layers:
        screen = ColumnScreen(AttentionShape.of(prefix.model.config, layer), 9, int8=False)
        guess = guess_at(prefix, layer, STORED - 1)
        rows = TokenRows(guess.inputs, guess.queries, prefix.computed.keys[layer])
        screen.extend(rows)
        read = choose(
            screen.scores(guess),
            reads.selection,
            first_position=STORED - 1,
            tokens=STORED,
            kv_heads=len(reads.tokens(layer)),
        )
        wanted = [head.nonzero().flatten().tolist() for head in read[0]]
        assert [sorted(head) for head in reads.tokens(layer).tolist()] == wanted


@torch.inference_mode()
@pytest.mark.parametrize("text", ["columns:alpha=0.2", "columns:alpha=1,columns=5,recent=1"])
@pytest.mark.parametrize("lanes_type", [SerialLanes, ThreadLanes])
def test_alpha_attends_the_rows_that_choose_would_read_and_no_other(
    prefix: StoredPrefix, text: str, lanes_type: type[Lanes]
) -> None:
    """The rule is that of all earlier tokens: the first and the last chunk are on the device."""
    cache, lanes = cache_of(prefix, PAGES), lanes_type(CPU)
    selection = Selection.parsed(f"{text},cap=0.5,full_layers=0")
    stored, on_device = range(CHUNK, STORED - CHUNK), torch.tensor([2, 4])
    pages = selection_pages(prefix.model.shape, selection, len(stored), CHUNK)
    free = list(range(1, PAGES, 2))
    reads = empty_reads(prefix, selection, cache, lanes, pages=pages, free=free, final_tokens=1000)
    screens = []
    for layer in reads.layers:
        queries, keys = guess_at(prefix, layer, 5).queries, prefix.computed.keys[layer]
        reads.observe(layer, queries)
        reads.build(
            layer, keys[stored.start : stored.stop], prefix.transfer(), prefix.chunks[1:-1], CHUNK
        )
        for page, first in zip(on_device.tolist(), (0, stored.stop), strict=True):
            cache.keys[layer][page] = keys[first : first + CHUNK].transpose(0, 1)
        shape = AttentionShape.of(prefix.model.config, layer)
        columns = selection.kept_columns(shape.head_dim)
        screens.append(ColumnScreen(shape, columns, int8=False))
        rows = TokenRows(queries, queries, keys[stored.start : stored.stop])
        screens[-1].extend(rows)  # its columns are those of the stored tokens
    counts, before = reads.counts, [set[tuple[int, int]]() for _ in reads.layers]
    budgets: set[int] = set()
    for position in range(STORED - CHUNK, STORED):
        for layer, screen in enumerate(screens):
            guess = guess_at(prefix, layer, position)
            lanes.wait_event(reads.begin(layer, guess, on_device=on_device))
            scores = screen.scores_of(guess, prefix.computed.keys[layer][: position + 1])
            read = choose(
                scores,
                selection,
                first_position=position,
                tokens=position + 1,
                kv_heads=prefix.model.shape.kv_head_count,
            )[0, :, stored.start : stored.stop]
            wanted = {(head, token) for head, token in read.nonzero().tolist()}
            held = reads.tokens(layer)
            rows_of = (held >= 0).nonzero().tolist()
            assert {(head, int(held[head, row])) for head, row in rows_of} == wanted
            seen = reads.seen(layer).transpose(0, 1).flatten(1)
            assert torch.equal(seen != 0, held >= 0)
            for head, row in rows_of:
                page, place = divmod(row, CHUNK)
                token = stored.start + int(held[head, row])
                found = cache.keys[layer][reads.row_pages[page], head, place]
                assert torch.equal(found, prefix.computed.keys[layer][token, head])
            new = reads.counts - counts
            counts = reads.counts
            assert new.read == new.wanted == len(wanted)
            assert new.fetched <= len(wanted - before[layer])
            before[layer] |= wanted
            budgets.add(len(wanted))
    assert len(budgets) > 2
    lanes.close()


@torch.inference_mode()
def test_a_larger_alpha_reads_more_and_bytes_follow(prefix: StoredPrefix) -> None:
    """Nothing but the budget differs: of `cap` alone is what has room."""
    row_bytes = 2 * prefix.model.shape.head_dim * 4
    read: list[int] = []
    for alpha in (0.1, 0.3, 1, 3):
        cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
        text = f"columns:alpha={alpha},cap=0.9,sinks=0,recent=1,full_layers=0"
        read.append(0)
        for position in range(STORED - 20, STORED):
            # Each has no rows yet.
            reads = reads_of(prefix, text, cache, lanes)
            for layer in reads.layers:
                guess = replace(guess_at(prefix, layer, position), first_position=STORED)
                lanes.wait_event(reads.begin(layer, guess))
            counts = reads.counts
            assert counts.read == counts.wanted == counts.fetched
            assert counts.link_bytes == counts.read * row_bytes
            spans = [span for span in lanes.finish() if span.lane is Lane.LINK_IN]
            assert sum(span.amount for span in spans) == counts.link_bytes
            read[-1] += counts.read
    assert all(more > 1.2 * less for less, more in pairwise(read))


@torch.inference_mode()
@pytest.mark.parametrize("text", ["columns:0.2", "columns:0.2,int8"])
def test_chunks_that_leave_later_are_chosen_from_too(prefix: StoredPrefix, text: str) -> None:
    """Screens that grew equal screens that were built at once, as far as columns agree."""
    text += f",columns={prefix.model.shape.head_dim},full_layers=0"
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    reads = reads_of(prefix, text, cache, lanes, chunks=7)
    step(prefix, reads, lanes, 7 * CHUNK)
    assert reads.row_count == 32
    for index in range(7, 12):
        for layer, keys in enumerate(cache.keys):
            rows = prefix.computed.keys[layer][index * CHUNK : (index + 1) * CHUNK]
            keys[0] = rows.transpose(0, 1)
        reads.extend(0, prefix.chunks[index])
    assert reads.row_count == 48
    step(prefix, reads, lanes, STORED - 1)
    check_rows(prefix, cache, reads)
    at_once = reads_of(prefix, text, cache_of(prefix, PAGES), lanes)
    step(prefix, at_once, lanes, STORED - 1)
    for layer in reads.layers:
        both = (reads.tokens(layer), at_once.tokens(layer))
        assert torch.equal(*(tokens.sort(1).values for tokens in both))


@torch.inference_mode()
@pytest.mark.parametrize("pieces", [2 * CHUNK, 1024])
@pytest.mark.parametrize("projection", [0, 12])
def test_keys_of_maple_are_made_of_stored_layer_inputs(
    prefix: StoredPrefix, pieces: int, projection: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were stored first, in pieces, and of chunks that came later.

    The rows are those that `choose` takes by a screen with X of all tokens at once.
    """
    monkeypatch.setattr(sequence_reads, "INPUT_TOKENS", pieces)
    artifacts = maple_artifacts(prefix.model.shape, 8, projection)
    text, lanes = "maple:0.25,columns=8,full_layers=0", ThreadLanes(CPU)
    cache = cache_of(prefix, PAGES)
    reads = reads_of(prefix, text, cache, lanes, 7, artifacts)
    for index in range(7, 12):
        reads.extend(0, prefix.chunks[index])
    sent = sum(span.amount for span in lanes.finish() if span.name == "send X")
    layers = prefix.model.shape.layer_count
    assert sent == layers * STORED * prefix.model.shape.hidden_size * 4
    step(prefix, reads, lanes, STORED - 1)
    check_rows(prefix, cache, reads)
    for layer in reads.layers:
        screen = Screens(prefix.model.config, reads.selection, artifacts).layer(layer)
        assert screen is not None
        guess = guess_at(prefix, layer, STORED - 1)
        keys = prefix.computed.keys[layer]
        screen.extend(TokenRows(prefix.computed.inputs[layer], keys, keys))
        read = choose(
            screen.scores(guess),
            reads.selection,
            first_position=STORED - 1,
            tokens=STORED,
            kv_heads=len(keys[0]),
        )
        wanted = [head.nonzero().flatten().tolist() for head in read[0]]
        assert [sorted(head) for head in reads.tokens(layer).tolist()] == wanted
    lanes.close()


def test_building_takes_a_piece_of_the_inputs_where_others_take_all_keys(
    prefix: StoredPrefix,
) -> None:
    shape = prefix.model.shape
    keys, inputs = (4 * each for each in (shape.kv_width, shape.hidden_size))
    for text, size in (
        ("columns:0.1", 3000 * keys),
        ("maple:0.1", 1024 * inputs),
    ):
        assert building_bytes(prefix.layout, Selection.parsed(text), 3000) == size


@torch.inference_mode()
def test_positions_of_maples_keys_are_those_of_the_sequence(prefix: StoredPrefix) -> None:
    """Three chunks stay on the device before those that are stored only."""
    artifacts, first = maple_artifacts(prefix.model.shape, 8), 3 * CHUNK
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    selection = Selection.parsed("maple:0.25,columns=8,full_layers=0,sinks=0")
    reads = empty_reads(
        *(prefix, selection, cache, lanes),
        pages=selection_pages(prefix.model.shape, selection, STORED, CHUNK),
        free=list(range(PAGES)),
        final_tokens=STORED,
        artifacts=artifacts,
    )
    for layer in reads.layers:
        guess = guess_at(prefix, layer, STORED - 1)
        reads.observe(layer, guess.queries)
        transfer, chunks = prefix.transfer(), prefix.chunks[3:]
        reads.build(layer, torch.empty(0), transfer, chunks, first)
        lanes.wait_event(reads.begin(layer, guess))
        screen = Screens(prefix.model.config, selection, artifacts).layer(layer)
        assert screen is not None
        inputs = prefix.computed.inputs[layer][first:]
        screen.extend(TokenRows(inputs, inputs, inputs, first))
        tokens = len(inputs)
        read = choose(
            screen.scores(guess),
            selection,
            first_position=tokens - 1,
            tokens=tokens,
            kv_heads=len(reads.tokens(layer)),
        )
        for held, wanted in zip(reads.tokens(layer).tolist(), read[0], strict=True):
            # The rows that are left over hold the next best ones.
            assert set(wanted.nonzero().flatten().tolist()) <= set(held)


@torch.inference_mode()
def test_dropped_pages_are_zero_and_it_can_be_built_anew(prefix: StoredPrefix) -> None:
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    reads = reads_of(prefix, "columns:0.2,int8,full_layers=0", cache, lanes)
    step(prefix, reads, lanes, STORED - 1)
    assert any(plane.any() for plane in cache.keys)
    reads.drop()
    assert not reads.is_built
    assert not reads.row_pages
    assert not reads.chunks
    assert not any(plane.any() for plane in (*cache.keys, *cache.values))
    build(prefix, reads, 5)
    step(prefix, reads, lanes, 5 * CHUNK)
    check_rows(prefix, cache, reads)


@torch.inference_mode()
def test_screens_are_built_anew_from_the_queries_observed_before(prefix: StoredPrefix) -> None:
    """Those of the prompt come once."""
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    reads = reads_of(prefix, "columns:0.2,full_layers=0", cache, lanes)
    step(prefix, reads, lanes, STORED - 1)
    before = [reads.tokens(layer).sort(1).values for layer in reads.layers]
    reads.drop()
    for layer in reads.layers:
        reads.build(layer, prefix.computed.keys[layer], prefix.transfer(), prefix.chunks, 0)
    step(prefix, reads, lanes, STORED - 1)
    for layer, tokens in zip(reads.layers, before, strict=True):
        assert torch.equal(reads.tokens(layer).sort(1).values, tokens)


@torch.inference_mode()
def test_layers_that_hide_tokens_or_are_full_take_no_part(prefix: StoredPrefix) -> None:
    """All rows in the pages are attended, so no window may hide any of them."""
    config = prefix.model.config
    count = prefix.model.shape.layer_count
    hiding = replace(config, windows=(None, STORED - 1, STORED, *[None] * (count - 3))[:count])
    screens = Screens(config, Selection.parsed("columns:0.1,full_layers=1"))
    reads = SequenceReads(
        screens,
        hiding,
        cache_of(prefix, PAGES),
        SerialLanes(CPU),
        row_pages=[0],
        screen_pages=[1],
        final_tokens=STORED,
    )
    assert list(reads.layers) == list(range(2, count))
    assert not reads.selects(0)
