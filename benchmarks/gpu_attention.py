"""Attention alone, as a worker calls it: each kernel beside its fallback, and the memory it takes.

    python -m benchmarks.gpu_attention [--device cuda] [--tiny] [--json] [--output FILE]

Decoding reads spread pages by FlashInfer (if installed), by Triton's spans, and by plain
products, which gather them. A grouped prefill over a prefix runs with the fused kernel, and as
SDPA runs it with a mask. A CPU has plain products only.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.harness import finish, parser_of
from worker_service.device.upload import Upload
from worker_service.model.attention import decode_partial, prefill
from worker_service.model.attention_plan import DecodePlan, PageView, PrefillPlan
from worker_service.model.library_attention import library_of
from worker_service.model.span_attention import kernels_of

CHUNK = 64
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
REPEATS = 20


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to prove the script")
    given = parser.parse_args()
    device = torch.device(given.device)
    with torch.inference_mode():
        result = {
            "benchmark": "gpu attention",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "decode": decode(device, *((2, 200) if given.tiny else (32, 8192))),
            "prefill": prefilled(device, *((128, 64) if given.tiny else (16_384, 1024))),
        }
    finish(given, result, report)


def report(result: Mapping[str, Any]) -> None:
    """Print a line for each way."""
    for part in ("decode", "prefill"):
        for way, found in result[part].items():
            memory = found.get("peak_bytes")
            peak = "" if memory is None else f" {memory / 2**20:10,.1f} MiB"
            print(f"{part:<8} {way:<17} {found['milliseconds']:10.3f} ms{peak}")


def decode(device: torch.device, batch: int, length: int) -> dict[str, dict[str, float]]:
    """Return milliseconds and peak bytes of each way over pages in random order."""
    count = batch * -(-length // CHUNK)
    numbers = random.Random(0).sample(range(3 * count), count)
    tables = [numbers[row::batch] for row in range(batch)]
    shape = (3 * count, KV_HEADS, CHUNK, HEAD_DIM)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    queries = torch.randn(batch, QUERY_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    plan = DecodePlan.of_sequences(
        tables, [length] * batch, chunk_tokens=CHUNK, windows=[None], device=device
    )
    ways = {"products": replace(plan, whole={}, views={None: gathered(tables, length, device)})}
    if kernels_of(device) is not None:
        ways["spans"] = replace(plan, whole={})
    if library_of(device) is not None:
        ways["flashinfer"] = plan

    def run(way: DecodePlan) -> None:
        decode_partial(queries, keys, values, way, window=None, scale=SCALE)

    return {name: measured(device, partial(run, way)) for name, way in ways.items()}


def gathered(tables: list[list[int]], length: int, device: torch.device) -> PageView:
    """Return the plan of plain products for spread pages."""
    owner = np.repeat(np.arange(len(tables)), len(tables[0]))
    rows = np.arange(len(tables[0]) * CHUNK).reshape(-1, CHUNK) < length
    limit = np.where(np.tile(rows, (len(tables), 1)), np.inf, np.finfo(np.float32).min)
    upload = Upload(device)
    view = PageView(
        upload.table([page for table in tables for page in table]),
        reader=upload.table(owner),
        owner=upload.table(owner),
        limit=upload.table(limit, np.float32).unsqueeze(1),
    )
    upload.send()
    return view


def prefilled(device: torch.device, prefix: int, new: int) -> dict[str, dict[str, float]]:
    """Return the same of a grouped prefill of `new` tokens, as we run it and with a mask."""
    dtype = torch.bfloat16
    pages = prefix // CHUNK
    shape = (pages, KV_HEADS, CHUNK, HEAD_DIM)
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    queries, new_keys, new_values = (
        torch.randn(new, heads, HEAD_DIM, device=device, dtype=dtype)
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    )
    plan = PrefillPlan.of_prefix(
        range(pages), prefix, new, chunk_tokens=CHUNK, windows=[None], device=device
    )
    whole_keys, whole_values = (
        torch.cat((plane.transpose(0, 1).flatten(1, 2), rows.transpose(0, 1)), dim=1).unsqueeze(0)
        for plane, rows in ((keys, new_keys), (values, new_values))
    )

    def ours() -> None:
        prefill(queries, new_keys, new_values, keys, values, plan, window=None, scale=SCALE)

    def masked() -> None:
        seen = torch.ones(new, prefix + new, dtype=torch.bool, device=device).tril(prefix)
        functional.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            whole_keys,
            whole_values,
            attn_mask=seen,
            scale=SCALE,
            enable_gqa=True,
        )

    return {"ours": measured(device, ours), "sdpa with a mask": measured(device, masked)}


def measured(device: torch.device, call: Callable[[], None]) -> dict[str, float]:
    """Return the median time and, on a GPU, the most memory beyond what was there before."""
    call()
    samples = []
    wait(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        wait(device)
        samples.append(1e3 * (time.perf_counter() - started))
    found = {"milliseconds": round(statistics.median(samples), 4)}
    if device.type == "cuda":
        found["peak_bytes"] = float(torch.cuda.max_memory_allocated(device) - before)
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
