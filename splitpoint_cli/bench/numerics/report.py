"""Results of `bench numerics`, as JSON and as a table; runs nothing, needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from splitpoint_cli.bench.decode_report import Run
from splitpoint_cli.bench.numerics.variants import REFERENCE, Variant
from splitpoint_cli.bench.shared.report import commit, hardware, report_table
from splitpoint_cli.output import seconds_text

# A reported token: its log-probability, and the most likely tokens with theirs.
Logprobs = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class NumericsWorkload:
    """Greedy answers of `new` tokens to `prompts` prompts of 8 to `prompt` tokens.

    Attributes:
        model: the checkpoint folder.
        kernels: `--cpu-kernels` of the worker whose answers are compared.
        fast_kernels: those of the worker whose speed is compared.
        cost_shape: a built-in shape with random weights for the cost; empty: it is not measured.
    """

    model: str
    dtype: str
    prompts: int
    prompt: int
    new: int
    page_tokens: int
    kernels: str
    fast_kernels: str
    cost_shape: str
    repeats: int
    device: str
    threads: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens with their log-probabilities; `first` were delivered by another worker."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position of an answer that differs from the reference.

    `wanted` and `found` are the tokens there, `logprob` and `found_logprob` theirs.
    """

    prompt: int
    prompt_tokens: int
    position: int
    wanted: int
    found: int
    logprob: float
    found_logprob: float


@dataclass(slots=True)
class Work:
    """What a variant made the engine do: evidence that it took the way that it names."""

    loaded: int = 0
    rebuilt: int = 0
    recomputed: int = 0
    on_device: int = 0
    streamed_loaded: int = 0
    streamed_rebuilt: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class VariantResult:
    """All answers of one variant beside the reference's.

    Attributes:
        differences: the first one of each answer that differs.
        largest_logprob_difference: up to the first token that differs, of all answers.
    """

    variant: Variant
    answers: int = 0
    equal_answers: int = 0
    equal_logprobs: int = 0
    largest_logprob_difference: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    def compare(self, prompt: int, prompt_tokens: int, found: Answer, wanted: Answer) -> None:
        """Count one answer."""
        tokens, logprobs = wanted.tokens[found.first :], wanted.logprobs[found.first :]
        self.answers += 1
        self.equal_answers += found.tokens == tokens
        self.equal_logprobs += found.logprobs == logprobs
        if (found.tokens, found.logprobs) == (tokens, logprobs):
            return
        steps = [*zip(tokens, found.tokens, logprobs, found.logprobs, strict=False)]
        place = next(
            (n for n, step in enumerate(steps) if step[0] != step[1] or step[2] != step[3]),
            len(steps) - 1,
        )
        token, other, (logprob, _), (found_logprob, _) = steps[place]
        self.differences.append(
            Difference(
                prompt,
                prompt_tokens,
                position=found.first + place,
                wanted=token,
                found=other,
                logprob=logprob,
                found_logprob=found_logprob,
            )
        )
        for token, other, (logprob, _), (found_logprob, _) in steps:
            if token != other:
                break
            self.largest_logprob_difference = max(
                self.largest_logprob_difference, abs(logprob - found_logprob)
            )

    @property
    def is_equal(self) -> bool:
        return not self.differences


@dataclass(frozen=True, slots=True)
class Cost:
    """Runs of a batch with the compared worker's kernels, and with the fast ones."""

    batch: int
    prompt: int
    new: int
    runs: Sequence[Run]
    fast_runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class NumericsResults:
    """What `bench numerics` found.

    Attributes:
        kernels: as they were chosen; empty on a GPU.
        numerics: what a worker says of itself at its start, and `numerics_reason` why.
        fast_kernels: likewise; the cost is not measured if they are the same.
        error: what ended the comparison before all variants, or the cost, were through; empty:
            nothing did.
    """

    shape: str
    kernels: str
    numerics: str
    numerics_reason: str
    variants: Sequence[VariantResult]
    fast_kernels: str
    costs: Sequence[Cost]
    error: str = ""


def report_of(workload: NumericsWorkload, results: NumericsResults) -> dict[str, Any]:
    """Return the whole result, fit for JSON."""
    return {
        "benchmark": "numerics",
        **asdict(workload),
        "shape": results.shape,
        "kernels": results.kernels,
        "numerics": results.numerics,
        "numerics_reason": results.numerics_reason,
        "fast_kernels": results.fast_kernels,
        "hardware": hardware(),
        "commit": commit(),
        "reference": REFERENCE.name,
        "error": results.error,
        "equal": not results.error and all(each.is_equal for each in results.variants),
        "variants": [_variant_json(each) for each in results.variants],
        "costs": [_cost_json(each) for each in results.costs],
    }


def _variant_json(result: VariantResult) -> dict[str, Any]:
    first = min(result.differences, key=lambda each: each.prompt, default=None)
    return {
        "name": result.variant.name,
        "answers": result.answers,
        "equal_answers": result.equal_answers,
        "equal_logprobs": result.equal_logprobs,
        "largest_logprob_difference": result.largest_logprob_difference,
        "first_difference": None if first is None else asdict(first),
        "work": {name: count for name, count in asdict(result.work).items() if count},
    }


def _cost_json(cost: Cost) -> dict[str, Any]:
    first, fast_first = (
        statistics.median(run.first_token_seconds for run in runs)
        for runs in (cost.runs, cost.fast_runs)
    )
    step, fast_step = (
        statistics.median((run.seconds - run.first_token_seconds) / (cost.new - 1) for run in runs)
        for runs in (cost.runs, cost.fast_runs)
    )
    return {
        "batch": cost.batch,
        "prompt": cost.prompt,
        "new": cost.new,
        "step_seconds": step,
        "fast_step_seconds": fast_step,
        "step_ratio": round(step / fast_step, 3),
        "first_token_seconds": first,
        "fast_first_token_seconds": fast_first,
        "first_token_ratio": round(first / fast_first, 3),
    }


def table_of(report: Mapping[str, Any]) -> Table:
    """Return a row for each variant: equal answers, equal log-probabilities, what differs first."""
    table = report_table(
        f"{report['shape']} {report['dtype']}: {report['prompts']} prompts of at most "
        f"{report['prompt']} tokens, {report['new']} new, beside {report['reference']}",
        *("variant", "answers", "logprobs", "largest", "first"),
    )
    for each in report["variants"]:
        count, first = each["answers"], each["first_difference"]
        place = "" if first is None else f"{first['prompt']}:{first['position']}"
        largest = each["largest_logprob_difference"]
        table.add_row(
            each["name"],
            f"{each['equal_answers']}/{count}",
            f"{each['equal_logprobs']}/{count}",
            f"{largest:.1e}" if largest else "",
            place,
        )
    table.caption = "\n".join(_notes(report))
    return table


def _notes(report: Mapping[str, Any]) -> list[str]:
    differing = sum(each["first_difference"] is not None for each in report["variants"])
    count = len(report["variants"])
    notes = [
        report["hardware"] + (f": {report['kernels']}" if report["kernels"] else ""),
        f"all {count} variants are equal, bit for bit"
        if not differing and not report["error"]
        else f"{differing} of {count} variants differ; first: prompt and position",
    ]
    if report["error"]:
        notes.append(f"FAILED: {report['error']}")
    notes.append(f"a worker says {report['numerics']}: {report['numerics_reason']}")
    for cost in report["costs"]:
        notes.append(
            f"batch {cost['batch']}: step {seconds_text(cost['step_seconds'])}, "
            f"{cost['step_ratio']} x fast; first token "
            f"{seconds_text(cost['first_token_seconds'])}, {cost['first_token_ratio']} x fast"
        )
    if report["costs"]:
        notes.append(f"{report['cost_shape']}; fast: {report['fast_kernels']}")
    elif report["cost_shape"] and not report["error"]:
        notes.append("no cost: these are the fast kernels")
    return notes
