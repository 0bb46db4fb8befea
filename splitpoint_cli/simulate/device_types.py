"""Kinds of devices by name, and the worker that one of them makes with a model."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.first_token import kappa_crit
from splitpoint.costs.profile import Profile, assumed_profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_placement import WeightSizes
from splitpoint.residency.seconds import DeviceRoom, PieceSeconds
from splitpoint.shapes import ArenaLayout, ModelShape
from splitpoint_cli.planning.sizing import Node, divided
from splitpoint_cli.simulate.costs import NO_OVERHEADS, DeviceCosts, Overheads
from worker_service.device.memory import STAGING_PAGES

# Part of a card's memory that a worker gets, after the driver and CUDA: `splitpoint size` takes
# 72 GiB of 80.
MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A kind of device.

    Attributes:
        profile: rates of its link, compute and memory.
        memory_bytes: what a worker gets of its memory.
        idle_watts, full_watts: power at rest, and its limit; None: unknown.
        cache_bytes: what its worker was seen to have for K and V; None: `memory_bytes` is divided
            as a worker does at its start.
    """

    name: str
    profile: Profile
    memory_bytes: int
    idle_watts: float | None = None
    full_watts: float | None = None
    cache_bytes: int | None = None


# (link GB/s that copies reach, dense bf16 TFLOP/s, memory TB/s, memory GB, watts idle and limit),
# all from data sheets; idle watts are typical readings.
_CARDS: dict[str, tuple[float, float, float, float, float, float]] = {
    "A100": (25, 312, 1.94, 85.9, 60, 400),
    "L40S": (25, 362, 0.864, 48.0, 35, 350),
    "H100": (52, 989, 3.35, 85.9, 70, 700),
    "H200": (54, 989, 4.8, 141.0, 75, 700),
    "B200": (55, 2250, 8.0, 180.0, 140, 1000),
    "GH200": (400, 989, 4.0, 96.0, 100, 700),
}

DEVICE_TYPES: dict[str, DeviceType] = {
    name: DeviceType(
        name,
        assumed_profile(name, link, flops, memory),
        int(MEMORY_SHARE * size * 1e9),
        idle,
        full,
    )
    for name, (link, flops, memory, size, idle, full) in _CARDS.items()
}


def device_type(name: str) -> DeviceType:
    """Return a kind by name, in any case. Raises InvalidArgument."""
    found = DEVICE_TYPES.get(name.upper())
    if found is None:
        raise InvalidArgument(
            f"device {name!r} is not one of {', '.join(DEVICE_TYPES)}", field="devices"
        )
    return found


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker on one kind of device, as the scheduler and the simulation know it.

    Attributes:
        facts: what the policy knows of it; `worker_id` is the kind's name here.
        kappa_crit: cached over new tokens beyond which its link is the limit.
    """

    type: DeviceType
    facts: WorkerFacts
    costs: DeviceCosts
    kappa_crit: float

    @property
    def page_count(self) -> int:
        return self.facts.cache_capacity_bytes // self.facts.page_bytes


def worker_on(
    kind: DeviceType, shape: ModelShape, node: Node, overheads: Overheads = NO_OVERHEADS
) -> Worker:
    """Return the worker that `node` makes on a device; its memory is divided as by a worker.

    Raises ResourceExhausted if the device is too small for the model.
    """
    facts = _facts(kind, shape, node)
    room = DeviceRoom(
        has_activations=facts.has_activations,
        chunk_tokens=node.chunk_tokens,
        staging_tokens=facts.staging_tokens,
        prefill_tokens=node.max_batched_tokens,
        encoding=node.encoding,
        step_compute_seconds=_step_seconds(shape, facts.profile, node),
    )
    return Worker(
        kind,
        facts,
        DeviceCosts(PieceSeconds(shape, facts.profile, room), overheads),
        kappa_crit(shape, facts.profile, node.encoding),
    )


def _facts(kind: DeviceType, shape: ModelShape, node: Node) -> WorkerFacts:
    has_activations = shape.activations_can_pay
    layout = ArenaLayout.of(
        shape,
        chunk_tokens=node.chunk_tokens,
        has_activations=has_activations,
        encoding=node.encoding,
    )
    capacity, streamed, staging, profile = kind.cache_bytes, 1, STAGING_PAGES, kind.profile
    if capacity is None:
        parts = divided(shape, node, has_activations=has_activations)
        capacity, profile = parts.memory.cache_capacity_bytes, parts.profile
        streamed, staging = parts.memory.streamed_page_count, parts.memory.staging_pages
    return WorkerFacts(
        worker_id=kind.name,
        address=kind.name,
        shape=shape,
        profile=profile,
        chunk_tokens=node.chunk_tokens,
        has_activations=has_activations,
        cache_capacity_bytes=capacity,
        page_bytes=shape.page_bytes(node.chunk_tokens),
        streamed_page_count=streamed,
        max_batch_size=node.max_batch,
        kvstore_address="store",
        slot_bytes=layout.chunk_bytes,
        schedule=Schedule.PIPELINED,
        staging_tokens=staging * node.chunk_tokens,
        max_batched_tokens=node.max_batched_tokens,
        encoding=node.encoding,
        shares_pages=True,
        weight_format=node.weights,
    )


def _step_seconds(shape: ModelShape, profile: Profile, node: Node) -> float | None:
    """Return the seconds in which a step reads all weights, as they are held; None: measured."""
    if node.step_compute_seconds is not None or profile.step_compute_seconds:
        return node.step_compute_seconds
    sizes = WeightSizes.of(shape, node.weights)
    read = sizes.total - (0 if sizes.head_is_table else sizes.table)
    return read * profile.memory_seconds_per_byte
