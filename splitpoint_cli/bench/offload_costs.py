"""The planner's predictions for a batch whose cache is on the host: splits and step times.

Equal sequences that decode together share the link and the step, so to the planner
they are one sequence of all their tokens. Pure arithmetic; knows no runs, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.planner import plan_batch
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import PipelineOptions, Scenario, SplitCosts
from splitpoint.planning.split_search import best_pipeline_options
from splitpoint.planning.words import sentence
from splitpoint.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A split of every sequence. The planner's has a reason."""

    split_tokens: int
    step_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """`batch` sequences with `cached` tokens each.

    Attributes:
        compute_seconds: a step of the batch with nothing to fetch and nothing to rebuild.
        staging_tokens: tokens of X that fit the staging memory.
    """

    shape: ModelShape
    profile: Profile
    batch: int
    cached: int
    has_activations: bool
    chunk_tokens: int
    staging_tokens: int
    compute_seconds: float

    def planned(self) -> BatchSplit:
        """Return the planner's own choice, and why."""
        plan = plan_batch(
            self.shape,
            self.profile,
            [self.cached] * self.batch,
            has_activations=self.has_activations,
            schedule=Schedule.PIPELINED,
            chunk_tokens=self.chunk_tokens,
            staging_tokens=self.staging_tokens,
            step_compute_seconds=self.compute_seconds,
        )
        split = plan.line.at(self.cached, self.chunk_tokens)
        why = "; ".join(map(sentence, plan.reasons))
        return BatchSplit(split, self.step_seconds(split), why)

    def best(self, schedule: Schedule) -> BatchSplit:
        """Return the split with the shortest step in this order; whole chunks, or everything."""
        chunks = range(0, self.cached, self.chunk_tokens) if self.has_activations else [0]
        splits = [*chunks, *([self.cached] if self.has_activations else [])]
        seconds, split = min((self.step_seconds(each, schedule), each) for each in splits)
        return BatchSplit(split, seconds)

    def step_seconds(self, split: int, schedule: Schedule = Schedule.PIPELINED) -> float:
        """Return the time of a step with each sequence split at `split`.

        COLUMN is KVPR's order: max(S + P, max(S, D) + R) + D / L. A layer's X crosses the
        link (S) beside the attention and the MLP of the layer before (D); then it is
        rebuilt (R) while K,V of the rest are loaded (P), as in Eq. 10 there.
        """
        if schedule is Schedule.COLUMN:
            costs, total = self._costs, self._all(split)
            load = costs.link_seconds(0, self._total - total)
            send = self._link_seconds(costs, total) - load
            rebuild = costs.rebuild_seconds(total) + max(0.0, self.compute_seconds - send)
            return send + max(load, rebuild) + self.compute_seconds / costs.layer_count
        options = PipelineOptions(Schedule.SERIAL)
        if schedule is Schedule.PIPELINED:
            options = best_pipeline_options(
                self._costs,
                self._total,
                Schedule.PIPELINED,
                chunk_tokens=self.chunk_tokens,
                staging_tokens=self.staging_tokens,
            )
        step = replace(options, scenario=Scenario.DECODE_STEP, compute_seconds=self.compute_seconds)
        return self._costs.seconds(self._all(split), self._total, step)

    def bound(self, split: int) -> tuple[float, float]:
        """Return (link seconds, compute seconds) of a step; the greater is its lower bound."""
        rates = replace(self._costs, copy_overhead=0.0, rebuild_overhead=0.0)
        total = self._all(split)
        link = self._link_seconds(rates, total)
        return link, self.compute_seconds + rates.rebuild_seconds(total)

    # -- below ------------------------------------------------------------------------

    @property
    def _total(self) -> int:
        return self.batch * self.cached

    @property
    def _costs(self) -> SplitCosts:
        return SplitCosts.of(self.shape, self.profile)

    def _link_seconds(self, costs: SplitCosts, total: int) -> float:
        """Return how long a step keeps the link busy: X, K, V and weights on the host."""
        kv_weights = costs.kv_weights if total else 0.0
        return costs.link_seconds(total, self._total) - kv_weights + costs.weights

    def _all(self, split: int) -> int:
        return self.batch * split
