"""The kernels' promises of equal bits hold on a processor without AVX-512, too.

Its compiler makes products part of sums where the source does not forbid it. The kernels are
compiled for such a processor here, in a process of its own, and a few of their tests run.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from splitpoint.host.processor import compiler, instruction_sets
from worker_service.kernels.compiled import CACHE_FOLDER

FOLDER = Path(__file__).parent
CHECKS = (
    "test_worker_one_order.py::test_a_prefill_is_attention_and_has_the_bits_of_decoded_rows"
    "[float32-1]",
    "test_worker_panel_gemm.py::test_products_are_right_and_rows_independent"
    "[GELU_TANH-(150, 70)-torch.float32]",
    "test_worker_experts.py::test_rows_are_what_their_experts_make_of_them[SILU-same-torch.float32]",
    *(
        f"test_worker_experts.py::{test}[{form}]"
        for test in (
            "test_a_row_at_a_time_is_what_many_rows_are",
            "test_one_row_of_an_expert_beside_many_of_another",
        )
        for form in ("same", "int4", "mxfp4")
    ),
)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.skipif(
    not {"avx2", "fma", "f16c", "bmi2"} <= instruction_sets(), reason="no AVX2 and FMA"
)
def test_bits_are_equal_without_avx512(tmp_path: Path) -> None:
    wrapper = tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(compiler() or ())} "$@" -march=x86-64-v3\n')
    wrapper.chmod(0o700)
    environment = {"CXX": str(wrapper), CACHE_FOLDER: str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + [str(FOLDER / check) for check in CHECKS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert f"{len(CHECKS)} passed" in ran.stdout
    assert len(list((tmp_path / "cache").glob("*.so"))) == 4
