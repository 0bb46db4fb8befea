"""Chunks that an arena keeps as int8 or int4: written back from pages, and restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from store_runner import store_runner
from tiny_models import write_tiny

from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.slots import places
from splitpoint.arena.records import RowsNotZero
from splitpoint.keys import chunk_key
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.shapes import ArenaLayout, DataType, Encoding
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import STAGING_PAGES, divide
from worker_service.fetching.stream import cut_tail
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder
from worker_service.pipeline.chunk_loader import ChunkLoader
from worker_service.pipeline.executor import restore
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.task_work import Prefix
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.quantization import Unencodable, decode, encode
from worker_service.store.write_back import WriteJob, copy_chunks

CPU = torch.device("cpu")
CHUNK = 8
# More chunks than the staging memory holds at once; the last one is partial.
TOKENS = (STAGING_PAGES + 4) * CHUNK + 3
CHUNKS = -(-TOKENS // CHUNK)
IDS = [3 + position % 100 for position in range(TOKENS)]


@dataclass
class Written:
    """A cache of random rows, and an arena they were written back to, in scattered slots."""

    model: Decoder
    cache: DeviceCache
    tensors: ArenaTensors
    pages: list[int]
    chunks: tuple[StoredChunk, ...]
    checksums: list[int]

    @property
    def layout(self) -> ArenaLayout:
        return self.cache.layout

    def approximate(self, plane: torch.Tensor, pages: list[int]) -> torch.Tensor:
        """What the pages' rows are once they went through the encoding, spare ones zero."""
        native = plane[pages].clone()
        native[-1, ..., TOKENS % CHUNK :, :] = 0
        if self.layout.encoding is Encoding.NATIVE:
            return native
        decoded = torch.empty_like(native)
        decode(encode(native, self.layout.encoding), self.layout.encoding, decoded)
        return decoded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("model"))  # heads of 24, X of 64


@contextmanager
def written(
    folder: Path, arena_folder: Path, encoding: Encoding, dtype: torch.dtype
) -> Iterator[Written]:
    model = Decoder.load(folder, CPU, dtype)
    layout = ArenaLayout.of(
        model.shape, chunk_tokens=CHUNK, has_activations=True, encoding=encoding
    )
    plan = divide(
        model.shape,
        layout,
        budget_bytes=64 << 20,
        weight_bytes=model.weight_bytes,
        max_batch_size=2,
        max_batched_tokens=TOKENS,
    )
    cache = DeviceCache(layout, plan, CPU)
    generator = torch.Generator().manual_seed(0)
    for plane in (*cache.keys, *cache.values, *cache.inputs):
        plane.copy_(3 * torch.randn(plane.shape, generator=generator) + 1)
    pages = [(5 * index + 1) % 24 for index in range(CHUNKS)]
    jobs = [
        WriteJob(index, page, page, tuple(IDS[index * CHUNK : (index + 1) * CHUNK]))
        for index, page in enumerate(pages)
    ]
    # Rows past the tokens may hold anything at all, and it must not get out.
    cache.values[1][pages[-1], :, TOKENS % CHUNK :] = float("nan")
    with store_runner(layout, arena_folder, 2 * CHUNKS) as runner:
        store, session = runner.store, runner.connection.session_id
        tensors = runner.connection.tensors
        for plane in (*tensors.keys, *tensors.values, *tensors.inputs):
            plane.fill_(7)  # bytes of an earlier use
        granted = [
            place
            for index, place in enumerate(places(store.reserve(session, 2 * CHUNKS)))
            if index % 3
        ][:CHUNKS]
        checksums = copy_chunks(cache, tensors, jobs, [slot for slot, _ in granted])
        parent, chunks = b"", []
        for job, (slot, generation), checksum in zip(jobs, granted, checksums, strict=True):
            chunks.append(WrittenChunk(slot, generation, parent, job.token_ids, checksum))
            parent = chunk_key(layout.layout_hash, b"", parent, job.token_ids)
        sealed = store.seal(session, b"", chunks, store.verify(chunks), keep_leased=True)
        stored = tuple(
            StoredChunk(each.slot, each.generation, each.token_count, each.key, each.checksum)
            for each in (chunk.entry for chunk in sealed.chunks)
        )
        yield Written(model, cache, tensors, pages, stored, checksums)


@pytest.fixture(
    scope="module",
    params=[
        (Encoding.NATIVE, torch.float32),
        (Encoding.INT8, torch.float32),
        (Encoding.INT8, torch.bfloat16),
        (Encoding.INT4, torch.float32),
        (Encoding.INT4, torch.float16),
    ],
    ids=lambda value: f"{value[0].value}-{value[1]}",
)
def stored(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Written]:
    with written(folder, tmp_path_factory.mktemp("arena"), *request.param) as stored:
        yield stored


def test_slots_hold_the_documented_bytes(stored: Written) -> None:
    layout, arena = stored.layout, stored.tensors.arena
    size = 2 if layout.data_type is not DataType.FLOAT32 else 4
    # By hand, for heads of 24 and X of 64; 2 heads, 3 layers.
    row = {
        Encoding.NATIVE: (24 * size, 64 * size),
        Encoding.INT8: (2 + 24, 2 + 64),
        Encoding.INT4: (4 + 12, 4 + 32),
    }[layout.encoding]
    assert arena.plane(0, "K").shape[1] == 2 * CHUNK * row[0]
    assert arena.plane(2, "X").shape[1] == CHUNK * row[1]
    assert layout.chunk_bytes == 3 * CHUNK * (2 * 2 * row[0] + row[1])
    for chunk, checksum in zip(stored.chunks, stored.checksums, strict=True):
        arena.check_payload(chunk.slot, chunk.token_count, checksum)  # spare rows are zero
    # A row, byte for byte, is what the encoding makes of it.
    if layout.encoding is not Encoding.NATIVE:
        native = stored.cache.keys[1][stored.pages[2], 1, 5]
        found = arena.plane(1, "K")[stored.chunks[2].slot]
        first = (1 * CHUNK + 5) * row[0]
        assert found[first : first + row[0]].tolist() == encode(native, layout.encoding).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.PIPELINED])
@pytest.mark.parametrize("split", [0, 45, TOKENS])
def test_a_restore_brings_back_what_was_encoded(
    stored: Written, split: int, schedule: Schedule
) -> None:
    layout, cache = stored.layout, stored.cache
    targets = [(5 * index + 2) % 29 for index in range(CHUNKS)]
    keys, values = (
        [torch.full((29, *plane.shape[1:]), 1e4, dtype=plane.dtype) for plane in planes]
        for planes in (cache.keys, cache.values)
    )
    lanes = SerialLanes(CPU) if schedule is Schedule.SERIAL else ThreadLanes(CPU)
    staging = Staging(layout, STAGING_PAGES, CPU)
    transfer = CacheTransfer(stored.model, stored.tensors, staging)
    prefix = Prefix(stored.chunks, 0, targets, IDS, TOKENS, split)
    spans = restore(transfer, lanes, prefix, keys, values, schedule=schedule, tile_tokens=4 * CHUNK)
    lanes.close()
    rebuilt = -(-split // CHUNK)
    for layer in range(layout.layer_count):
        for found, source in (
            (keys[layer], cache.keys[layer]),
            (values[layer], cache.values[layer]),
        ):
            wanted = stored.approximate(source, stored.pages)
            split // CHUNK
            rows = found[targets].transpose(1, 2).flatten(0, 1)
            expected = wanted.transpose(1, 2).flatten(0, 1)
            loaded = slice(split, TOKENS)
            assert torch.equal(rows[loaded], expected[loaded]), layer
    # What is rebuilt comes from the decoded X; layer 0's from the token ids.
    for layer in range(1, layout.layer_count) if split else ():
        inputs = stored.approximate(cache.inputs[layer], stored.pages).flatten(0, 1)[:split]
        rotary = stored.model.rotary(torch.arange(split))
        built = stored.model.layers[layer].project_kv(inputs, rotary)
        for found, wanted in zip((keys[layer], values[layer]), built, strict=True):
            rows = found[targets].transpose(1, 2).flatten(0, 1)[:split]
            torch.testing.assert_close(rows, wanted, rtol=2e-2, atol=2e-2)
    on_link = sum(span.amount for span in spans if span.lane is Lane.LINK_IN)
    loaded_chunks = CHUNKS - split // CHUNK if split < TOKENS else 0
    assert on_link == (
        layout.layer_count * loaded_chunks * 2 * layout.kv_slot_bytes
        + (layout.layer_count - 1) * rebuilt * layout.x_slot_bytes
    )


@torch.inference_mode()
def test_a_streamed_tile_and_an_input_page_are_decoded_too(stored: Written) -> None:
    layout, cache = stored.layout, stored.cache
    lanes, staging = SerialLanes(CPU), Staging(layout, STAGING_PAGES, CPU)
    transfer = CacheTransfer(stored.model, stored.tensors, staging)
    part = Part(stored.chunks[4:9], range(5), 5 * CHUNK)
    lanes.run(Lane.LINK_IN, transfer.load(2, part, staging.keys, staging.values))
    wanted = stored.approximate(cache.values[2], stored.pages)[4:9]
    assert torch.equal(staging.values[:5], wanted)
    inputs = [torch.full_like(plane, 1e4) for plane in cache.inputs]
    for work in transfer.send_inputs([stored.chunks[-1]], inputs, [6]):
        lanes.run(Lane.LINK_IN, work)
    for layer in range(layout.layer_count):
        wanted = stored.approximate(cache.inputs[layer], stored.pages)
        assert torch.equal(inputs[layer][6], wanted[-1])


@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.INT4])
def test_a_chunk_is_cut_without_decoding_it(
    encoding: Encoding, folder: Path, tmp_path: Path
) -> None:
    """A fetch that keeps a chunk's first tokens zeroes the other rows' bytes."""
    with written(folder, tmp_path, encoding, torch.float32) as stored:
        slot, arena = stored.chunks[3].slot, stored.tensors.arena
        with pytest.raises(RowsNotZero):
            arena.check_payload(slot, 5, stored.checksums[3])
        before = stored.tensors.keys[1][slot].clone()
        checksum = cut_tail(stored.tensors, slot, 5)
        arena.check_payload(slot, 5, checksum)
        assert torch.equal(stored.tensors.keys[1][slot][:, :5], before[:, :5])


@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.INT4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_cannot_be_encoded_is_not_stored(
    encoding: Encoding, value: float, folder: Path, tmp_path: Path
) -> None:
    with written(folder, tmp_path, encoding, torch.float32) as stored:
        stored.cache.inputs[1][stored.pages[0], 2, 9] = value
        job = WriteJob(0, stored.pages[0], stored.pages[0], tuple(IDS[:CHUNK]))
        with pytest.raises(Unencodable):
            copy_chunks(stored.cache, stored.tensors, [job], [stored.chunks[0].slot])


def test_a_worker_charges_its_budget_for_encoded_rooms(folder: Path) -> None:
    model = Decoder.load(folder, CPU, torch.float32)
    plans = [
        divide(
            model.shape,
            ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True, encoding=kind),
            budget_bytes=64 << 20,
            weight_bytes=model.weight_bytes,
            max_batch_size=2,
            max_batched_tokens=64,
        )
        for kind in Encoding
    ]
    native, int8, int4 = (plan.workspace_bytes for plan in plans)
    assert native < int4 < int8
    # A page on the device is native whatever the arena keeps.
    assert len({plan.page_bytes for plan in plans}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_gpu_loads_and_writes_back_what_the_cpu_does(
    encoding: Encoding, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Decoded beside copies, in parts of a small buffer; written in runs from spread pages."""
    device = torch.device("cuda:0")
    with (
        written(folder, tmp_path_factory.mktemp("given"), encoding, torch.float32) as given,
        store_runner(given.layout, tmp_path_factory.mktemp("other"), CHUNKS) as runner,
    ):
        other = runner.connection.tensors
        cache = DeviceCache(given.layout, given.cache.plan, device)
        for kind in ("keys", "values", "inputs"):
            for target, source in zip(
                getattr(cache, kind), getattr(given.cache, kind), strict=True
            ):
                target.copy_(source)
        slots = [chunk.slot for chunk in given.chunks]
        loader = ChunkLoader(given.tensors, device, page_count=8)
        shape = cache.keys[0].shape
        for layer in range(given.layout.layer_count):
            loaded = {kind: torch.zeros(shape, device=device) for kind in ("K", "V")}
            loader.load(layer, loaded, slots, given.pages)
            torch.cuda.current_stream(device).synchronize()
            for kind, planes in (("K", given.cache.keys), ("V", given.cache.values)):
                wanted = given.approximate(planes[layer], given.pages)
                torch.testing.assert_close(loaded[kind][given.pages].cpu(), wanted)
        jobs = [
            WriteJob(index, page, page, tuple(IDS[index * CHUNK : (index + 1) * CHUNK]))
            for index, page in enumerate(given.pages)
        ]
        # Slots in a row, pages that are not.
        row = list(range(CHUNKS))
        copy_chunks(cache, other, jobs, row)
        for layer in range(given.layout.layer_count):
            for kind in ("K", "V", "X"):
                stored = other.plane(layer, kind)[row]
                wanted = given.tensors.plane(layer, kind)[slots]
                if encoding is Encoding.NATIVE:
                    assert torch.equal(stored, wanted)
                else:
                    differing = (stored != wanted).float().mean()
                    assert differing < 0.01, "rounding alone may differ"
