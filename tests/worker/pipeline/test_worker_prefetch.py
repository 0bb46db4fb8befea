"""The prefetcher alone: tiles of any streams in any order; slots are not overwritten early."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from engine_runner import CPU, make_engine
from store_runner import streamed
from stored_prefix import StoredPrefix, stored_prefix
from stream_double import StreamDouble
from tiny_models import VOCABULARY, write_tiny

from splitpoint.planning.schedule import Lane, Schedule
from worker_service.device.upload import Upload
from worker_service.engine.sampling import Sampling
from worker_service.engine.selected_step import SelectedStep
from worker_service.engine.sequence import Sequence as Running
from worker_service.engine.streamed_builder import StreamedBuilder
from worker_service.engine.streamed_step import StreamedStep
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.lanes import EmulatedLink, Event, Lanes, SerialLanes
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work
from worker_service.model.decoder import Decoder
from worker_service.pipeline.executor import Prefetcher
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.task_work import TileTransfer
from worker_service.pipeline.tiles import (
    StoredPage,
    Tile,
    decode_tiles,
    in_turn,
    ordered_tiles,
    prefill_tiles,
)
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import StoredChunk

CHUNK = 16
CHUNKS = 12


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredPrefix]:
    folder = write_tiny("llama", tmp_path_factory.mktemp("model"))
    model = Decoder.load(folder, CPU, torch.float32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (CHUNKS * CHUNK,), generator=generator).tolist()
    with stored_prefix(model, tmp_path_factory.mktemp("arena"), ids) as prefix:
        yield prefix


class Deferred(StreamLanes):
    """Lanes like a GPU's: the host puts work into streams, which run it much later."""

    def __init__(self, seed: int) -> None:
        self.double = StreamDouble(random.Random(seed))
        super().__init__(torch.device("cuda"), self.double)

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        return super().run(lane, replace(work, call=partial(self.double.launch, work.call)), after)


@dataclass
class Setting:
    """One sequence whose whole prefix is in the store, and what a step would read of it."""

    stored: StoredPrefix
    staging: Staging
    step: StreamedStep
    rows: list[tuple[list[torch.Tensor], list[torch.Tensor]]]

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        stored: StoredPrefix,
        *,
        split: int,
        tile_pages: int,
        staging_pages: int,
        kept_inputs: int = 0,
    ) -> Setting:
        engine = make_engine(stored.model, has_activations=True, staging_pages=staging_pages)
        staging, cache = engine.staging, engine.cache
        admission = streamed(
            "a", [*stored.token_ids, 5], Sampling(), split=split, schedule=Schedule.ROW
        )
        sequence = Running(
            admission=admission,
            kept_inputs=kept_inputs,
            transfer=CacheTransfer(stored.model, stored.tensors, staging),
            computed=len(stored.token_ids),
            pages=[*[None] * CHUNKS, 7],
            stored=list(stored.chunks),
            row_pages=[3, 1, 2, 9, 8, 6],
        )
        for chunk in range(kept_inputs):
            for layer, inputs in enumerate(stored.tensors.inputs):
                room = cache.inputs_in_pages(layer)[chunk % 2]
                room[sequence.row_pages[chunk // 2]] = inputs[stored.chunks[chunk].slot]
        windows = [layer.window for layer in stored.model.layers]
        upload = Upload(cache.device)
        builder = StreamedBuilder(cache, windows, tile_pages, upload)
        step = builder.step([sequence], None, [], SelectedStep([], [], [], upload))
        assert step is not None
        return cls(stored, staging, step, [])

    @torch.inference_mode()
    def run(self, lanes: Lanes) -> list[Span]:
        """Every tile of every layer, and what its attention would have seen."""
        prefetcher = Prefetcher(lanes, self.staging, self.step.tile_pages, self.step.layers)
        prefetcher.start()
        seen: list[tuple[int, TileTransfer, torch.Tensor, torch.Tensor]] = []

        def attend(
            layer: int, tile_transfer: TileTransfer, keys: torch.Tensor, values: torch.Tensor
        ) -> None:
            count = len(tile_transfer.tile.pages)
            seen.append((layer, tile_transfer, keys[:count].clone(), values[:count].clone()))

        for layer, tile_transfers in enumerate(self.step.layers):
            for tile_transfer in tile_transfers:
                prefetcher.consume(layer, tile_transfer, partial(attend, layer, tile_transfer))
        spans = lanes.finish()
        assert len(seen) == sum(len(tile_transfers) for tile_transfers in self.step.layers)
        read: set[tuple[int, int]] = set()
        for layer, tile_transfer, keys, values in seen:
            for place, page in enumerate(tile_transfer.tile.pages):
                first = page.first_position
                read.add((layer, first))
                for found, wanted in (
                    (keys[place], self.stored.computed.keys[layer]),
                    (values[place], self.stored.computed.values[layer]),
                ):
                    rows = wanted[first : first + CHUNK].transpose(0, 1)
                    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-5)
        layers = self.stored.layout.layer_count
        assert read == {(at, CHUNK * index) for at in range(layers) for index in range(CHUNKS)}
        return spans


@pytest.mark.parametrize("seed", range(40))
def test_streams_in_any_order_bring_every_tile(stored: StoredPrefix, seed: int) -> None:
    """The host runs ahead of all work; only what lanes wait for keeps it right."""
    rng = random.Random(seed)
    setting = Setting.of(
        stored,
        split=rng.choice([0, 5, 64, 77, CHUNK * CHUNKS]),
        tile_pages=rng.randrange(1, 5),
        staging_pages=rng.randrange(3, 14),
        kept_inputs=rng.choice([0, 3]),
    )
    lanes = Deferred(seed)
    lanes.schedule = rng.choice([Schedule.PIPELINED, Schedule.COLUMN])
    setting.run(lanes)
    # The host waited at the end only: once for each lane that had work.
    assert lanes.double.synchronized <= len(Lane)


def test_kvprs_order_sends_nothing_of_a_layer_before_the_one_before_is_there(
    stored: StoredPrefix,
) -> None:
    """A whole layer is one tile of X, then one of K and V; ours sends both ahead."""
    staging = 3 * CHUNKS
    setting = Setting.of(stored, split=80, tile_pages=CHUNKS, staging_pages=staging)
    ahead = {}
    for schedule in (Schedule.COLUMN, Schedule.PIPELINED):
        lanes = ThreadLanes(CPU, EmulatedLink(2e6))
        lanes.schedule = schedule
        lanes.before = lambda lane: time.sleep(0.02 * (lane is Lane.COMPUTE))
        try:
            spans = setting.run(lanes)
        finally:
            lanes.close()
        begins: dict[int, float] = {}
        ends: dict[int, float] = {}
        for span in spans:
            if span.layer is None or span.name == "attend":
                continue
            if span.lane is Lane.LINK_IN:
                begins[span.layer] = min(begins.get(span.layer, span.start), span.start)
            ends[span.layer] = max(ends.get(span.layer, 0.0), span.end)
        ahead[schedule] = [
            layer for layer in begins if layer and begins[layer] < ends[layer - 1] - 1e-9
        ]
        last = max(begins)
        sent = [span.name for span in spans if span.layer == last and span.lane is Lane.LINK_IN]
        assert sent == ["send X", "load K,V"]
    assert ahead[Schedule.COLUMN] == []
    assert ahead[Schedule.PIPELINED]


def test_a_tile_out_of_its_turn_is_an_error(stored: StoredPrefix) -> None:
    setting = Setting.of(stored, split=64, tile_pages=2, staging_pages=6)
    prefetcher = Prefetcher(SerialLanes(CPU), setting.staging, 2, setting.step.layers)
    with torch.inference_mode():
        prefetcher.start()
        with pytest.raises(RuntimeError, match="another order"):
            prefetcher.consume(0, setting.step.layers[0][1], lambda *_: None)


# -- tiles ------------------------------------------------------------------------------


def page(reader: int, slot: int, index: int, rebuilt: int = 0, *, kept: bool = False) -> StoredPage:
    return StoredPage(reader, StoredChunk(slot, 1, CHUNK, b"", 0), index * CHUNK, rebuilt, kept)


def slots(tiles: Sequence[Tile]) -> list[list[int]]:
    return [[page.chunk.slot for page in tile.pages] for tile in tiles]


def test_decode_tiles_join_neighbouring_pages_of_any_sequences() -> None:
    pages = [page(0, 4, 0), page(0, 6, 1), page(1, 5, 0), page(1, 7, 1), page(2, 4, 0)]
    tiles = decode_tiles(pages, 4, CHUNK)
    # A slot that two sequences share comes again after the runs.
    assert slots(tiles) == [[4, 5], [6, 7, 4]]
    assert all(tile.is_loaded and tile.rebuilt_rows == 0 for tile in tiles)
    assert slots(decode_tiles(pages, 99, CHUNK)) == [[4, 5, 6, 7, 4]]


def test_prefill_tiles_keep_the_order_of_tokens() -> None:
    pages = [page(0, slot, index) for index, slot in enumerate([9, 3, 7, 1, 5])]
    assert slots(prefill_tiles(pages, 2, CHUNK)) == [[9], [3, 7], [1, 5]]


def test_ordered_tiles_keep_the_order_of_each_sequence_and_take_turns_between_them() -> None:
    generator = random.Random(5)
    for _ in range(50):
        pages: list[StoredPage] = []
        for reader in range(generator.randrange(1, 6)):
            kept, split, end = sorted(generator.randrange(14) for _ in range(3))
            for index in range(end):
                rows = CHUNK if index < split else generator.choice([0, 7]) * (index == split)
                pages.append(page(reader, len(pages), index, rows, kept=index < kept))
        tiles = ordered_tiles(pages, 3, CHUNK)
        attended = [page for tile in tiles for page in tile.pages]
        assert sorted(attended, key=lambda page: page.chunk.slot) == pages
        for reader in range(6):
            own = [page.first_position for page in attended if page.reader == reader]
            assert own == sorted(own)
    pages = [page(row, 9, index, CHUNK * (index < 3)) for row in range(3) for index in range(6)]
    kinds = ["load" if tile.is_loaded else "rebuild" for tile in ordered_tiles(pages, 3, CHUNK)]
    assert kinds == 3 * ["rebuild", "load"]


def test_the_page_of_the_split_is_a_tile_of_its_own() -> None:
    pages = [page(0, index, index, rows) for index, rows in enumerate([16, 16, 7, 0, 0])]
    tiles = decode_tiles(pages, 2, CHUNK)
    assert slots(tiles) == [[2], [0, 1], [3, 4]]
    assert [(tile.is_loaded, tile.rebuilt_rows) for tile in tiles] == [
        (True, 7),
        (False, 32),
        (True, 0),
    ]


def test_what_loads_the_link_and_what_loads_the_device_take_turns() -> None:
    pages = [page(0, index, index, CHUNK) for index in range(6)]
    pages += [page(0, 6 + index, 6 + index) for index in range(3)]
    pages += [page(0, 9 + index, 9 + index, CHUNK, kept=True) for index in range(3)]
    kinds = [
        "kept" if tile.is_kept else "load" if tile.is_loaded else "rebuild"
        for tile in decode_tiles(pages, 1, CHUNK)
    ]
    assert kinds == 3 * ["rebuild", "kept", "load", "rebuild"]
    assert in_turn([], []) == []
