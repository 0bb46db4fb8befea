"""Models larger than the device: exact tokens, a budget that is kept, weights in order."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, admission, own_decoder, run_all
from live_bytes import counting, held_bytes
from small_memory import LAYERS, small_engine, total_bytes
from stored_prefix import StoredPrefix, stored_prefix
from tiny_models import FAMILY_CASES, VOCABULARY, build_tiny, clear_prompt, write_tiny

from splitpoint.checkpoint.decoder import DecoderConfig, read_decoder
from splitpoint.errors import ResourceExhausted
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.planning.weight_placement import OnHost, place_weights, spread
from splitpoint.planning.weight_schedule import LAYER_PIECES
from splitpoint.shapes import ModelShape
from worker_service.device.memory import staging_bytes
from worker_service.engine.sampling import Sampling
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import EmulatedLink, Lanes, SerialLanes
from worker_service.lanes.timeline import Span
from worker_service.model.decoder import Decoder
from worker_service.model.linear import Linear
from worker_service.pipeline.executor import restore
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.task_work import Prefix
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.weights.matrices import head_rows, weight_sizes
from worker_service.weights.packing import Matrix

EVERYTHING = OnHost(tuple(range(LAYERS)), True, True)
NEW_TOKENS = 8
LENGTHS = (1, 3, 9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of 16 layers, each written when it is first asked for."""
    root, written = tmp_path_factory.mktemp("deep"), {}

    def folder(case: str) -> Path:
        if case not in written:
            written[case] = write_tiny(case, root / case, num_hidden_layers=LAYERS)
        return written[case]

    return folder


def delayed(lanes: Lanes, seed: int) -> Lanes:
    """Lanes that fall behind at random."""
    rng = random.Random(seed)

    def delay(_: Lane) -> None:
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0, 1e-4, 4e-4]))

    lanes.before = delay
    return lanes


# -- tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_tokens_are_exact_with_a_quarter_of_the_weights_memory(
    case: str, folders: Callable[[str], Path]
) -> None:
    """transformers', the serial twin's, and with lanes that are late; several at once."""
    folder = folders(case)
    model = build_tiny(case, num_hidden_layers=LAYERS)
    prompts, wanted = zip(*(clear_prompt(model, n, NEW_TOKENS) for n in LENGTHS), strict=True)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [admission(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    seed = random.randrange(1 << 30)
    print("seed", seed)
    late = delayed(ThreadLanes(CPU), seed)
    # All lanes in one family; late ones find what the others would.
    is_first = case == FAMILY_CASES[0]
    for lanes in (SerialLanes(CPU), ThreadLanes(CPU), late) if is_first else (late,):
        engine = small_engine(folder, lanes)
        assert engine.model.layer_weights is not None
        assert len(engine.model.layer_weights.keys) > LAYERS / 2
        transcript = run_all(engine, requests)
        assert [transcript.tokens[str(i)] for i in range(len(prompts))] == list(wanted)
        assert engine.cache.claims.promised_count == engine.cache.pages.used_count == 0
        lanes.close()


@pytest.mark.parametrize(
    ("case", "count"),
    [(case, 7) for case in (*FAMILY_CASES, "llama-biases", "opt-post-norm")]
    + [("llama-3", 3), ("opt", LAYERS)],
)
def test_bits_are_those_of_weights_on_the_device(
    case: str, count: int, folders: Callable[[str], Path]
) -> None:
    """Pass after pass, whichever layers are on the host."""
    folder = folders(case)
    resident = Decoder.load(folder, CPU, torch.float32)
    on_host = OnHost(spread(count, LAYERS), True, True)
    lanes = delayed(ThreadLanes(CPU), count)
    model = Decoder.load(folder, CPU, torch.float32, on_host)
    model.use_lanes(lanes)
    for seed in range(4):
        for found, wanted in zip(one_pass(model, seed), one_pass(resident, seed), strict=True):
            assert torch.equal(found, wanted)
    lanes.close()


@torch.inference_mode()
def one_pass(model: Decoder, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden and logits of five tokens that attend to themselves alone."""
    ids = torch.randint(3, VOCABULARY, (5,), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(5)
    hidden, rotary = model.embed(ids, positions), model.rotary(positions)
    for layer in model.visit():
        _, _, values = layer.project(layer.attention_input(hidden), rotary)
        group = model.shape.query_head_count // model.shape.kv_head_count
        hidden = layer.finish(hidden, values.repeat_interleave(group, 1).flatten(1))
    return hidden, model.logits(hidden)


# -- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["opt", "qwen3"])
def test_device_memory_stays_within_the_budget(case: str, folders: Callable[[str], Path]) -> None:
    """Count the tensors that are held, and those that operations allocate."""
    lanes = ThreadLanes(CPU)
    engine = small_engine(folders(case), lanes)
    plan, model = engine.memory_plan, own_decoder(engine)
    assert total_bytes(folders(case)) >= 4 * plan.budget_bytes
    assert plan.weight_bytes == model.weight_bytes
    host_tables = (model._embedding, model._positions)
    held = held_bytes(engine, beside=host_tables)
    staging = staging_bytes(model.shape, engine.cache.layout, plan.staging_pages)
    # Beside the plan's: frequencies of RoPE.
    assert 0 <= held - plan.weight_bytes - plan.cache_capacity_bytes - staging <= 64
    requests = [
        admission(str(i), prompt_of(3 + i, i), Sampling(max_tokens=3, ignore_eos=True))
        for i in range(6)
    ]
    with counting() as made:
        transcript = run_all(engine, requests)
    assert [len(transcript.tokens[str(i)]) for i in range(6)] == [3] * 6
    assert 0 < made.peak <= plan.workspace_bytes - staging
    assert held + made.peak <= plan.budget_bytes
    assert held_bytes(engine, beside=host_tables) == held
    lanes.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.mark.parametrize("case", [*FAMILY_CASES, "llama", "opt-post-norm", "llama-biases"])
def test_a_placement_takes_what_it_says(case: str, folders: Callable[[str], Path]) -> None:
    """Whatever is where, the decoder holds `device_bytes`, and streams `streamed_bytes`."""
    folder = folders(case)
    sizes = weight_sizes(read_decoder(folder), CPU, torch.float32)
    for free in (10, 4, 2.2, 1.4, 1.1, 1.0) if case == FAMILY_CASES[0] else (4, 1.1):
        placement = place_weights(
            sizes,
            free_bytes=int(sizes.total / free),
            least_cache_bytes=1000,
            most_cache_bytes=10**9,
        )
        model = Decoder.load(folder, CPU, torch.float32, placement.on_host)
        assert model.weight_bytes == placement.device_bytes
        assert model.host_weight_bytes() == placement.streamed_bytes
        tables = (model._embedding, model._positions) if placement.on_host.table else ()
        frequencies = 64 if model.config.local_rope is None else 128
        assert 0 <= held_bytes(model, beside=tables) - placement.device_bytes <= frequencies


def test_a_budget_that_even_the_slots_exceed_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ResourceExhausted, match=r"weights take \d+ KiB, workspace") as refused:
        small_engine(folders("llama-3"), SerialLanes(CPU), share=8)
    assert int(refused.value.metadata["needed_bytes"]) > total_bytes(folders("llama-3")) // 8


# -- the link -------------------------------------------------------------------------


def test_weights_come_in_order_and_one_layer_ahead(folders: Callable[[str], Path]) -> None:
    """Each step loads every layer on the host once, W_K and W_V first, as the trace of a slow
    link shows; while a layer computes the next one is on its way."""
    lanes = ThreadLanes(CPU, EmulatedLink(2e7))
    engine = small_engine(folders("llama-3"), lanes)
    assert engine.trace is not None
    run_all(engine, [admission("a", prompt_of(1), Sampling(max_tokens=3, ignore_eos=True))])
    engine.trace.extend(lanes.finish())
    lanes.close()
    weights = [span for span in engine.trace.spans if span.lane is Lane.WEIGHTS_IN]
    layers = [span for span in weights if span.layer is not None]
    names = [piece.value for piece in LAYER_PIECES]
    assert engine.model.layer_weights is not None
    host = engine.model.layer_weights.keys
    wanted = [(name, layer) for layer in host for name in names]
    came = [(span.name, span.layer) for span in sorted(layers, key=lambda span: span.start)]
    assert came[: 3 * len(wanted)] == 3 * wanted
    # Behind the last step what the next one would need first, as far as there are slots.
    assert came[3 * len(wanted) :] == wanted[: 2 * len(names)]
    for before, after in itertools.pairwise(sorted(weights, key=lambda span: span.start)):
        assert before.end <= after.start + 1e-9, "both are on one link"
    sent = sum(span.amount for span in weights)
    assert sent >= 3 * engine.model.host_weight_bytes()


def test_matrices_out_of_turn_are_an_error_and_nothing_else(
    folders: Callable[[str], Path],
) -> None:
    """A slot's content changes: only its layer may multiply with it, in its turn."""
    lanes = ThreadLanes(CPU)
    model = Decoder.load(folders("llama-3"), CPU, torch.float32, EVERYTHING)
    rows = torch.zeros(1, 64)
    with pytest.raises(RuntimeError, match="need lanes"):
        next(model.visit())
    model.use_lanes(lanes)
    with pytest.raises(RuntimeError, match="out of turn"):
        model.layers[0].query(rows)
    layers = model.visit()
    first, second = next(layers), next(layers)
    second.query(rows)
    with pytest.raises(RuntimeError, match="out of turn"):
        first.query(rows)
    # A pass that breaks off leaves the weights to the next one.
    layers.close()
    resident = Decoder.load(folders("llama-3"), CPU, torch.float32)
    assert torch.equal(one_pass(model, 1)[0], one_pass(resident, 1)[0])
    lanes.close()


def test_an_error_on_the_weights_lane_ends_the_step(folders: Callable[[str], Path]) -> None:
    lanes = ThreadLanes(CPU)
    model = Decoder.load(folders("llama-3"), CPU, torch.float32, EVERYTHING)
    model.use_lanes(lanes)
    one_pass(model, 0)

    def fail(lane: Lane) -> None:
        if lane is Lane.WEIGHTS_IN:
            raise OSError("the bus is gone")

    lanes.before = fail
    with pytest.raises(OSError, match="the bus is gone"):
        one_pass(model, 0)
    lanes.finish_after_error()
    lanes.close()


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (7, 13), (1, 5), (130, 48), (24, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_its_bytes(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Copied over another one of its shape it multiplies alike; its memory outlives it."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(size, generator=generator).to(dtype)
    rows = torch.randn((3, size[1]), generator=generator).to(dtype)
    matrix, slot = Matrix(weight.clone()), Matrix(torch.zeros(size, dtype=dtype))
    assert matrix.size_bytes == len(matrix.raw()) >= weight.numel() * weight.element_size()
    slot.raw().copy_(Matrix(weight.clone()).raw())
    assert torch.equal(Linear(slot)(rows), Linear(matrix)(rows))
    torch.testing.assert_close(Linear(slot)(rows), rows @ weight.T, rtol=2e-2, atol=2e-2)


def test_pieces_of_a_head_cover_it() -> None:
    for vocabulary in (1, 5, 8, 9, 127, 128, 1000):
        shape = ModelShape("tiny", "llama", 1, 16, 2, 1, 8, 24, vocabulary, 64)
        pieces = head_rows(DecoderConfig.of_shape(shape))
        assert {len(piece) for piece in pieces} == {len(pieces[0])}
        assert sorted({row for piece in pieces for row in piece}) == list(range(vocabulary))
        assert len(pieces) <= 8


# -- restores -------------------------------------------------------------------------


RESTORED = ("llama-3", "opt", "qwen3", "gemma2", "gemma3")
SCHEDULES = (Schedule.PIPELINED, Schedule.SERIAL, Schedule.COLUMN)
SPLITS = (0, 1, 33, 64, 70)


@pytest.fixture(scope="module", params=RESTORED)
def stored(
    request: pytest.FixtureRequest,
    folders: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, StoredPrefix]]:
    folder = folders(request.param)
    model = Decoder.load(folder, CPU, torch.float32)
    with stored_prefix(model, tmp_path_factory.mktemp("arena"), prompt_of(70)) as prefix:
        yield folder, prefix


@torch.inference_mode()
def restored(
    model: Decoder, stored: StoredPrefix, lanes: Lanes, split: int, schedule: Schedule
) -> tuple[list[torch.Tensor], list[Span]]:
    """All planes after a restore, and its spans."""
    keys, values = stored.empty_cache(8)
    transfer = CacheTransfer(model, stored.tensors, Staging(stored.layout, 4, CPU))
    pages = list(range(len(stored.chunks)))
    prefix = Prefix(stored.chunks, 0, pages, stored.token_ids, 70, split)
    spans = restore(transfer, lanes, prefix, keys, values, schedule=schedule, tile_tokens=16)
    return [*keys, *values], spans


# Every schedule and split in one family; of the others one split, as it is served by default.
@pytest.mark.parametrize(
    ("stored", "schedule", "splits"),
    [
        *((case, SCHEDULES[0], SPLITS[2:3]) for case in RESTORED[1:]),
        *(
            pytest.param(
                case, schedule, SPLITS, marks=[] if case == RESTORED[0] else pytest.mark.chaos
            )
            for case in RESTORED
            for schedule in SCHEDULES
        ),
    ],
    indirect=["stored"],
)
def test_restores_bring_only_the_weights_they_rebuild_with(
    stored: tuple[Path, StoredPrefix], schedule: Schedule, splits: tuple[int, ...]
) -> None:
    """The same bits as with weights on the device, between passes that read them all."""
    folder, prefix = stored
    host = spread(11, LAYERS)
    model = Decoder.load(folder, CPU, torch.float32, OnHost(host, True, True))
    resident = prefix.model
    for lanes in (SerialLanes(CPU), delayed(ThreadLanes(CPU), 3)):
        model.use_lanes(lanes)
        for split in splits:
            assert torch.equal(one_pass(model, split)[0], one_pass(resident, split)[0])
            lanes.finish()
            wanted, _ = restored(resident, prefix, lanes, split, schedule)
            found, spans = restored(model, prefix, lanes, split, schedule)
            assert all(torch.equal(*planes) for planes in zip(found, wanted, strict=True))
            weights = [span for span in spans if span.lane is Lane.WEIGHTS_IN]
            assert [(span.name, span.layer) for span in weights] == (
                [("W_K W_V", layer) for layer in host] if split else []
            )
        lanes.close()


def test_rebuilding_begins_before_the_last_weight_has_come(
    stored: tuple[Path, StoredPrefix],
) -> None:
    folder, prefix = stored
    lanes = ThreadLanes(CPU, EmulatedLink(2e7))
    model = Decoder.load(folder, CPU, torch.float32, EVERYTHING)
    model.use_lanes(lanes)
    _, spans = restored(model, prefix, lanes, 64, Schedule.PIPELINED)
    weights = {span.layer: span for span in spans if span.lane is Lane.WEIGHTS_IN}
    rebuilds = [span for span in spans if span.name == "rebuild"]
    assert len(rebuilds) == 4 * LAYERS
    assert all(weights[span.layer].end <= span.start for span in rebuilds)
    assert min(span.start for span in rebuilds) < max(span.end for span in weights.values())
    lanes.close()
