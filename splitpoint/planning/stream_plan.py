"""What each decode step of a streamed sequence pulls, and what of it can stay instead.

Three ways for a token of the prefix: resident | rebuilt | loaded. With spare device
memory either K and V of the front stay there, and the best split divides the rest;
or X stays there (schedule ROW), from which the front is rebuilt in every step. K and V
take 1 / rho times the bytes of X, so for rho >= 1 they always serve more tokens, and
without any work. For rho < 1 X serves more tokens, which wins where the device would
wait for the link. Knows no requests and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import PipelineOptions, SplitCosts
from splitpoint.planning.split_search import best_split
from splitpoint.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What a step does: [0, resident) stays, [resident, split) is rebuilt, the rest loaded.

    With schedule ROW, X of [0, resident) stays and is rebuilt from; `split` is equal.
    `split` 0: nothing is rebuilt. `seconds`: of a decode step.
    """

    resident: int
    split: int
    schedule: Schedule
    seconds: float


def best_stream_plan(
    shape: ModelShape,
    costs: SplitCosts,
    cached: int,
    options: PipelineOptions,
    *,
    chunk_tokens: int = 1,
    spare_bytes: int = 0,
    has_activations: bool = True,
    keeps_activations: bool = True,
) -> StreamPlan:
    """The pull with the least seconds a step; the plainest of equal ones.

    Args:
        options: of a decode step, `compute_seconds` being what it computes beside.
        spare_bytes: device memory for what stays.
        keeps_activations: X may be what stays there.
    """
    resident = _whole_chunks(spare_bytes // shape.kv_bytes_per_token, chunk_tokens, cached)
    split = 0
    if has_activations:
        split = best_split(costs, cached - resident, options, quantum=chunk_tokens)
    best = stream_plan_at(costs, cached, options, resident, resident + split if split else 0)
    is_serial = options.schedule is Schedule.SERIAL
    if is_serial or not (has_activations and keeps_activations and shape.activations_can_pay):
        return best
    # X lies in pages that are made for K and V.
    pages = spare_bytes // shape.page_bytes(chunk_tokens)
    held = pages * shape.activations_per_page * chunk_tokens
    room = _whole_chunks(held, chunk_tokens, cached)
    row = replace(options, schedule=Schedule.ROW)
    front = best_split(costs, cached, row, quantum=chunk_tokens, cap=room)
    seconds = costs.seconds(front, cached, row)
    if front and seconds < best.seconds:
        return StreamPlan(front, front, Schedule.ROW, seconds)
    return best


def stream_plan_at(
    costs: SplitCosts, cached: int, options: PipelineOptions, resident: int, split: int
) -> StreamPlan:
    """The pull with K,V of [0, resident) on the device and this split."""
    seconds = costs.seconds(max(split - resident, 0), cached - resident, options)
    return StreamPlan(resident, split, options.schedule, seconds)


def _whole_chunks(tokens: int, chunk_tokens: int, cached: int) -> int:
    if tokens >= cached:
        return cached
    return tokens // chunk_tokens * chunk_tokens
