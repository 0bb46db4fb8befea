"""Cases of `benchmarks.planner_cases` about residency: waves against streaming, both measured.

More requests than fit the device wait for it. The same engine, weights and store decode
them in waves, each restored and then resident, and all at once, streamed. The planner
predicts both from a profile that ten runs have refitted, and chooses. Both give the same tokens.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness import Timed, is_quiet, median_seconds, timed
from splitpoint.costs.profile import Profile, fit_line
from splitpoint.errors import Internal
from splitpoint.planning.plan import Objective, Residency
from splitpoint.planning.planner import plan_batch
from splitpoint.planning.schedule import Schedule
from splitpoint.residency.load import DeviceRoom, RequestLoad
from splitpoint.residency.seconds import PieceSeconds
from splitpoint.residency.ways import Comparison, Way, compare_ways
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape, chunks_of
from splitpoint_cli.bench.offload.engine import OffloadHost, make_model
from splitpoint_cli.bench.offload.engine import Way as DecodeWay
from splitpoint_cli.bench.offload.report import DecodeRun, OffloadWorkload
from splitpoint_cli.bench.shared.engine_memory import CHUNK_TOKENS, MAX_BATCHED_TOKENS

REFITS = 10
ROUNDS = 4
# A vocabulary whose logits do not outweigh the few layers.
VOCABULARY = 8192
LINK_RATES = (1e8, 3e9)
WAYS = (Way.WAVES, Way.STREAMED)


@dataclass(frozen=True, slots=True)
class ResidencyCase:
    """`load` on a device that holds `at_once` of its requests resident."""

    layers: int
    load: RequestLoad
    at_once: int
    link_rate: int
    seed: int
    threads: int

    @property
    def shape(self) -> ModelShape:
        base = BUILT_IN_SHAPES["opt-125m"]
        return replace(base, layer_count=self.layers, vocabulary_size=VOCABULARY)

    @property
    def workload(self) -> OffloadWorkload:
        return OffloadWorkload(
            shape="opt-125m",
            dtype="float32",
            batch=self.load.request_count,
            prompt=self.load.prompt_tokens,
            new=self.load.answer_tokens,
            link_rate=self.link_rate,
            repeats=ROUNDS,
            device="cpu",
            threads=self.threads,
            seed=self.seed,
        )


def draw(rng: random.Random, threads: int) -> ResidencyCase:
    """Draw a case. The answer stays in the prompt's last chunk: one page of each is streamed."""
    answer = rng.randint(3, 24)
    prompt = rng.randint(2, 6) * CHUNK_TOKENS + rng.randint(1, CHUNK_TOKENS - 1 - answer)
    at_once = rng.randint(1, 2)
    low, high = LINK_RATES
    # As many requests as can be streamed in the memory of those that fit.
    count = at_once * chunks_of(prompt + answer, CHUNK_TOKENS)
    return ResidencyCase(
        layers=rng.randint(3, 6),
        load=RequestLoad(count, prompt, prompt - 1, answer),
        at_once=at_once,
        link_rate=round(low * (high / low) ** rng.random()),
        seed=rng.randrange(1 << 30),
        threads=threads,
    )


def run_case(case: ResidencyCase) -> dict[str, Any]:
    """Measure one case; seconds are medians of the quieter half of the runs."""
    torch.set_num_threads(case.threads)
    with closing(OffloadHost(make_model(case.shape, case.workload), case.workload)) as host:
        host.prefill()
        runner = _Runner(host, case)
        first = runner.compare(host.profile)
        profile = runner.refitted()
        comparison = runner.compare(profile)
        measured = runner.measure(profile)
    if comparison.best is None:
        raise Internal("a residency case without a possible way")
    seconds = {way: median_seconds(runs) for way, runs in measured.items()}
    best = min(seconds, key=lambda way: seconds[way])
    chosen = comparison.best
    return {
        "kind": "residency",
        "shape": case.workload.shape,
        "layers": case.layers,
        "tokens": case.load.prompt_tokens,
        "requests": case.load.request_count,
        "at_once": case.at_once,
        "answer_tokens": case.load.answer_tokens,
        "link_bytes_per_second": case.link_rate,
        "split_can_pay": True,
        "method": chosen.way.value,
        "predicted_seconds": chosen.last_seconds,
        "first_predicted_seconds": _predicted(first, chosen.way),
        "predictions": {way.value: _predicted(comparison, way) for way in WAYS},
        "chosen": chosen.way.value,
        "chosen_seconds": seconds[chosen.way],
        "best": best.value,
        "best_seconds": seconds[best],
        "sweep": {way.value: seconds[way] for way in WAYS},
        "quiet": all(is_quiet(runs) for runs in measured.values()),
    }


def _predicted(comparison: Comparison, way: Way) -> float:
    found = comparison.forecast(way)
    if found is None:
        raise Internal(f"{way.value} is not possible: {comparison.ways}")
    return found.last_seconds


class _Runner:
    """Decodes a case's requests in either way."""

    def __init__(self, host: OffloadHost, case: ResidencyCase) -> None:
        self._host = host
        self._case = case
        self._prompts = host.prompts
        self._tokens: dict[Way, Sequence[Sequence[int]]] = {}

    def compare(self, profile: Profile) -> Comparison:
        return compare_ways(self._host.shape, profile, self._case.load, self._room)

    def refitted(self) -> Profile:
        """Return the profile after ten runs, resident and streamed ones of several sizes."""
        host, case = self._host, self._case
        steps: list[tuple[int, float]] = []
        for number in range(REFITS):
            count = case.load.request_count if number % 3 else 1
            is_resident = number % 2 == 0
            run = self._decode(
                host.profile, count, Residency.RESIDENT if is_resident else Residency.STREAMED
            )
            if is_resident:
                read = count * case.load.mean_length * host.shape.kv_bytes_per_token
                steps.append((read, statistics.median(step.seconds for step in run.steps)))
        return _with_steps(host.refitted_profile, steps)

    def measure(self, profile: Profile) -> dict[Way, list[Timed[None]]]:
        found: dict[Way, list[Timed[None]]] = {way: [] for way in WAYS}
        runs = {
            Way.WAVES: lambda: self._waves(profile),
            Way.STREAMED: lambda: self._streamed(profile),
        }
        for number in range(ROUNDS):
            for way in WAYS if number % 2 else reversed(WAYS):
                found[way].append(timed(runs[way]))
        if self._tokens[Way.WAVES] != self._tokens[Way.STREAMED]:
            raise Internal("the two ways decoded different tokens")
        return found

    # -- inside --------------------------------------------------------------------

    @property
    def _room(self) -> DeviceRoom:
        load, host = self._case.load, self._host
        pages = chunks_of(load.token_count, CHUNK_TOKENS)
        return DeviceRoom(
            cache_bytes=self._case.at_once * pages * host.shape.page_bytes(CHUNK_TOKENS),
            streamed_pages=1,
            max_batch=load.request_count,
            has_activations=host.has_activations,
            chunk_tokens=CHUNK_TOKENS,
            staging_tokens=host.memory.staging_pages * CHUNK_TOKENS,
            prefill_tokens=MAX_BATCHED_TOKENS,
            objective=Objective.THROUGHPUT,
        )

    def _waves(self, profile: Profile) -> None:
        tokens: list[Sequence[int]] = []
        for start in range(0, len(self._prompts), self._case.at_once):
            wave = self._prompts[start : start + self._case.at_once]
            tokens += self._decode_prompts(profile, wave, Residency.RESIDENT).tokens
        self._tokens[Way.WAVES] = tokens

    def _streamed(self, profile: Profile) -> None:
        run = self._decode_prompts(profile, self._prompts, Residency.STREAMED)
        self._tokens[Way.STREAMED] = list(run.tokens)

    def _decode(self, profile: Profile, count: int, residency: Residency) -> DecodeRun:
        return self._decode_prompts(profile, self._prompts[:count], residency)

    def _decode_prompts(
        self, profile: Profile, prompts: tuple[tuple[int, ...], ...], residency: Residency
    ) -> DecodeRun:
        host, load = self._host, self._case.load
        host.prompts = prompts
        pieces = PieceSeconds(host.shape, profile, self._room)
        if residency is Residency.RESIDENT:
            split = pieces.restore_plan(load.cached_tokens).split_tokens
            return host.decode(
                load.answer_tokens, DecodeWay(residency=residency, split_tokens=split)
            )
        line = plan_batch(
            host.shape,
            profile,
            [load.mean_length] * len(prompts),
            has_activations=host.has_activations,
            schedule=Schedule.PIPELINED,
            chunk_tokens=CHUNK_TOKENS,
            staging_tokens=host.memory.staging_pages * CHUNK_TOKENS,
            step_compute_seconds=pieces.step(len(prompts), load.mean_length),
        ).line
        split = line.at(load.cached_tokens, CHUNK_TOKENS)
        return host.decode(load.answer_tokens, DecodeWay(residency=residency, split_tokens=split))


def _with_steps(profile: Profile, steps: Sequence[tuple[int, float]]) -> Profile:
    """Return the profile with what resident steps took: D, and seconds per byte they read."""
    amounts, seconds = zip(*steps, strict=True)
    least = min(amounts)
    alone = statistics.median(taken for read, taken in steps if read == least)
    together = [taken for read, taken in steps if read > least]
    if not together or statistics.median(together) <= alone:
        # The weights decide a step: what more attention takes is lost in the noise.
        return replace(profile, step_compute_seconds=statistics.median(seconds))
    line = fit_line(amounts, seconds)
    return replace(
        profile, step_compute_seconds=line.overhead, memory_seconds_per_byte=1.0 / line.rate
    )
