"""Triton's kernels compile for GPUs of three generations, without one.

Triton's own compiler and ptxas need no device. Whether the code is right is shown by Triton's
interpreter (tests/worker/pipeline/test_worker_gather.py); how fast it is, by `make gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def cubin_bytes(kernel, signature, constants, architecture, options=None):
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    assert list(types) == [parameter.name for parameter in kernel.params], kernel.params
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    # What each multiprocessor since Ampere has, the smallest included.
    assert compiled.metadata.shared <= 99 << 10
    return len(compiled.asm["cubin"])

def not_specialized(kernel):
    return {each.name for each in kernel.params if each.do_not_specialize}
"""

# Runs each script that it reads, and answers with the error that it ends with.
READ = """
import json
import traceback
for line in sys.stdin:
    error = ""
    try:
        exec(json.loads(line), dict(globals()))
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps(error), flush=True)
"""

GATHER = """
from worker_service.pipeline.gather import BLOCK_WORDS
from worker_service.pipeline.gather_kernels import gather_slots
words, number = "*i64", "i32"
signature = dict(target=words, source=words, slots=words, pages=words)
signature |= dict(slot_words=number, blocks_per_slot=number, block_count=number)
for architecture in (80, 90, 100):
    assert cubin_bytes(gather_slots, signature, {"block": BLOCK_WORDS}, architecture) > 1000
# What differs between transfers selects no other kernel.
assert not_specialized(gather_slots) == {"slots", "pages", "blocks_per_slot", "block_count"}
"""

ROWS = """
from worker_service.retrieval.gather_rows import ROWS
from worker_service.pipeline.gather_kernels import gather_rows_by_index
words, number = "*i64", "i32"
signature = dict(target=words, source=words, sources=words, targets=words)
signature |= dict(count=number, groups=number)
for row_words, block in ((32, 32), (10, 16)):
    constants = dict(row_words=row_words, rows=ROWS, block=block)
    assert cubin_bytes(gather_rows_by_index, signature, constants, 90) > 1000
assert not_specialized(gather_rows_by_index) == {"sources", "targets", "count", "groups"}
"""

ENCODED_ROWS = """
from worker_service.retrieval.gather_rows import ROWS
from worker_service.pipeline.gather_kernels import decode_rows_by_index
number = "i32"
for element, width, has_minimum in (("bf16", 64, False), ("fp32", 80, True)):
    signature = dict(target="*" + element, source="*i16", sources="*i64", targets="*i64")
    signature |= dict(count=number, groups=number)
    group = 64 if has_minimum else 128
    parameters = -(-width // group) * (2 if has_minimum else 1)
    words = parameters + -(-width // (4 if has_minimum else 2))
    constants = dict(
        row_words=words, width=width, group=group, parameter_words=parameters,
        has_minimum=has_minimum, rows=ROWS, word_block=64, block=1 << (width - 1).bit_length(),
    )
    assert cubin_bytes(decode_rows_by_index, signature, constants, 90) > 1000
assert not_specialized(decode_rows_by_index) == {"sources", "targets", "count", "groups"}
"""

SPANS = """
from worker_service.kernels.choice import use_one_order
from worker_service.device.memory import UNIT_ROWS
from worker_service.model.span_attention import _block, _row_block, member_block
from worker_service.model.span_kernel import attend_spans, merge_spans
sums = dict.fromkeys(["weighted", "peaks", "totals"], "*fp32")
tables = dict.fromkeys(["units", "lows", "highs", "starts", "owners"], "*i32")
prompt = dict.fromkeys(["page_count", "page_position", "query_position", "window"], "i32")
prompt |= dict.fromkeys(["query_count", "block_queries", "is_prompt", "is_masked"], "i32")
tables["seen"] = "*u8"
heads = dict(query_heads="i32", kv_heads="i32")
least = torch.finfo(torch.float32).min
for dtype, head_dim, chunk, group, in_one_order in SHAPES:
    use_one_order(in_one_order)
    element = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    pools = dict.fromkeys(["queries", "keys", "values"], "*" + dtype)
    signature = sums | pools | tables | prompt | dict(scale="fp32", cap="fp32") | heads
    unit_rows = min(chunk, UNIT_ROWS)
    constants = dict(
        has_cap=True, group=group, chunk=chunk, head_dim=head_dim, unit_rows=unit_rows,
        member_block=member_block(group, element),
        row_block=_row_block(unit_rows, _block(head_dim)), dim_block=_block(head_dim), least=least,
    )
    assert cubin_bytes(attend_spans, signature, constants, 90) > 1000
# Nor between a decoded row, guesses and a prompt.
assert not_specialized(attend_spans) == {*tables, *prompt}
merged = dict.fromkeys(["merged", "merged_peaks", "merged_totals"], "*fp32")
signature = merged | sums | dict(firsts="*i32", listing="*i32", query_heads="i32")
constants = dict(is_listed=True, head_dim=128, dim_block=128, least=least)
assert cubin_bytes(merge_spans, signature, constants, 90) > 1000
assert not_specialized(merge_spans) == {"firsts", "listing"}
"""

PRODUCTS = """
from worker_service.kernels.tile_gemm import tiles_of
from worker_service.kernels.tile_gemm_kernel import multiply_tiles
for dtype, element in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
    tiles = tiles_of(1 << 17, element)
    signature = dict.fromkeys(["outputs", "rows", "weights", "bias", "other"], "*" + dtype)
    signature |= dict.fromkeys(["row_count", "in_features", "out_features"], "i32")
    constants = dict(
        has_bias=True, operation=2, row_tile=tiles.rows, column_tile=tiles.columns,
        depth_tile=tiles.depth,
    )
    # Generations differ in their units for matrices, which fp32 does not use.
    for architecture in (80, 90, 100) if dtype == "bf16" else (90,):
        options = dict(num_warps=tiles.warps, num_stages=tiles.stages)
        assert cubin_bytes(multiply_tiles, signature, constants, architecture, options) > 1000
# One kernel for all numbers of rows.
assert not_specialized(multiply_tiles) == {"row_count"}
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that runs scripts: other tests interpret the same kernels."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT + READ],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def run(compiler: subprocess.Popen[str], script: str) -> None:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    print(json.dumps(script), file=compiler.stdin, flush=True)
    assert json.loads(compiler.stdout.readline()) == ""


def test_the_gather_kernel_compiles_once_for_all_transfers(
    compiler: subprocess.Popen[str],
) -> None:
    run(compiler, GATHER)


def test_the_kernel_of_single_rows_compiles_once_for_all_steps(
    compiler: subprocess.Popen[str],
) -> None:
    run(compiler, ROWS)


def test_the_kernel_of_encoded_rows_compiles_once_for_all_steps(
    compiler: subprocess.Popen[str],
) -> None:
    run(compiler, ENCODED_ROWS)


def test_products_of_one_order_compile_once_for_all_numbers_of_rows(
    compiler: subprocess.Popen[str],
) -> None:
    run(compiler, PRODUCTS)


@pytest.mark.parametrize(
    "shapes",
    [
        [("bf16", 128, 64, 4, True), ("fp32", 128, 64, 8, False)],
        pytest.param(
            [("bf16", 256, 512, 2, True), ("fp16", 80, 16, 1, False)], marks=pytest.mark.chaos
        ),
    ],
    ids=["usual", "others"],
)
def test_the_attention_kernels_compile_once_for_all_batches(
    compiler: subprocess.Popen[str], shapes: list[tuple[str, int, int, int, bool]]
) -> None:
    run(compiler, f"SHAPES = {shapes}\n{SPANS}")
