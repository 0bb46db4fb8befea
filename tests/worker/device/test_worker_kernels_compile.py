"""Triton's kernels compile for GPUs of three generations, without one: 30 s.

Triton's own compiler and ptxas need no device. Whether the code is right is shown by Triton's
interpreter (tests/worker/pipeline/test_worker_gather.py); how fast it is, by `make gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def cubin_bytes(kernel, signature, constants, architecture):
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    assert list(types) == [parameter.name for parameter in kernel.params], kernel.params
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    return len(compiled.asm["cubin"])

def not_specialized(kernel):
    return {each.name for each in kernel.params if each.do_not_specialize}
"""

GATHER = """
from worker_service.pipeline.gather import BLOCK_WORDS
from worker_service.pipeline.gather_kernel import gather_slots
words, number = "*i64", "i32"
signature = dict(target=words, source=words, slots=words, pages=words)
signature |= dict(slot_words=number, blocks_per_slot=number, block_count=number)
for architecture in (80, 90, 100):
    assert cubin_bytes(gather_slots, signature, {"block": BLOCK_WORDS}, architecture) > 1000
# What differs between transfers selects no other kernel.
assert not_specialized(gather_slots) == {"slots", "pages", "blocks_per_slot", "block_count"}
"""


def run(script: str, folder: Path) -> None:
    """Run in a process of its own: other tests interpret the same kernels."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT + script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr


def test_the_gather_kernel_compiles_once_for_all_transfers(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run(GATHER, tmp_path)
