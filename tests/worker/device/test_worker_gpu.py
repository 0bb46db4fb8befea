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


def test_a_step_makes_the_host_wait_once(tmp_path: Path) -> None:
    """For its flags and tokens, by an event: torch raises for anything else that waits."""
    engine = make_engine(write_tiny("opt", tmp_path), device=torch.device("cuda:0"))
    greedy = Sampling(max_tokens=40, ignore_eos=True)
    drawn = Sampling(
        max_tokens=40,
        ignore_eos=True,
        temperature=0.8,
        top_p=0.9,
        seed=3,
        logprobs=2,
        repetition_penalty=1.2,
    )
    run_all(engine, [admission("warm", [5] * 70, greedy), admission("up", [6] * 70, drawn)])
    for key, sampling in (("a", greedy), ("b", drawn), ("c", greedy)):
        engine.admit(admission(key, [7, 8, 9] * 30, sampling))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(engine.queues.running) == 3
