"""Predicted seconds of a decode step whose weights cross the link, by simulating its lanes.

For planning without a worker: bytes from the shape, rates from a profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Plan, Residency
from splitpoint.planning.split_costs import SplitCosts, tiles_of
from splitpoint.planning.weight_placement import WeightPlacement, WeightSizes
from splitpoint.planning.weight_schedule import (
    PassCosts,
    PassKind,
    PassWork,
    WeightOrder,
    WeightPiece,
    simulate_pass,
)
from splitpoint.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class WeightStep:
    """Seconds of one step: in the worker's order, with whole layers in turn, and of the link."""

    fine: float
    coarse: float
    link: float


def with_weights(profile: Profile, sizes: WeightSizes, placement: WeightPlacement) -> Profile:
    """Return the profile of a worker that keeps these weights on the host."""
    layers = len(placement.on_host.layers)
    return replace(
        profile,
        host_weight_bytes=placement.streamed_bytes,
        host_kv_weight_bytes=layers * sizes.pieces[WeightPiece.KEY_VALUE],
    )


def prefill_tokens_beside_weights(
    shape: ModelShape, profile: Profile, step_compute_seconds: float
) -> int:
    """Return the prompt tokens that a step computes while its weights cross the link.

    A step lasts at least W / v_link for W bytes of weights on the host. Its decodes compute
    `step_compute_seconds` of that; a prefill fills the rest at no cost. 0 if all weights are
    on the device, or if decodes take longer than the weights.
    """
    idle = profile.weight_seconds - step_compute_seconds - profile.prefill_overhead_seconds
    return max(0, int(idle * profile.prefill_flops_per_second / shape.prefill_flops_per_token))


def weight_step(
    shape: ModelShape,
    profile: Profile,
    sizes: WeightSizes,
    placement: WeightPlacement,
    plan: Plan,
    step_compute_seconds: float,
) -> WeightStep:
    """Return the seconds of a step that computes `step_compute_seconds` and streams by `plan`.

    Computing is divided among a layer's products by their weights. The head follows the
    layers and takes its time on the link.
    """
    costs = SplitCosts.of(shape, profile)
    is_streamed = plan.residency is Residency.STREAMED
    streamed = plan.cached_tokens - plan.resident_tokens if is_streamed else 0
    rebuilt = max(0, plan.split_tokens - plan.resident_tokens) if is_streamed else 0
    tiles = max(1, tiles_of(rebuilt, plan.tile_tokens))
    work = PassWork(
        shape.layer_count,
        frozenset(placement.on_host.layers),
        rebuilds=rebuilt > 0,
        loads=streamed > rebuilt,
        tiles=tiles,
    )
    compute = step_compute_seconds / shape.layer_count / sizes.layer
    piece = sizes.pieces
    seconds = PassCosts(
        {
            each: costs.copy_overhead + size / profile.link_bytes_per_second
            for each, size in piece.items()
        },
        {
            PassKind.SEND: costs.copy_overhead + costs.activation * rebuilt / tiles,
            PassKind.LOAD: costs.copy_overhead + costs.load * (streamed - rebuilt) / tiles,
            PassKind.REBUILD: costs.rebuild_overhead + costs.rebuild * rebuilt / tiles,
            PassKind.PROJECT: compute * (piece[WeightPiece.KEY_VALUE] + piece[WeightPiece.QUERY]),
            PassKind.OUTPUT: compute * piece[WeightPiece.OUTPUT],
            PassKind.MLP: compute * piece[WeightPiece.MLP],
        },
    )
    head = sizes.head / profile.link_bytes_per_second if placement.on_host.head else 0.0
    fine = simulate_pass(work, seconds, WeightOrder.FINE)
    coarse = simulate_pass(work, seconds, WeightOrder.COARSE)
    return WeightStep(
        fine.seconds + head, coarse.seconds + head, fine.busy.get("link in", 0.0) + head
    )
