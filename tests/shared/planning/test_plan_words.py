"""What plans say to people: a headline, and a sentence for each kind of reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import (
    ForcedRestore,
    PlanInput,
    Reason,
    ReasonKind,
    Residency,
    RestoreMethod,
)
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.words import headline, in_words, sentence
from splitpoint.shapes import BUILT_IN_SHAPES

H100 = BUILT_IN_PROFILES["h100"]
OPT = BUILT_IN_SHAPES["opt-6.7b"]
WARM = PlanInput(2000, 48, True, schedule=Schedule.PIPELINED, chunk_tokens=64, staging_tokens=1024)

# Each kind with values that make a difference to its words; below it, these words.
TABLE = """
ASKED_SPLIT 64, 64
    split 64 was asked for
ASKED_SPLIT 500, 100
    split 500 was asked for and capped at 100, all that is cached
ASKED_SPLIT 64, 0
    split 64 was asked for and capped at 0, since only cached tokens can be rebuilt
ASKED_SPLIT 0, 0
    loading was asked for
ASKED_TOKENS
    method tokens was asked for
SPLIT 64, 64, "row"
    split 64: everything is rebuilt from arriving activations
SPLIT 64, 2048, "serial"
    split 64 of 2,048: the front is rebuilt, then the rest loaded
SPLIT 64, 2048, "pipelined"
    split 64 of 2,048: the front is rebuilt while the rest is loaded
AT_FIRST 64, 1408
    at first 64 of 1,408, until the new tokens are stored
RECOMPUTED 1, 1
    the one cached token is recomputed from its id
RECOMPUTED 8, 8
    all 8 cached tokens are recomputed from their ids
RECOMPUTED 0, 64
    nothing is recomputed from token ids, 64 tokens are loaded
RECOMPUTED 896, 1000
    [0, 896) is recomputed from token ids while 104 tokens are loaded from the back
LOADED 0, 64
    split 0: nothing is loaded
LOADED 1, 0
    split 0: the one cached token is loaded
LOADED 2000, 64
    split 0: all 2,000 other tokens are loaded
KEYS_STAY 640, 1073741824
    keys and values of the first 640 stay on the device (1 GiB)
INPUTS_STAY 640, 1073741824
    X of the first 640 stays on the device (1 GiB, less than their keys and values)
PREDICTED 0.5, 0.5
    predicted 500 ms
PREDICTED 0.5, 1.0
    predicted 500 ms, 0.50 of the 1 s for loading everything
STEP 0.5, 0.5
    a step takes 500 ms
STEP 0.5, 0.9999
    a step takes 500 ms, 1 s without rebuilding
LIMIT 1.0, 0.95
    link 1 s, device 950 ms, about equally busy
LIMIT 1.0, 0.5
    link 1 s, device 500 ms, the link is the limit
LIMIT 0.5, 1.0
    link 500 ms, device 1 s, compute is the limit
CANNOT_PAY 2.0
    an activation is 2.00 x the bytes of its keys and values (rho >= 1): sending it can never
    pay
NO_ACTIVATIONS
    the store holds no activations
SPLIT_INSTEAD 640, 0.992, 1.0
    the best split with activations, 640, would take 992 ms instead of 1 s (0.80% less): too
    little to gain
TOKENS_INSTEAD 1, 1.5, 1.0
    recomputing the first token from its id would take 1.5 s instead of 1 s (50.00% more)
TOKENS_INSTEAD 64, 1.5, 0.0
    recomputing the first 64 tokens from their ids would take 1.5 s instead of 0 ms
REBUILD_COSTS 2e-06, 1e-06
    rebuilding a token takes 2 µs a layer, loading it 1 µs
DEVICE_BUSY 2.0, 1.0
    the device is busier than the link already: it computes for 2 s without rebuilding, the
    link copies for 1 s
OVERHEADS 1, 0
    rebuilding one token would take longer: every copy and every product has an overhead
OVERHEADS 100, 2
    rebuilding some of 100 tokens (2 chunks) would take longer: every copy and every product
    has an overhead
FIRST_CHUNK 64, 2.0, 1.0
    recomputing even 64 tokens from their ids keeps the device busy for 2 s, loading
    everything the link for 1 s
FIRST_CHUNK 1, 2.0, 1.0
    recomputing a token from its id keeps the device busy for 2 s, loading everything the link
    for 1 s
TOKENS_NOT_CONSIDERED "serial"
    recomputing from token ids was not considered: nothing overlaps with schedule serial
TOKENS_NOT_CONSIDERED "row"
    recomputing from token ids was not considered: schedule row cannot restore from both ends
THROUGHPUT 1.0, 2.0
    for throughput: the busier of link and device works for 1 s, with loading for 2 s
HOST_WEIGHTS 0.5, 12884901888
    weights that come from the host take 500 ms of each step (12 GiB; --device-memory)
FITS 1073741824, 2147483648
    resident: 1 GiB of cache fit the worker's 2 GiB
EXCEEDS 2147483648, 1073741824
    streamed: 2 GiB of cache exceed the worker's 1 GiB
ASKED_STREAMED
    streamed, as asked for
STREAM_NOW 1.0, 2.0, "throughput"
    streamed: streaming at once finishes in 1 s, waiting for device memory in 2 s; with the
    requests that run beside it streaming has the better tokens/s
STREAM_NOW 1.0, 2.0, "latency"
    streamed: streaming at once finishes in 1 s, waiting for device memory in 2 s; with the
    requests that run beside it streaming has the better mean finishing time
FULL_BATCH 32, 25, 6.54, 4.6
    streamed: the weights from the host cross the link once for 32 requests, 25 of them
    streamed: 6.54 tokens/s; with as many residents as fit alone 4.6 tokens/s
CHARGED 1073741824, 0, "full"
    1 GiB are charged
CHARGED 1073741824, 6, "columns:0.1"
    1 GiB are charged, 6 pages of it for what columns:0.1 reads
SPARE 1073741824
    1 GiB more for a part that stays on the device
EXPECTED_ANSWER 16, 1048
    charged for an expected answer of 16 tokens of at most 1,048
SHARED_PAGES 1
    1 page shared with running requests
LOSSY_CACHE "int8"
    the store keeps int8, so cached tokens are approximate
LOSSY_WEIGHTS "int8"
    weights are int8: answers are approximate
NUMERICS "invariant"
    numerics are invariant: rebuilt rows equal the stored ones
NUMERICS "fast"
    numerics are fast: rebuilt rows may in their last bits differ from the stored ones
ON_DEVICE 1
    1 token is on the device already
FETCH 80, "b:1", "direct", 800000000.0, "aged", 0.01, 1.5, 0
    fetching 80 tokens from b:1 by direct reads at 0.8 GB/s (aged): 10 ms, recomputing them: 1.5 s
FETCH 80, "b:1", "stream", 1000000000.0, "assumed", 0.01, 1.5, 0
    fetching 80 tokens from b:1 at 1 GB/s (assumed): 10 ms, recomputing them: 1.5 s
NO_FETCH 80, "disk", "", 1000000000.0, "measured", 0.5, 1.5, 64
    not loaded: loading 80 tokens from the disk tier at 1 GB/s: 0.5 s, recomputing the 64 that
    the device lacks: 1.5 s
NO_FETCH 80, "b:1", "stream", 1000000000.0, "measured", 0.5, 1.5, 0
    not fetched: fetching 80 tokens from b:1 at 1 GB/s: 0.5 s, recomputing them: 1.5 s
MEETING 80, 64, "disk", 1000000000.0, "measured", 0.5, 1.5
    loading 80 tokens from the disk tier at 1 GB/s while 64 tokens before them are computed:
    0.5 s, recomputing all: 1.5 s
FETCHED 0, "", 0.0
    fetched nothing
FETCHED 96, "", 0.31
    fetched 96 tokens in 0.31 s
FETCHED 96, "direct, stream", 0.31
    fetched 96 tokens by direct reads and gRPC in 0.31 s
FOUND_ON_DEVICE 16, 0
    16 tokens were on the device already
FOUND_ON_DEVICE 0, 16
    the 16 tokens that were expected on the device had left it
FOUND_ON_DEVICE 16, 32
    16 of 32 tokens expected on the device were there
FOUND_CACHED 0, 16
    the worker found 0 tokens cached instead of 16
MET 896, 0
    they met at 896
MET 896, 1472
    they met at 896 where 1,472 was expected
USED "load", 0
    the worker used method load with split 0
RESTORED 0.36, 0.0811, 0.34, 0.06
    restored in 360 ms, 4.4 x the prediction: the device was busy 340 ms, the link 60 ms
RESTORED 1.2, 0.0811, 0.1, 1.1
    restored in 1.2 s, 15 x the prediction: the link was busy 1.1 s, the device 100 ms
RESTORED 0.5, 0.0811, 0.2, 0.1
    restored in 500 ms, 6.2 x the prediction: the device was busy 200 ms, the link 100 ms,
    neither of them most of the time
FIRST_USE 25165824
    24 MiB of the worker's cache was used for the first time
DRAFTED "suffix", 12, 4, 8
    suffix drafted 12 tokens in 4 steps, 8 (67%) were accepted
NO_DRAFTER "auto"
    auto drafted nothing: the worker has no such drafter
DRAFTS_ARE_FOR_STREAMS "self"
    self drafted nothing: drafts of this kind pay only while the cache is streamed
NO_DRAFTS "auto"
    auto drafted nothing: no draft was found, or none would have paid
SELECTED "columns:0.1", 0.1, 4, "steps", 120, 160
    columns:0.1 read 10.0% of the tokens in 4 steps and fetched 120 of 160 rows
READ_ALL "too short"
    other steps read every token: too short
NOT_SELECTED "columns:0.1", "too short"
    columns:0.1 was not used: too short
DRAFTS_OFF
    the worker's drafts are off beside it
"""


def rows() -> Iterator[tuple[Reason, str]]:
    """Yield each reason of the table with its words."""
    for entry in re.split(r"\n(?=\w)", TABLE.strip()):
        head, *lines = entry.splitlines()
        kind, _, values = head.partition(" ")
        reason = Reason(ReasonKind[kind], ast.literal_eval(f"({values},)") if values else ())
        yield reason, " ".join(map(str.strip, lines))


@pytest.mark.parametrize(("reason", "said"), list(rows()))
def test_each_reason_has_its_sentence(reason: Reason, said: str) -> None:
    assert sentence(reason) == said


def test_the_table_has_every_kind() -> None:
    assert {reason.kind for reason, _ in rows()} == set(ReasonKind)


HEADLINES = [
    (
        {"has_activations": False, "cached_tokens": 64},
        "loaded from host memory: 0.965 ms predicted; recomputing would take 3.63 ms",
    ),
    (
        {},
        "rebuilt from stored activations: 11.9 ms predicted; loading everything would take "
        "21.6 ms, recomputing 55.5 ms",
    ),
    (
        {"cached_tokens": 0, "new_tokens": 1},
        "nothing is cached: 1 token is prefilled",
    ),
    (
        {"forced": ForcedRestore(128)},
        "128 of 2,000 rebuilt from stored activations, the others loaded: 21.3 ms predicted; "
        "loading everything would take 21.6 ms, recomputing 55.5 ms",
    ),
]


@pytest.mark.parametrize(("changes", "said"), HEADLINES)
def test_a_headline_names_what_is_done_and_what_the_alternatives_would_take(
    changes: dict[str, Any], said: str
) -> None:
    assert headline(plan_request(OPT, H100, replace(WARM, **changes))) == said


def test_a_headline_follows_what_happened() -> None:
    fast = replace(H100, prefill_flops_per_second=1e17, prefill_overhead_seconds=0.0)
    plan = plan_request(OPT, fast, WARM)
    assert headline(plan) == (
        "recomputed from token ids: 0.904 ms predicted; loading everything would take 21.6 ms"
    )
    met = replace(plan, recomputed_tokens=896, predicted_recompute_seconds=0.0)
    assert headline(met).startswith("896 of 2,000 recomputed, the others loaded: 0.904 ms")
    here = replace(plan, device_tokens=2000, method=RestoreMethod.NONE)
    assert headline(here) == "nothing is restored: 2,000 cached tokens are on the device"
    part = headline(replace(plan, device_tokens=1000, method=RestoreMethod.LOAD))
    assert part.startswith("1,000 of 2,000 cached tokens are on the device, the others loaded from")
    fetched = replace(plan, fetched_tokens=64, fetch_source="disk", method=RestoreMethod.LOAD)
    assert headline(fetched).startswith("64 tokens fetched from the disk tier, loaded from host")
    streamed = plan_request(OPT, H100, replace(WARM, residency=Residency.STREAMED))
    assert headline(streamed).startswith("streamed from host memory in each step: ")
    cold = replace(WARM, cached_tokens=0, new_tokens=2048, residency=Residency.STREAMED)
    assert headline(plan_request(OPT, H100, cold)).startswith(
        "nothing is cached: 2,048 tokens are prefilled, then streamed from host memory"
    )


def test_a_plan_in_words_keeps_its_values() -> None:
    plan = plan_request(OPT, H100, WARM)
    said = in_words(plan)
    assert (said.reasons, said.split_tokens) == (plan.reasons, plan.split_tokens)
    assert len(said.reason_details) == len(plan.reasons)
