"""Answers from the store's pages are those of an engine without a connector, for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Answer, Store, engine, prompt

pytestmark = pytest.mark.timeout(600)

SHARED = prompt(1, 1920)
FIRST, SECOND = prompt(2, 40, after=SHARED), prompt(3, 40, after=SHARED)
# Windows and recurrent states hit a prefix that ends elsewhere only if they are retained there.
OPTIONS: dict[str, dict[str, Any]] = {
    "opt": {},
    "llama": {},
    "qwen3moe": {},
    "gemma3": {"prefix_cache_retention_interval": 256},
    "gptoss": {"prefix_cache_retention_interval": 128},
    "qwen3next": {"dtype": "bfloat16", "prefix_cache_retention_interval": 256},
}


def check_equal(found: list[Answer], expected: list[Answer], most: float = 1e-5) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for ours, plain in zip(found, expected, strict=True):
        differences = [abs(a - b) for a, b in zip(ours.logprobs, plain.logprobs, strict=True)]
        assert max(differences) <= most


@pytest.mark.parametrize("family", OPTIONS)
def test_a_prefix_that_another_engine_computed_is_loaded(
    models: Path, store: Store, family: str
) -> None:
    options = OPTIONS[family]
    most = 0.1 if family == "qwen3next" else 1e-5
    with engine(models / family, None, **options) as plain:
        cold, local = *plain.generate(FIRST), *plain.generate(SECOND)
    with engine(models / family, store.address, **options) as first:
        answers = [*first.generate(FIRST), *first.generate(SECOND)]
        check_equal(answers, [cold, local], most)
        assert [each.reason for each in answers] == ["miss", "local"]
    with engine(models / family, store.address, **options) as second:
        (warm,) = second.generate(SECOND)
    check_equal([warm], [local], most)
    assert warm.reason == "loaded"
    assert warm.splitpoint is not None
    assert warm.cached == warm.splitpoint["loaded_tokens"] == local.cached >= 1500
    stats = store.stats()
    assert stats["integrity_violations"] == []
    assert stats["writing_slot_count"] == stats["leased_slot_count"] == 0


def test_latent_attention_has_the_same_tokens(models: Path, store: Store) -> None:
    """vLLM has no prefix cache there on CPUs, and computes what follows a hit by another kernel."""
    short = FIRST[-700:]
    with engine(models / "mla", None) as plain:
        expected = plain.generate(short)
    with engine(models / "mla", store.address) as first:
        check_equal(first.generate(short), expected)
    with engine(models / "mla", store.address) as second:
        (warm,) = second.generate(short)
    assert warm.tokens == expected[0].tokens
    assert warm.reason == "loaded"
    assert warm.cached >= 600


def test_each_rank_loads_its_own_pages(models: Path, store: Store) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2}
    with engine(models / "opt", store.address, **options) as first:
        expected = [*first.generate(FIRST), *first.generate(SECOND)]
    with engine(models / "opt", store.address, **options) as second:
        warm = second.generate(SECOND)
    check_equal(warm, expected[1:])
    assert (warm[0].reason, warm[0].cached) == ("loaded", 1920)
