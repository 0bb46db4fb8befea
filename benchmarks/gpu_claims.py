"""Claims about a GPU, beside what the parts of `make gpu` measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

TESTS, RESTORE, GRAPHS = "tests", "restore opt-6.7b", "graphs"
NUMERICS, VLLM = "numerics", "vllm"
SELECT_LLAMA, SELECT_OPT = "select llama-3.1-8b", "select opt-13b"
OPT_LONG, OPT_SHORT, LLAMA = (
    "offload opt-6.7b 512",
    "offload opt-6.7b 128",
    "offload llama-3-8b 512",
)
NEW_TOKENS = (32, 128)
# Tests without which nothing is known of the CUDA path: one that is skipped does not hold.
REQUIRED_TESTS = (
    "test_a_kernel_runs_after_a_registration_that_the_driver_refused",
    "test_a_recording_takes_in_nothing_that_other_threads_copy",
    "test_a_step_makes_the_host_wait_once",
    "test_decode_equals_the_cpu",
    "test_graphs_give_the_tokens_of_transformers",
    "test_greedy_tokens_equal_transformers_on_cuda",
    "test_link_and_compute_run_side_by_side",
    "test_streams_on_a_card_stay_apart_after_the_probes",
    "test_the_cuda_driver_locks_and_unlocks",
    "test_the_kernels_of_usual_models_are_built",
)
# Batch size, drafts of each sequence, and the most that a step may take of an eager one's time.
GRAPH_CASES = ((1, 0, 0.9), (8, 0, 1.0), (32, 0, 1.0), (8, 4, 1.0))
# The cost of kernels of one order: what other servers' batch-invariant modes take, and room for
# tiles that decoding shares with prefills.
NUMERICS_BATCHES = (1, 8)
STEP_LIMIT, FIRST_TOKEN_LIMIT = 1.34, 2.0
# Two full layers of 32, a tenth of the others, and what screening takes.
SELECTED_LIMIT = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """A part's JSON line as `report`, or the problem that kept it from printing one."""

    seconds: float
    report: Mapping[str, Any] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim. `measured`: None if it was not measured; `limit`: the most, or the least."""

    text: str
    measured: float | None
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def claims_of(outcomes: Mapping[str, Outcome]) -> list[Claim]:
    """Return the claims about a GPU of the H200's class, beside what was measured."""
    reports = {
        name: outcome.report for name, outcome in outcomes.items() if outcome.report is not None
    }
    tests = reports.get(TESTS)
    failed = None
    if tests is not None and tests["passed"]:
        failed = float(tests["failed"] + tests["error"])
    unproved = None
    if tests is not None and tests["passed"] and "unproved" in tests:
        unproved = float(len(tests["unproved"]))
    claims = [
        Claim("CUDA tests that fail", failed, 0),
        Claim("required CUDA tests that did not pass", unproved, 0),
    ]
    for name in (OPT_SHORT, OPT_LONG):
        report = reports.get(name)
        for new in NEW_TOKENS:
            text = f"{name}, {new} new: decode over transformers' offloaded cache"
            claims.append(Claim(text, over_peer(report, new), 0.5))
        efficiency = None if report is None else report["link"]["efficiency"]
        claims.append(Claim(f"{name}: link efficiency at l = 0", efficiency, 0.9, at_least=True))
        claims.append(Claim(f"{name}: pipelined over full load", over_full_load(report), 0.6))
    llama = over_full_load(reports.get(LLAMA))
    # Never slower, with what a measurement cannot tell apart.
    claims.append(Claim(f"{LLAMA}: planned over full load", llama, 1.03))
    claims += graph_claims(reports.get(GRAPHS)) + numerics_claims(reports.get(NUMERICS))
    loaded = None
    if VLLM in reports:
        loaded = reports[VLLM]["first"]["ratio"]["other"]
    claims.append(Claim("vllm: first token from another engine's pages over cold", loaded, 0.15))
    return claims + [
        claim for name in (SELECT_LLAMA, SELECT_OPT) for claim in select_claims(name, reports)
    ]


def select_claims(name: str, reports: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return the claims about decode steps that read a tenth of the cache."""
    results = reports[name]["results"] if name in reports else []
    overs = [each["contenders"]["columns:0.1"]["step_over_full_load"] for each in results]
    over = grows = None
    if overs:
        over = overs[-1]
    claims = [Claim(f"{name}: a step at 10 % over full load, at the longest", over, SELECTED_LIMIT)]
    if name == SELECT_LLAMA:
        if len(overs) > 1:
            grows = min(before / after for before, after in pairwise(overs))
        text = f"{name}: speed-up of a length over that of the one before"
        claims.append(Claim(text, grows, 1.0, at_least=True))
    return claims


def numerics_claims(report: Mapping[str, Any] | None) -> list[Claim]:
    """Return the claims about `--numerics invariant`."""
    dependent = different = None
    costs: Sequence[Mapping[str, Any]] = []
    if report is not None:
        dependent = float(report["numerics"] != "invariant")
        different = float(sum(each["first_difference"] is not None for each in report["variants"]))
        costs = report["costs"]
    claims = [
        Claim("numerics: operators that the check at the start finds dependent", dependent, 0),
        Claim("numerics: variants whose bits differ from the same prompt alone", different, 0),
    ]
    measured = {each["batch"]: each for each in costs}
    for batch in NUMERICS_BATCHES:
        for name, text in (("step_ratio", "a step"), ("first_token_ratio", "the first token")):
            ratio = measured[batch][name] if batch in measured else None
            limit = STEP_LIMIT if name == "step_ratio" else FIRST_TOKEN_LIMIT
            claims.append(Claim(f"numerics, batch {batch}: time of {text} over fast", ratio, limit))
    return claims


def graph_claims(report: Mapping[str, Any] | None) -> list[Claim]:
    """Return the claims about decoding steps as CUDA graphs."""
    cases = [] if report is None else [each for each in report["cases"] if "graphs" in each["ways"]]
    different = float(sum(not each["equal"] for each in cases)) if cases else None
    claims = [
        Claim("graphs: cases whose tokens differ from the same rows computed eagerly", different, 0)
    ]
    for batch, drafts, limit in GRAPH_CASES:
        ratio = None
        for each in cases:
            if (each["batch"], each["drafts"]) == (batch, drafts):
                ways = each["ways"]
                times = (ways[way]["step_milliseconds"] for way in ("graphs", "eager"))
                ratio = round(next(times) / next(times), 3)
        rows = f"batch {batch}" + (f", {drafts} drafts each" if drafts else "")
        claims.append(Claim(f"graphs, {rows}: time of a step over the eager twin's", ratio, limit))
    return claims


def over_full_load(report: Mapping[str, Any] | None) -> float | None:
    return None if report is None else float(report["ratios"]["pipelined_over_full_load"])


def over_peer(report: Mapping[str, Any] | None, new_tokens: int) -> float | None:
    """Return our decode latency of this many tokens over transformers'; None if not measured."""
    if report is None:
        return None
    contenders = report["contenders"]
    peers = [name for name in contenders if name.startswith("transformers")]
    if not peers:
        return None
    seconds = [
        contenders[name]["step_seconds_of_last_run"][: new_tokens - 1]
        for name in ("pipelined split", *peers)
    ]
    if min(len(each) for each in seconds) < new_tokens - 1:
        return None
    ratio: float = sum(seconds[0]) / min(sum(each) for each in seconds[1:])
    return round(ratio, 3)


def print_claims(claims: Sequence[Claim]) -> None:
    width = max(len(claim.text) for claim in claims)
    for claim in claims:
        measured = "not measured" if claim.measured is None else f"{claim.measured:.3g}"
        verdict = {True: "holds", False: "DOES NOT HOLD", None: ""}[claim.holds]
        sign = ">=" if claim.at_least else "<="
        print(f"{claim.text:<{width}}  {measured:>12}  {sign} {claim.limit:<5g} {verdict}")
