"""The engine on a CUDA device: the same tokens as transformers, the same bytes as the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runner import admission, make_engine, run_all
from tiny_models import FAMILY_CASES, build_tiny, clear_prompt, write_tiny

from worker_service.engine.sampling import Sampling
from worker_service.profiling.profiler import measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_greedy_tokens_equal_transformers_on_cuda(case: str, tmp_path: Path) -> None:
    engine = make_engine(write_tiny(case, tmp_path), device=torch.device("cuda:0"))
    reference = build_tiny(case)
    prompts, wanted = zip(
        *(clear_prompt(reference, length, 48) for length in (1, 16, 65, 150)), strict=True
    )
    sampling = Sampling(max_tokens=48, ignore_eos=True)
    together = run_all(
        engine, [admission(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    )
    assert [together.tokens[str(i)] for i in range(len(prompts))] == list(wanted)
    assert engine.cache.pages.used_count == 0


def test_profile_measures_a_real_link(tmp_path: Path) -> None:
    engine = make_engine(write_tiny("opt", tmp_path), device=torch.device("cuda:0"))
    profile = measure(engine.model, torch.device("cuda:0"), "test")
    assert profile.link_bytes_per_second > 1e8
    assert profile.rebuild_flops_per_second > 0
