"""Chunks that an arena keeps as int8 or int4: written back from pages, and restored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny

from splitpoint.arena.records import RowsNotZero
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.shapes import ArenaLayout, DataType, Encoding
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import STAGING_PAGES, divide
from worker_service.fetching.stream import cut_tail
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder
from worker_service.pipeline.chunk_loader import ChunkLoader
from worker_service.pipeline.restore import Prefix, restore
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.mirror_cache import MirrorCache, name_of
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
    mirror: MirrorCache
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


def written(folder: Path, encoding: Encoding, dtype: torch.dtype) -> Written:
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
    mirror = MirrorCache(layout, 16 << 20)
    for plane in (*mirror.tensors.keys, *mirror.tensors.values, *mirror.tensors.inputs):
        plane.fill_(7)  # bytes of an earlier use
    places = [place for index in range(2 * CHUNKS) for place in mirror.grant(1) if index % 3]
    places = places[:CHUNKS]
    # Rows past the tokens may hold anything at all, and it must not get out.
    cache.values[1][pages[-1], :, TOKENS % CHUNK :] = float("nan")
    checksums = copy_chunks(cache, mirror.tensors, jobs, [slot for slot, _ in places])
    chunks = []
    for job, place, checksum in zip(jobs, places, checksums, strict=True):
        key = hashlib.sha256(str(job.chunk_index).encode()).digest()
        chunks.append(mirror.publish(place, name_of(key, checksum), key, len(job.token_ids)))
    return Written(model, cache, mirror, pages, tuple(chunks), checksums)


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
def stored(request: pytest.FixtureRequest, folder: Path) -> Written:
    return written(folder, *request.param)


def test_slots_hold_the_documented_bytes(stored: Written) -> None:
    layout, arena = stored.layout, stored.mirror.arena
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
    transfer = CacheTransfer(stored.model, stored.mirror.tensors, staging)
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
    transfer = CacheTransfer(stored.model, stored.mirror.tensors, staging)
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
def test_a_chunk_is_cut_without_decoding_it(encoding: Encoding, folder: Path) -> None:
    """A fetch that keeps a chunk's first tokens zeroes the other rows' bytes."""
    stored = written(folder, encoding, torch.float32)
    slot, arena = stored.chunks[3].slot, stored.mirror.arena
    with pytest.raises(RowsNotZero):
        arena.check_payload(slot, 5, stored.checksums[3])
    before = stored.mirror.tensors.keys[1][slot].clone()
    checksum = cut_tail(stored.mirror.tensors, slot, 5)
    arena.check_payload(slot, 5, checksum)
    assert torch.equal(stored.mirror.tensors.keys[1][slot][:, :5], before[:, :5])


@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.INT4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_cannot_be_encoded_is_not_stored(
    encoding: Encoding, value: float, folder: Path
) -> None:
    stored = written(folder, encoding, torch.float32)
    stored.cache.inputs[1][stored.pages[0], 2, 9] = value
    job = WriteJob(0, stored.pages[0], stored.pages[0], tuple(IDS[:CHUNK]))
    with pytest.raises(Unencodable):
        copy_chunks(stored.cache, stored.mirror.tensors, [job], [stored.chunks[0].slot])


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
def test_a_gpu_loads_and_writes_back_what_the_cpu_does(folder: Path, encoding: Encoding) -> None:
    """Decoded beside copies, in parts of a small buffer; written in runs from spread pages."""
    device = torch.device("cuda:0")
    given = written(folder, encoding, torch.float32)
    cache = DeviceCache(given.layout, given.cache.plan, device)
    for kind in ("keys", "values", "inputs"):
        for target, source in zip(getattr(cache, kind), getattr(given.cache, kind), strict=True):
            target.copy_(source)
    slots = [chunk.slot for chunk in given.chunks]
    loader = ChunkLoader(given.mirror.tensors, device, page_count=8)
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
    other = MirrorCache(given.layout, 16 << 20)
    # Slots in a row, pages that are not.
    places = [place for _ in range(CHUNKS) for place in other.grant(1)]
    copy_chunks(cache, other.tensors, jobs, [slot for slot, _ in places])
    for layer in range(given.layout.layer_count):
        for kind in ("K", "V", "X"):
            stored = other.tensors.plane(layer, kind)[[slot for slot, _ in places]]
            wanted = given.mirror.tensors.plane(layer, kind)[slots]
            if encoding is Encoding.NATIVE:
                assert torch.equal(stored, wanted)
            else:
                differing = (stored != wanted).float().mean()
                assert differing < 0.01, "rounding alone may differ"
