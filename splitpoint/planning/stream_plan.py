"""The work of a streamed sequence's decode steps, and the part that stays on the device.

A token of the prefix is resident, rebuilt or loaded. With spare device memory either K and
V of the front stay there, and the best split divides the rest; or X of the front stays
there (schedule ROW), and is rebuilt from in every step. K and V take 1 / rho times the
bytes of X, so for rho >= 1 they always serve more tokens, and without any work. For
rho < 1 X serves more tokens, which wins where the device would wait for the link. Knows no
requests and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import PipelineOptions, SplitCosts
from splitpoint.planning.split_search import best_split
from splitpoint.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A step over `length` tokens: resident, [resident, split) rebuilt, the rest loaded.

    With schedule ROW, X of [0, resident) stays on the device and is rebuilt from; `split`
    is equal.

    Attributes:
        split: 0 if nothing is rebuilt.
        seconds: predicted, of a decode step.
    """

    length: int
    resident: int
    split: int
    schedule: Schedule
    seconds: float

    @property
    def ready(self) -> int:
        """Tokens whose K and V stay on the device."""
        return 0 if self.schedule is Schedule.ROW else self.resident

    @property
    def rebuilt(self) -> int:
        """Tokens rebuilt in each step."""
        return max(self.split - self.ready, 0)

    @property
    def restored(self) -> int:
        """Tokens rebuilt or loaded in each step."""
        return self.length - self.ready


def best_stream_plan(
    shape: ModelShape,
    costs: SplitCosts,
    length: int,
    options: PipelineOptions,
    *,
    chunk_tokens: int = 1,
    spare_bytes: int = 0,
    has_activations: bool = True,
    keeps_activations: bool = True,
) -> StreamPlan:
    """Return the plan with the least seconds a step; the plainest of equal ones.

    Args:
        options: of a decode step.
        spare_bytes: device memory for what stays.
        keeps_activations: X may be what stays there.
    """
    resident = _whole_chunks(spare_bytes // shape.kv_bytes_per_token, chunk_tokens, length)
    split = 0
    if has_activations:
        split = best_split(costs, length - resident, options, quantum=chunk_tokens)
    best = stream_plan_at(costs, length, options, resident, resident + split if split else 0)
    is_serial = options.schedule is Schedule.SERIAL
    if is_serial or not (has_activations and keeps_activations and shape.activations_can_pay):
        return best
    # X lies in pages that are made for K and V.
    pages = spare_bytes // shape.page_bytes(chunk_tokens)
    most = pages * shape.activations_per_page * chunk_tokens
    row = replace(options, schedule=Schedule.ROW)
    front = best_split(
        costs, length, row, quantum=chunk_tokens, cap=_whole_chunks(most, chunk_tokens, length)
    )
    seconds = costs.seconds(front, length, row)
    if front and seconds < best.seconds:
        return StreamPlan(length, front, front, Schedule.ROW, seconds)
    return best


def stream_plan_at(
    costs: SplitCosts, length: int, options: PipelineOptions, resident: int, split: int
) -> StreamPlan:
    """Return the plan with K,V of [0, resident) on the device and this split."""
    seconds = costs.seconds(max(split - resident, 0), length - resident, options)
    return StreamPlan(length, resident, split, options.schedule, seconds)


def _whole_chunks(tokens: int, chunk_tokens: int, length: int) -> int:
    if tokens >= length:
        return length
    return tokens // chunk_tokens * chunk_tokens
