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
from splitpoint.planning.split_line import SplitLine
from splitpoint.planning.split_search import best_pipeline_options, best_split
from splitpoint.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A split of every sequence. The planner's has a reason, and a line to follow."""

    split_tokens: int
    step_seconds: float
    reason: str = ""
    line: SplitLine | None = None


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
        return BatchSplit(split, self.step_seconds(split), plan.reason, plan.line)

    def sequential(self) -> BatchSplit:
        """Return the best split when nothing overlaps."""
        return self._best(self._costs, self._step(PipelineOptions(Schedule.SERIAL)))

    def column(self) -> BatchSplit:
        """Return KVPR's best split: all of X first, then rebuilding beside loading (Eq. 10)."""
        costs = replace(self._costs, embeds=False)
        return self._best(costs, self._step(PipelineOptions(Schedule.COLUMN)))

    def step_seconds(self, split: int) -> float:
        """Return the time of a pipelined step with each sequence split at `split`."""
        return self._costs.seconds(self._all(split), self._total, self._pipelined)

    def bound(self, split: int) -> tuple[float, float]:
        """Return (link seconds, compute seconds) of a step; the greater is its lower bound."""
        rates = replace(self._costs, copy_overhead=0.0, rebuild_overhead=0.0)
        total = self._all(split)
        link = rates.link_seconds(total, self._total)
        return link, self.compute_seconds + rates.rebuild_seconds(total)

    # -- below ------------------------------------------------------------------------

    @property
    def _total(self) -> int:
        return self.batch * self.cached

    @property
    def _costs(self) -> SplitCosts:
        return SplitCosts.of(self.shape, self.profile)

    def _step(self, options: PipelineOptions) -> PipelineOptions:
        return replace(options, scenario=Scenario.DECODE_STEP, compute_seconds=self.compute_seconds)

    @property
    def _pipelined(self) -> PipelineOptions:
        options = best_pipeline_options(
            self._costs,
            self._total,
            Schedule.PIPELINED,
            chunk_tokens=self.chunk_tokens,
            staging_tokens=self.staging_tokens,
        )
        return self._step(options)

    def _best(self, costs: SplitCosts, options: PipelineOptions) -> BatchSplit:
        quantum = self.batch * self.chunk_tokens
        total = best_split(costs, self._total, options, quantum=quantum)
        if not self.has_activations:
            total = 0
        return BatchSplit(self._of_each(total), costs.seconds(total, self._total, options))

    def _all(self, split: int) -> int:
        return self.batch * split

    def _of_each(self, total: int) -> int:
        """Return the split of each sequence: whole chunks, or everything."""
        if total >= self._total:
            return self.cached
        chunks = round(total / self.batch / self.chunk_tokens)
        return min(chunks * self.chunk_tokens, self.cached)
