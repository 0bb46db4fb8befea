"""The load and the verdict of `benchmarks.scheduling`. Quick: no stack is started."""

from __future__ import annotations

from typing import Any

from benchmarks.scheduling import (
    DOCUMENT_TOKENS,
    QUESTION_TOKENS,
    TENANTS,
    documents_by_tenant,
    load_of,
    medians_of,
    misses_of,
)


def test_each_policy_gets_the_same_load() -> None:
    first, again = load_of(3, 5.0, 20.0, 4), load_of(3, 5.0, 20.0, 4)
    assert first == again != load_of(4, 5.0, 20.0, 4)
    assert 60 < len(first) < 140
    assert [ask.seconds for ask in first] == sorted(ask.seconds for ask in first)
    assert {ask.tenant for ask in first} == set(TENANTS)
    documents = documents_by_tenant()
    for ask in first:
        if ask.is_document:
            assert len(ask.prompt) == DOCUMENT_TOKENS + QUESTION_TOKENS
            assert ask.prompt[:DOCUMENT_TOKENS] in documents[ask.tenant], "its own, not another's"
        else:
            assert len(ask.prompt) < 100
    share = sum(ask.is_document for ask in first) / len(first)
    assert 0.1 < share < 0.4
    assert not any(ask.is_document for ask in load_of(3, 5.0, 20.0, 0))


def run(policy: str, tokens: float, ttft: float, wait: float) -> dict[str, Any]:
    return {
        "round": 0,
        "policy": policy,
        "tokens_per_step": tokens,
        "mean_ttft_seconds": ttft,
        "document_wait_p99_seconds": wait,
        "decisions": {"turn": 1},
    }


def result(*runs: dict[str, Any], bound: float = 20.0) -> dict[str, Any]:
    policies = dict.fromkeys(each["policy"] for each in runs)
    return {"bound_seconds": bound, "medians": {name: medians_of(runs, name) for name in policies}}


def test_medians_are_of_the_rounds_of_one_policy() -> None:
    runs = [run("fifo", tokens, 1.0, 1.0) for tokens in (9.0, 1.0, 4.0)]
    medians = medians_of([*runs, run("fair", 99.0, 1.0, 1.0)], "fifo")
    assert medians["tokens_per_step"] == 4.0
    assert not {"round", "policy", "decisions"} & medians.keys()


def test_what_is_missed_is_named() -> None:
    fifo = run("fifo", 10.0, 2.0, 30.0)
    assert misses_of(result(fifo, run("utilisation", 15.0, 2.0, 20.0))) == []
    assert misses_of(result(fifo, run("utilisation", 14.9, 2.0, 20.0))) == [
        "1.49 x the tokens per step of fifo, not 1.5 x"
    ]
    late = misses_of(result(fifo, run("utilisation", 30.0, 2.1, 21.0)))
    assert len(late) == 2
    assert misses_of(result(run("utilisation", 1.0, 9.0, 99.0))) == [], "nothing to compare with"
