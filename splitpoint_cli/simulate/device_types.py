"""Kinds of devices by name, and the worker that one of them makes with a model."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.bottleneck import kappa_crit
from splitpoint.costs.profile import MACHINES, Machine, Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_placement import WeightSizes
from splitpoint.residency.seconds import DeviceRoom, PieceSeconds
from splitpoint.shapes import ArenaLayout, ModelShape
from splitpoint_cli.planning.sizing import Node, divided
from splitpoint_cli.simulate.costs import NO_OVERHEADS, DeviceCosts, Overheads
from worker_service.device.memory import STAGING_PAGES


def device_type(name: str) -> Machine:
    """Return a kind by name, in any case. Raises InvalidArgument."""
    found = MACHINES.get(name.lower())
    if found is None:
        raise InvalidArgument(
            f"device {name!r} is not one of {', '.join(MACHINES)}", field="devices"
        )
    return found


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker on one kind of device, as the scheduler and the simulation know it.

    Attributes:
        facts: what the policy knows of it; `worker_id` is the kind's name here.
        kappa_crit: cached over new tokens beyond which its link is the limit.
    """

    type: Machine
    facts: WorkerFacts
    costs: DeviceCosts
    kappa_crit: float

    @property
    def page_count(self) -> int:
        return self.facts.cache_capacity_bytes // self.facts.page_bytes


def worker_on(
    kind: Machine, shape: ModelShape, node: Node, overheads: Overheads = NO_OVERHEADS
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


def _facts(kind: Machine, shape: ModelShape, node: Node) -> WorkerFacts:
    has_activations = shape.activations_can_pay
    layout = ArenaLayout.of(
        shape,
        chunk_tokens=node.chunk_tokens,
        has_activations=has_activations,
        encoding=node.encoding,
    )
    capacity, streamed, staging, profile = kind.cache_bytes, 1, STAGING_PAGES, kind.profile
    page_bytes = shape.page_bytes(node.chunk_tokens)
    if capacity is not None:
        pages = capacity // page_bytes
        batch = node.batch(shape, profile, lambda _: pages, prefill_tokens=node.max_batched_tokens)
    else:
        parts = divided(shape, node, has_activations=has_activations)
        memory, profile, batch = parts.device.memory, parts.profile, parts.batch
        capacity, streamed = memory.cache_capacity_bytes, memory.streamed_page_count
        staging = memory.staging_pages
    return WorkerFacts(
        worker_id=kind.name,
        address=kind.name,
        shape=shape,
        profile=profile,
        chunk_tokens=node.chunk_tokens,
        has_activations=has_activations,
        cache_capacity_bytes=capacity,
        page_bytes=page_bytes,
        streamed_page_count=streamed,
        max_batch_size=batch.size,
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
