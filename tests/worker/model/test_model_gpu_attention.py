"""Attention on a CUDA device equals a CPU's in fp32; it makes no scores and copies no pages."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from worker_service.model.attention import decode_partial, has_fused_kernel, prefill
from worker_service.model.attention_plan import DecodePlan, PrefillPlan
from worker_service.model.library_attention import library_of
from worker_service.model.span_attention import SpanView, Variant, kernels_of, try_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
CHUNK = 64
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_pool(pages: int, heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(pages)
    shape = (pages, heads, CHUNK, head_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("prefix", "new"), [(0, 130), (333, 1), (333, 200)])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prefill_equals_the_cpu(
    dtype: torch.dtype,
    heads: tuple[int, int],
    prefix: int,
    new: int,
    window: int | None,
    cap: float | None,
) -> None:
    pages = random.Random(0).sample(range(20), -(-prefix // CHUNK))
    keys, values = random_pool(20, heads[1], 128, dtype)
    generator = torch.Generator().manual_seed(1)
    queries, new_keys, new_values = (
        torch.randn(new, count, 128, generator=generator).to(dtype)
        for count in (heads[0], heads[1], heads[1])
    )
    results = []
    for device, kind in ((CPU, torch.float32), (CUDA, dtype)):
        plan = PrefillPlan.of_prefix(
            pages, prefix, new, chunk_tokens=CHUNK, windows=[window], device=device
        )
        attended = prefill(
            queries.to(device, kind),
            new_keys.to(device, kind),
            new_values.to(device, kind),
            keys.to(device, kind),
            values.to(device, kind),
            plan,
            window=window,
            scale=128**-0.5,
            cap=cap,
        )
        results.append(attended.float().cpu())
    wanted, got = results
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3000])
def test_a_grouped_prefill_over_a_long_prefix_makes_no_scores(
    dtype: torch.dtype, window: int | None
) -> None:
    prefix, new, query_heads, kv_heads = 16_384, 1024, 32, 8
    pools = [
        torch.randn(prefix // CHUNK, kv_heads, CHUNK, 128, device=CUDA, dtype=dtype)
        for _ in range(2)
    ]
    queries, new_keys, new_values = (
        torch.randn(new, count, 128, device=CUDA, dtype=dtype)
        for count in (query_heads, kv_heads, kv_heads)
    )
    half = dtype is not torch.float32
    keys = new_keys.transpose(0, 1)
    assert has_fused_kernel(queries, keys, keys) == half
    plan = PrefillPlan.of_prefix(
        range(prefix // CHUNK), prefix, new, chunk_tokens=CHUNK, windows=[window], device=CUDA
    )
    torch.cuda.synchronize(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    prefill(queries, new_keys, new_values, pools[0], pools[1], plan, window=window, scale=128**-0.5)
    torch.cuda.synchronize(CUDA)
    peak = torch.cuda.max_memory_allocated(CUDA) - before
    scores = query_heads * new * (prefix + new) * dtype.itemsize
    cache = 2 * kv_heads * (prefix + new) * 128 * dtype.itemsize
    assert peak < 0.5 * scores + 3 * cache
    assert peak < 4 * cache + (200 << 20)


@pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))
@pytest.mark.parametrize("has_cap", [False, True])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (28, 4)])
def test_the_kernels_of_usual_models_are_built(
    heads: tuple[int, int], has_cap: bool, device: int
) -> None:
    """On each card, by a thread that begins with the first one."""
    card = torch.device("cuda", device)
    variant = Variant(torch.bfloat16, 64, 128, *heads, has_cap=has_cap)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(try_kernels, card, [variant]).result() is not None


@pytest.mark.parametrize("kind", ["spans", "library"])
@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decode_equals_the_cpu(
    dtype: torch.dtype,
    heads: tuple[int, int],
    window: int | None,
    cap: float | None,
    kind: str,
) -> None:
    """With pages that are spread, and shared by two sequences."""
    assert kernels_of(CUDA) is not None, "Triton could not build the kernel: see the log"
    library = library_of(CUDA)
    if kind == "library" and (library is None or dtype == torch.float32):
        pytest.skip("FlashInfer is not installed, or does not take fp32")
    lengths = [1, 64, 65, 2000, 700]
    rng = random.Random(0)
    tables = [[rng.randrange(100) for _ in range(-(-length // CHUNK))] for length in lengths]
    tables[4][:5] = tables[3][:5]
    keys, values = random_pool(100, heads[1], 128, dtype)
    queries = torch.randn(5, heads[0], 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = []
    for device, element in ((CPU, torch.float32), (CUDA, dtype)):
        plan = DecodePlan.of_sequences(
            tables, lengths, chunk_tokens=CHUNK, windows=[window], device=device
        )
        if device is CUDA:
            assert isinstance(plan.views[window], SpanView)
            assert bool(plan.whole) == (library is not None)
            if kind == "spans":
                plan = replace(plan, whole={})
        part = decode_partial(
            queries.to(device, element),
            keys.to(device, element),
            values.to(device, element),
            plan,
            window=window,
            scale=128**-0.5,
            cap=cap,
        )
        results.append(part.attended(torch.float32).cpu())
    if kind == "library":
        assert library is not None
        assert library.is_usable, "FlashInfer failed: see the log"
    wanted, got = results
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_spread_pages_are_not_copied() -> None:
    pages = random.Random(1).sample(range(8192), 4096)
    pools = [torch.zeros(8192, 8, CHUNK, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    queries = torch.randn(16, 32, 128, device=CUDA, dtype=torch.bfloat16)
    tables = [pages[256 * row : 256 * (row + 1)] for row in range(16)]
    plan = DecodePlan.of_sequences(
        tables, [256 * CHUNK] * 16, chunk_tokens=CHUNK, windows=[None], device=CUDA
    )
    decode_partial(queries, pools[0], pools[1], plan, window=None, scale=0.1)  # compiles
    torch.cuda.synchronize(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    decode_partial(queries, pools[0], pools[1], plan, window=None, scale=0.1)
    torch.cuda.synchronize(CUDA)
    read = 2 * len(pages) * pools[0][0].nbytes
    assert torch.cuda.max_memory_allocated(CUDA) - before < 0.05 * read
