"""Models with int8 weights: near the native ones, of the bytes that are said, resident or streamed.
About 15 s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live_bytes import held_bytes
from test_worker_host_weights import EVERYTHING, one_pass
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.checkpoint.resolve import model_fingerprint
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint.planning.weight_placement import OnHost, WeightSizes, place_weights, spread
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout, DataType, WeightFormat
from worker_service.kernels import panel_gemm
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.lanes.cpu import ThreadLanes
from worker_service.model.decoder import Decoder
from worker_service.startup.options import WorkerOptions
from worker_service.startup.worker import check_layout, load_worker
from worker_service.weights.matrices import weight_sizes

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

CPU = torch.device("cpu")
INT8 = WeightFormat.INT8
LAYERS = 6
CASES = ["opt", "llama-3", "gemma3"]


@pytest.fixture(autouse=True)
def panels() -> None:
    use(Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PANELS))


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case: str = request.param
    return write_tiny(case, tmp_path_factory.mktemp(case), num_hidden_layers=LAYERS)


def int8_model(folder: Path, on_host: OnHost, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.load(folder, CPU, dtype, on_host, weights=INT8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_weights_on_the_device(folder: Path, dtype: torch.dtype) -> None:
    """And near those of native weights."""
    resident = int8_model(folder, OnHost(), dtype)
    native = Decoder.load(folder, CPU, dtype)
    lanes = ThreadLanes(CPU)
    for on_host in (EVERYTHING_HERE, OnHost(spread(2, LAYERS), False, True)):
        model = int8_model(folder, on_host, dtype)
        model.use_lanes(lanes)
        for seed in range(3):
            found, wanted = one_pass(model, seed), one_pass(resident, seed)
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1], wanted[1])
    lanes.close()
    exact, near = one_pass(native, 0)[1], one_pass(resident, 0)[1]
    assert not torch.equal(exact, near)
    assert float((near - exact).std() / exact.std()) < 0.15


EVERYTHING_HERE = OnHost(tuple(range(LAYERS)), EVERYTHING.table, EVERYTHING.head)


def test_a_placement_takes_what_it_says(folder: Path) -> None:
    """Whatever is where, the decoder holds `device_bytes`, and streams `streamed_bytes`."""
    sizes = weight_sizes(read_decoder(folder), CPU, torch.float32, INT8)
    for free in (10, 2.2, 1.1, 1.0):
        placement = place_weights(
            sizes,
            free_bytes=int(sizes.total / free),
            least_cache_bytes=1000,
            most_cache_bytes=10**9,
        )
        model = int8_model(folder, placement.on_host)
        assert model.weight_bytes == placement.device_bytes
        assert model.host_weight_bytes() == placement.streamed_bytes
        tables = (model._embedding, model._positions) if placement.on_host.table else ()
        assert 0 <= held_bytes(model, beside=tables) - placement.device_bytes <= 128


def test_streamed_bytes_are_a_quarter_of_fp32(folder: Path) -> None:
    """Besides four bytes of each output channel, and padding to whole vectors."""
    native = Decoder.load(folder, CPU, torch.float32, EVERYTHING_HERE)
    streamed = int8_model(folder, EVERYTHING_HERE)
    widest = max(streamed.shape.hidden_size, streamed.shape.intermediate_size)
    least = min(streamed.shape.hidden_size, streamed.config.embedding_size)
    assert widest >= least >= 16
    share = streamed.host_weight_bytes() / native.host_weight_bytes()
    assert 0.25 < share <= 0.25 * (1 + 4 / least)


def test_weights_are_quantised_in_full_precision(folder: Path) -> None:
    """The bytes depend on the checkpoint, not on the type of the rows (here: without pairs)."""
    full = int8_model(folder, EVERYTHING_HERE, torch.float32)
    half = int8_model(folder, EVERYTHING_HERE, torch.float16)
    pairs = zip(full.host_memory, half.host_memory, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_sizes_of_a_shape() -> None:
    """By hand: OPT-125M in float32."""
    shape = BUILT_IN_SHAPES["opt-125m"]
    sizes, native = WeightSizes.of(shape, INT8), WeightSizes.of(shape)
    h, inner, vocabulary = 768, 3072, 50272
    layer = 4 * h * h + 2 * h * inner
    channels = 4 * h + inner + h
    assert native.layer == layer * shape.data_type.size
    assert sizes.layer == layer + 4 * channels
    assert sizes.table == vocabulary * h * shape.data_type.size
    assert sizes.head == vocabulary * (h + 4)
    assert not sizes.head_is_table


@pytest.mark.parametrize("kernels", ["flags", "linear=packed", "decode=products,linear=plain"])
async def test_what_cannot_run_is_refused_before_the_model_is_read(
    folder: Path, kernels: str
) -> None:
    options = WorkerOptions("0", folder, device="cpu", cpu_kernels=kernels, weights=INT8)
    with pytest.raises(InvalidArgument, match="--weights int8") as refused:
        await load_worker(options)
    assert refused.value.field == "cpu-kernels"


@pytest.mark.parametrize(
    ("mine", "stores"), [(INT8, WeightFormat.NATIVE), (WeightFormat.NATIVE, INT8)]
)
def test_a_store_of_the_other_format_is_refused(
    folder: Path, mine: WeightFormat, stores: WeightFormat
) -> None:
    shape = read_decoder(folder, DataType.FLOAT32).shape

    def layout(weights: WeightFormat) -> ArenaLayout:
        fingerprint = model_fingerprint(folder, weights)
        return ArenaLayout.of(
            shape, chunk_tokens=16, has_activations=False, model_fingerprint=fingerprint
        )

    options = WorkerOptions("0", folder, device="cpu", weights=mine)
    check_layout(layout(mine), shape, options)
    with pytest.raises(FailedPrecondition, match=f"made for --weights {stores.value}") as refused:
        check_layout(layout(stores), shape, options)
    assert refused.value.reason == "LAYOUT_MISMATCH"


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        for cached in (panel_gemm.library, panel_gemm._panel, compiler):
            cached.cache_clear()

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("SPLITPOINT_KERNEL_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.usefixtures("no_compiler")
async def test_a_host_without_a_compiler_is_refused(folder: Path) -> None:
    options = WorkerOptions("0", folder, device="cpu", data_type=DataType.FLOAT32, weights=INT8)
    with pytest.raises(FailedPrecondition, match="compiler"):
        await load_worker(options)
