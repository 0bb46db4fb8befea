"""The part of `splitpoint plan --device-memory`: which weights stay, and the time of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from splitpoint.config import counted
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Plan, PlanInput
from splitpoint.planning.weight_placement import (
    StepRates,
    WeightObjective,
    WeightPlacement,
    WeightSizes,
)
from splitpoint.planning.weight_step import (
    WeightStep,
    prefill_tokens_beside_weights,
    weight_step,
    with_weights,
)
from splitpoint.shapes import ArenaLayout, ModelShape
from splitpoint_cli.output import seconds_text
from worker_service.device.memory import STAGING_PAGES, divide, grown_prefill, place


@dataclass(frozen=True, slots=True)
class PlannedWeights:
    """Places of a model's weights in a worker with limited device memory.

    Attributes:
        profile: the costs, with the bytes of weights that each step copies.
        prefill_tokens: prompt tokens that a step computes while they cross the link.
        max_batched_tokens: prompt tokens of a step, which grow while weights cross the link.
    """

    sizes: WeightSizes
    placement: WeightPlacement
    profile: Profile
    prefill_tokens: int
    max_batched_tokens: int


def plan_weights(
    shape: ModelShape,
    profile: Profile,
    *,
    budget_bytes: int,
    chunk_tokens: int,
    has_activations: bool,
    max_batch: int,
    max_batched_tokens: int,
    objective: WeightObjective = WeightObjective.BALANCED,
) -> PlannedWeights:
    """Divide the memory as a worker does at its start. Raises ResourceExhausted as it would."""
    sizes = WeightSizes.of(shape)
    layout = ArenaLayout.of(shape, chunk_tokens=chunk_tokens, has_activations=has_activations)
    rates = StepRates.of(shape, profile)
    limits: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "max_batch_size": max_batch,
        "max_batched_tokens": max_batched_tokens,
        "staging_pages": STAGING_PAGES,
        "has_store": True,
    }
    placement = place(shape, layout, sizes, **limits, rates=rates, objective=objective)
    grown = grown_prefill(shape, layout, placement, rates, **limits)
    divide(
        shape,
        layout,
        weight_bytes=placement.device_bytes,
        **limits | {"max_batched_tokens": grown},
    )
    with_host = with_weights(profile, sizes, placement)
    free = prefill_tokens_beside_weights(shape, with_host, with_host.step_compute_seconds)
    return PlannedWeights(sizes, placement, with_host, free, grown)


def step_of(
    shape: ModelShape, planned: PlannedWeights, request: PlanInput, answer: Plan
) -> WeightStep:
    """Return one decode step of the planned request alone."""
    given = request.step_compute_seconds
    compute = planned.profile.step_compute_seconds if given is None else given
    return weight_step(shape, planned.profile, planned.sizes, planned.placement, answer, compute)


def weights_report(planned: PlannedWeights, step: WeightStep) -> dict[str, object]:
    """Return the part for `--json`: bytes and seconds."""
    return {
        "host_layers": list(planned.placement.on_host.layers),
        "table_on_host": planned.placement.on_host.table,
        "head_on_host": planned.placement.on_host.head,
        "device_weight_bytes": planned.placement.device_bytes,
        "streamed_weight_bytes": planned.placement.streamed_bytes,
        "max_batched_tokens": planned.max_batched_tokens,
        "weights_reason": planned.placement.reason,
        "prefill_tokens_beside_weights": planned.prefill_tokens,
        "weight_step": dataclasses.asdict(step),
    }


def weights_rows(planned: PlannedWeights, step: WeightStep) -> list[tuple[str, str]]:
    """Return the rows for the table."""
    listed = [("weights", planned.placement.reason)]
    if planned.placement.streamed_bytes:
        listed.append(
            (
                "a step with them",
                f"{seconds_text(step.fine)}, of which the link {seconds_text(step.link)}; with "
                f"whole layers ahead of their cache {seconds_text(step.coarse)}",
            )
        )
        tokens = counted(planned.prefill_tokens, "prompt token")
        computed = f"{planned.max_batched_tokens:,} are computed at once"
        listed.append(("prefill beside them", f"{tokens} a step at no cost: {computed}"))
    return listed
