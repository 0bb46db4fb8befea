"""`splitpoint plan --explain-residency`: four ways to decode many requests, and the best one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from splitpoint.config import counted, format_size, parse_size
from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Objective
from splitpoint.planning.schedule import Schedule
from splitpoint.residency.load import DeviceRoom, RequestLoad
from splitpoint.residency.ways import Comparison, Forecast, Impossible, compare_ways
from splitpoint.shapes import Encoding, ModelShape
from splitpoint_cli.output import facts_table, print_table, seconds_text
from splitpoint_cli.planning.options import PlanOptions
from splitpoint_cli.planning.size import DEVICE_MEMORY
from splitpoint_cli.planning.sizing import Node, divided


@dataclass(frozen=True, slots=True)
class Explained:
    """A comparison, and what was compared.

    Attributes:
        device_memory_bytes: of the worker, weights included.
        weights_reason: where the weights are.
    """

    shape: ModelShape
    profile: Profile
    load: RequestLoad
    room: DeviceRoom
    device_memory_bytes: int
    weights_reason: str
    comparison: Comparison


def explain_residency(options: PlanOptions, shape: ModelShape, profile: Profile) -> Explained:
    """Return the comparison for `options.requests` requests like the planned one.

    Raises InvalidArgument if the device's memory is not known, ResourceExhausted if the
    weights do not fit.
    """
    load = RequestLoad(
        request_count=options.requests,
        prompt_tokens=options.cached + options.new,
        cached_tokens=options.cached,
        answer_tokens=options.max_tokens,
        shared_tokens=options.shared,
    )
    node = Node(
        profile,
        _memory(options),
        max_batch=options.max_batch,
        max_batched_tokens=options.max_batched_tokens,
        chunk_tokens=options.chunk_tokens,
        encoding=Encoding(options.encoding),
        step_compute_seconds=options.step_seconds,
    )
    return explained(
        shape,
        node,
        load,
        has_activations=options.activations and shape.activations_can_pay,
        schedule=Schedule(options.schedule),
        objective=Objective(options.objective),
        slice_tokens=options.slice_tokens,
    )


def explained(
    shape: ModelShape,
    node: Node,
    load: RequestLoad,
    *,
    has_activations: bool,
    schedule: Schedule,
    objective: Objective,
    slice_tokens: int,
) -> Explained:
    """Divide the node's memory as its worker does at its start, and compare."""
    worker = divided(shape, node, has_activations=has_activations)
    memory = worker.memory
    room = DeviceRoom(
        cache_bytes=memory.cache_capacity_bytes,
        streamed_pages=memory.streamed_page_count,
        max_batch=node.max_batch,
        has_activations=has_activations,
        chunk_tokens=node.chunk_tokens,
        staging_tokens=memory.staging_pages * node.chunk_tokens,
        prefill_tokens=node.max_batched_tokens,
        schedule=schedule,
        encoding=node.encoding,
        objective=objective,
        step_compute_seconds=node.step_compute_seconds,
        slice_tokens=slice_tokens,
    )
    return Explained(
        shape,
        worker.profile,
        load,
        room,
        node.device_memory_bytes,
        worker.placement.reason,
        compare_ways(shape, worker.profile, load, room),
    )


def residency_report(found: Explained) -> dict[str, object]:
    """Return the object that `--json` prints: sizes in bytes, times in seconds."""
    comparison = found.comparison
    return {
        "model": found.shape.name,
        "profile": dataclasses.asdict(found.profile),
        "objective": found.room.objective.value,
        "device_memory_bytes": found.device_memory_bytes,
        "cache_bytes": found.room.cache_bytes,
        **dataclasses.asdict(found.load),
        "slice_tokens": found.room.slice_tokens,
        "link_bound_tokens_per_second": comparison.link_bound,
        "ways": [_way(each) for each in comparison.ways],
        "best": comparison.best.way.value if comparison.best else None,
        "reason": comparison.reason,
    }


def _way(each: Forecast | Impossible) -> dict[str, object]:
    is_possible = isinstance(each, Forecast)
    return {**dataclasses.asdict(each), "way": each.way.value, "is_possible": is_possible}


def show_residency(found: Explained) -> None:
    """Print what was compared, the four ways, and the choice."""
    print_table(facts_table(_rows(found)))
    table = Table(box=None, pad_edge=False)
    table.add_column("way")
    for title in ("at once", "tokens/s", "mean finish", "last finish", "a step", "link a token"):
        table.add_column(title, justify="right")
    for each in found.comparison.ways:
        if isinstance(each, Impossible):
            table.add_row(each.way.value, "–", "–", "–", "–", "–", each.reason)
        else:
            table.add_row(*_cells(each))
    print_table(table)
    choice = found.comparison.best
    rows = [
        ("chosen", choice.way.value if choice else "none is possible"),
        ("reason", found.comparison.reason),
    ]
    print_table(facts_table(rows))


def _cells(each: Forecast) -> tuple[str, ...]:
    return (
        each.way.value,
        f"{each.at_once:,}",
        f"{each.tokens_per_second:,.0f}",
        seconds_text(each.mean_seconds),
        seconds_text(each.last_seconds),
        seconds_text(each.step_seconds),
        format_size(round(each.link_bytes_per_token)),
    )


def _rows(found: Explained) -> Iterator[tuple[str, str]]:
    shape, load, room = found.shape, found.load, found.room
    yield "model", f"{shape.name}, {shape.data_type.value}, {counted(shape.layer_count, 'layer')}"
    yield "profile", found.profile.description or "from a file"
    shared = f" ({load.shared_tokens:,} of them shared)" if load.shared_tokens else ""
    yield (
        "requests",
        f"{load.request_count:,} at once, each {load.cached_tokens:,} cached{shared}, "
        f"{load.new_tokens:,} new, {load.answer_tokens:,} generated",
    )
    yield (
        "device",
        f"{format_size(found.device_memory_bytes)}, of which {format_size(room.cache_bytes)} for "
        f"caches: {room.resident_at_once(shape, load):,} resident at once, in batches of at most "
        f"{room.max_batch:,}",
    )
    if found.profile.host_weight_bytes:
        yield "weights", found.weights_reason
    yield "objective", room.objective.value
    yield (
        "link alone",
        f"streams at most {found.comparison.link_bound:,.1f} tokens/s of "
        f"{counted(load.mean_length, 'token')}, if nothing is rebuilt and nothing stays",
    )


def _memory(options: PlanOptions) -> int:
    if options.device_memory is not None:
        return parse_size(options.device_memory, field="device_memory")
    if options.profile.lower() in BUILT_IN_PROFILES:
        return DEVICE_MEMORY
    raise InvalidArgument(
        f"how much memory does a worker of {options.profile} have? Give --device-memory",
        field="device_memory",
    )
