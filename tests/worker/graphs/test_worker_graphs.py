"""Graphs of decoding steps, on a CPU by a recorder that plays back: the same tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_doubles import KnowingDrafter, sometimes_wrong
from engine_runner import Transcript, admission, make_engine, run_all
from graph_double import RecorderDouble, span_kernels
from tiny_models import FAMILY_CASES, VOCABULARY, build_tiny, clear_prompt, write_tiny

from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine.engine import Engine
from worker_service.engine.sampling import Sampling
from worker_service.graphs.decode_graphs import GraphCounts
from worker_service.graphs.support import EagerReason
from worker_service.model.decoder import Decoder

CPU = torch.device("cpu")
LENGTHS = (1, 16, 65, 150, 20)


def greedy(count: int) -> Sampling:
    return Sampling(max_tokens=count, ignore_eos=True)


def counts_of(engine: Engine) -> GraphCounts:
    assert engine.graphs is not None
    return engine.graphs.counts


# Learned positions; grouped queries; norms on queries and keys; windows below full layers.
ESSENTIAL = ("opt", "llama-3", "qwen3", "gemma3")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ESSENTIAL else pytest.mark.chaos)
        for case in FAMILY_CASES
    ],
)
def test_replayed_steps_give_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    reference = build_tiny(case)
    prompts, wanted = zip(*(clear_prompt(reference, each, 24) for each in LENGTHS), strict=True)
    with span_kernels():
        engine = make_engine(
            write_tiny(case, tmp_path), recorder=RecorderDouble(), has_activations=True
        )
        done = run_all(engine, [admission(str(i), p, greedy(24)) for i, p in enumerate(prompts)])
    assert [done.tokens[str(i)] for i in range(len(prompts))] == list(wanted)
    # The first step of each size is eager.
    counts = counts_of(engine)
    assert counts.replayed >= 18
    assert counts.eager <= 4
    assert engine.cache.pages.used_count == 0


def poisoned(engine: Engine) -> Engine:
    """Fill the cache, the page of padding rows included, with large numbers."""
    for plane in (*engine.cache.keys, *engine.cache.values, *engine.cache.inputs):
        plane.fill_(3e4)
    return engine


def run_mixed(engine: Engine) -> Transcript:
    """Sampled and greedy requests that come and go, so that steps have many sizes."""
    drawn = Sampling(max_tokens=20, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5, logprobs=1)
    admissions = [
        admission(str(i), [3 + (7 * i + j) % 90 for j in range(5 + 13 * i)], sampling)
        for i, sampling in enumerate([greedy(31), drawn, greedy(7), drawn, greedy(22), greedy(40)])
    ]
    first = run_all(engine, admissions[:3])
    second = run_all(engine, admissions[3:])
    return Transcript({**first.tokens, **second.tokens})


def test_padding_rows_touch_only_their_own_page(tmp_path: Path) -> None:
    """Pages, X included, are those of eager steps, and what was in the cache does not matter."""
    model = Decoder.load(write_tiny("qwen2", tmp_path), CPU, torch.float32)
    with span_kernels():
        more: dict[str, Any] = {"has_activations": True, "cache_pages": 64}
        engine = make_engine(model, recorder=RecorderDouble(), **more)
        twin = make_engine(model, **more)
        got, wanted = run_mixed(poisoned(engine)), run_mixed(poisoned(twin))
    assert got.tokens == wanted.tokens
    assert counts_of(engine).replayed > 40
    pages = twin.cache.plan.device_page_count
    assert engine.cache.padding_page == engine.cache.plan.device_page_count
    changed = 0
    for name in ("keys", "values", "inputs"):
        ours, theirs = getattr(engine.cache, name), getattr(twin.cache, name)
        for mine, other in zip(ours, theirs, strict=True):
            count = min(pages, len(other), len(mine) - 1)
            torch.testing.assert_close(mine[:count], other[:count], atol=1e-4, rtol=1e-4)
            # The padding page was written in its first row alone.
            assert (mine[-1].movedim(-2, 0)[1:] == 3e4).all()
            changed += int((mine[-1] != 3e4).any())
    assert changed == 3 * len(engine.cache.keys)


@pytest.mark.parametrize("case", ["llama-3", pytest.param("gemma3", marks=pytest.mark.chaos)])
def test_rows_that_verify_drafts_are_replayed(case: str, tmp_path: Path) -> None:
    model = Decoder.load(write_tiny(case, tmp_path), CPU, torch.float32)
    drawn = Sampling(max_tokens=30, ignore_eos=True, temperature=0.8, seed=3)
    requests = [
        admission(str(i), [5 + (3 * i + j) % 80 for j in range(9 + 11 * i)], sampling)
        for i, sampling in enumerate((greedy(30), drawn, greedy(30)))
    ]
    speculation = Speculation(DraftMethod.MODEL, num_speculative_tokens=5)
    with span_kernels():
        plain = run_all(make_engine(model), requests)
        double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 4))
        engine = make_engine(
            model,
            recorder=RecorderDouble(),
            drafters={DraftMethod.MODEL: double},
            has_activations=True,
            cache_pages=64,
        )
        drafting = [replace(each, speculation=speculation) for each in requests]
        # Several rounds, for steps of many numbers of rows.
        for _ in range(4):
            found = run_all(engine, drafting)
            assert found.tokens == plain.tokens
            assert sum(each.accepted for each in found.drafts) > 0
    assert engine.graphs is not None
    sizes = {key.rows for key, size in engine.graphs._sizes.items() if size.recording}
    assert sizes >= {8, 16, 24}
    assert counts_of(engine).replayed > 2 * counts_of(engine).eager


def test_a_step_that_cannot_be_recorded_stays_eager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Decoder.load(write_tiny("opt", tmp_path), CPU, torch.float32)
    recorder = RecorderDouble()
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    with span_kernels(), caplog.at_level(logging.WARNING):
        engine, twin = make_engine(model, recorder=recorder), make_engine(model)
        assert run_mixed(engine).tokens == run_mixed(twin).tokens
    assert engine.graphs is not None
    assert "not permitted" in (engine.graphs.obstacle or "")
    # A label of a metric: the exception's text would be a new series each time.
    assert engine.eager_reason is EagerReason.RECORDING_FAILED
    assert len([each for each in caplog.records if "eagerly" in each.getMessage()]) == 1
    assert counts_of(engine).replayed == 0


def test_an_error_later_ends_the_graphs_that_there_are(tmp_path: Path) -> None:
    model = Decoder.load(write_tiny("opt", tmp_path), CPU, torch.float32)
    recorder = RecorderDouble()
    with span_kernels():
        engine, twin = make_engine(model, recorder=recorder), make_engine(model)
        assert run_mixed(engine).tokens == run_mixed(twin).tokens
        recorder.error = torch.OutOfMemoryError("no memory")
        # More rows than before: steps of a size that has no graph yet.
        many = [admission(str(i), [3 + i, 5, 4], greedy(6)) for i in range(9)]
        assert run_all(engine, many).tokens == run_all(twin, many).tokens
    assert engine.graphs is not None
    assert engine.graphs.obstacle is not None
    assert engine.graphs.graph_count == 0


def test_graphs_end_with_their_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that there are go on."""
    model = Decoder.load(write_tiny("opt", tmp_path), CPU, torch.float32)
    recorder = RecorderDouble(pool_bytes=1 << 20, own_bytes=1 << 20)
    with span_kernels(), caplog.at_level(logging.WARNING):
        engine, twin = (
            make_engine(model, recorder=recorder, graph_bytes=5 << 20),
            make_engine(model),
        )
        assert run_mixed(engine).tokens == run_mixed(twin).tokens
    graphs = engine.graphs
    assert graphs is not None
    assert graphs.obstacle is None
    assert graphs.is_full
    assert (graphs.graph_count, recorder.recorded) == (2, 3)
    assert graphs.size_bytes == 5 << 20  # the pool of the third stays
    assert graphs.counts.replayed > 5
    messages = [each.getMessage() for each in caplog.records]
    assert [each for each in messages if "2 take 4 MiB of 5 MiB" in each] == messages


def test_the_plan_charges_graphs_and_gives_them_up_for_a_cache(tmp_path: Path) -> None:
    model = Decoder.load(write_tiny("opt", tmp_path), CPU, torch.float32)
    more: dict[str, Any] = {"has_activations": True, "device_memory_bytes": 16 << 20}
    plain = make_engine(model, **more).memory_plan
    plan = make_engine(model, recorder=RecorderDouble(), graph_bytes=2 << 20, **more).memory_plan
    x_page = model.shape.activation_bytes_per_token * 16
    charged = (2 << 20) + plan.page_bytes + x_page
    assert plan.workspace_bytes - plain.workspace_bytes == charged
    assert plain.page_count - plan.page_count == -(-charged // plan.page_bytes)
    tight = make_engine(model, recorder=RecorderDouble(), graph_bytes=15 << 20, **more)
    assert tight.memory_plan == plain
    assert tight.graphs is None
    assert tight.eager_reason is not None
