"""Namespaces differ wherever pages would, and keys of pages by block, group and rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitpoint.errors import FailedPrecondition
from splitpoint_vllm.namespace import (
    EngineFacts,
    PageGroup,
    hash_seed,
    namespace_of,
    page_key,
)

FACTS = EngineFacts(
    engine="vllm 0.32.0",
    weights=("ab12",),
    model=("float32", "None"),
    device="cpu x86_64 AVX2",
    cache=("auto", "LBHNC"),
    groups=(PageGroup("FullAttentionSpec", 128, 4096),),
    ranks=(1, 1, 1, 1),
    hashes=("sha256", "vllm-none-hash", "128"),
)


def test_equal_facts_have_one_namespace() -> None:
    assert namespace_of(FACTS) == namespace_of(replace(FACTS))
    assert len(namespace_of(FACTS)) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "vllm 0.33.0"},
        {"weights": ("ab13",)},
        {"weights": ("ab12", "cd34")},
        {"model": ("bfloat16", "None")},
        {"device": "cpu x86_64 AVX512"},
        {"cache": ("fp8", "LBHNC")},
        {"groups": (PageGroup("FullAttentionSpec", 16, 4096),)},
        {"groups": (PageGroup("SlidingWindowSpec 256", 128, 4096),)},
        {"groups": (PageGroup("FullAttentionSpec", 128, 8192),)},
        {"ranks": (2, 1, 1, 1)},
        {"hashes": ("sha256", "7", "128")},
        # Values that moved from one field to another are other facts.
        {"weights": (), "model": ("ab12", "float32", "None")},
    ],
)
def test_each_fact_makes_another_namespace(change: dict[str, Any]) -> None:
    assert namespace_of(replace(FACTS, **change)) != namespace_of(FACTS)


def test_pages_of_one_block_have_a_key_for_each_rank() -> None:
    block = bytes(36)
    keys = {page_key(block, rank) for rank in range(9)}
    keys.add(page_key(bytes(35) + b"\1", 0))
    assert len(keys) == 10
    assert {len(key) for key in keys} == {32}


def test_hashes_that_every_process_seeds_by_chance_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match="PYTHONHASHSEED"):
        hash_seed("xxhash_cbor", {})
    assert hash_seed("xxhash", {"PYTHONHASHSEED": "7"}) == "7"
    assert hash_seed("sha256", {"PYTHONHASHSEED": "7"}) == "7"
    assert hash_seed("sha256", {}) == hash_seed("sha256_cbor", {}) != "7"
