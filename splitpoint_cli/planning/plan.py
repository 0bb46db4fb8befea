"""`splitpoint plan`: the split point for a model on a machine, without either of them.

With `--device-memory` it also shows which weights stay on the device, and the time of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from splitpoint.config import counted, format_size, parse_rate, parse_size
from splitpoint.costs.profile import Profile, load_profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Objective, Plan, PlanInput, Residency, RestoreMethod
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_placement import WeightObjective
from splitpoint.planning.weight_step import WeightStep, prefill_tokens_beside_weights, weight_step
from splitpoint.planning.words import ExplainedPlan, in_words
from splitpoint.shapes import Encoding, ModelShape, WeightFormat
from splitpoint.tiers import Tier
from splitpoint_cli.models import NamedModel, costs_for, find_named, format_note
from splitpoint_cli.options import takes_options
from splitpoint_cli.output import (
    AsJson,
    OutputFile,
    facts_table,
    hand_over,
    print_table,
    seconds_text,
    with_exit_codes,
)
from splitpoint_cli.planning.options import PlanOptions
from splitpoint_cli.planning.sizing import Divided, Node, divided
from worker_service.device.memory import STAGING_PAGES


def step_of(shape: ModelShape, worker: Divided, request: PlanInput, answer: Plan) -> WeightStep:
    """Return one decode step of the planned request alone."""
    given = request.step_compute_seconds
    compute = worker.profile.step_compute_seconds if given is None else given
    placement = worker.device.placement
    return weight_step(shape, worker.profile, worker.sizes, placement, answer, compute)


def weights_report(shape: ModelShape, worker: Divided, step: WeightStep) -> dict[str, object]:
    """Return the part for `--json`: bytes and seconds."""
    placement = worker.device.placement
    return {
        "host_layers": list(placement.on_host.layers),
        "table_on_host": placement.on_host.table,
        "head_on_host": placement.on_host.head,
        "device_weight_bytes": placement.device_bytes,
        "streamed_weight_bytes": placement.streamed_bytes,
        "max_batched_tokens": worker.device.max_batched_tokens,
        "weights_reason": placement.reason,
        "prefill_tokens_beside_weights": _free_prefill(shape, worker),
        "weight_step": dataclasses.asdict(step),
    }


def weights_rows(shape: ModelShape, worker: Divided, step: WeightStep) -> Iterator[tuple[str, str]]:
    """Yield the rows for the table."""
    yield "weights", worker.device.placement.reason
    if worker.device.placement.streamed_bytes:
        yield (
            "a step with them",
            f"{seconds_text(step.fine)} for this request alone, of which the link "
            f"{seconds_text(step.link)}; with whole layers ahead of their cache "
            f"{seconds_text(step.coarse)}",
        )
        tokens = counted(_free_prefill(shape, worker), "prompt token")
        computed = f"{worker.device.max_batched_tokens:,} are computed at once"
        yield "prefill beside them", f"{tokens} a step at no cost: {computed}"


def _free_prefill(shape: ModelShape, worker: Divided) -> int:
    """Return the prompt tokens that a step computes while the weights cross the link."""
    costs = worker.profile
    return prefill_tokens_beside_weights(shape, costs, costs.step_compute_seconds)


_SCHEDULES = {
    Schedule.SERIAL: "one after the other: X, rebuild, load",
    Schedule.COLUMN: "X over the link first, then rebuilding beside loading",
    Schedule.ROW: "X on the device already, rebuilding beside loading",
    Schedule.PIPELINED: "X in tiles, each rebuilt while the next copy is on the link",
}


@with_exit_codes
@takes_options
def plan(options: PlanOptions, as_json: AsJson = False, output: OutputFile = None) -> None:
    """Print the split point of a request, and the reason. Needs no server and no GPU.

    Speculation is left out: a step is one token of each request, and no memory is for drafts.
    """
    served = find_named(options.model, options.dtype)
    note = format_note(served, WeightFormat.NATIVE, options.profile)
    shape = served.shape
    costs = costs_for(load_profile(options.profile), shape)
    worker = _worker(options, served, costs)
    if worker is not None:
        costs = worker.profile
    _check_request(options, shape)
    request = _request(options, shape, worker)
    answer = in_words(_with_tier(options, shape, costs, request))
    report, rows = plan_report(shape, costs, request, answer), _rows(shape, costs, request, answer)
    if worker is not None:
        step = step_of(shape, worker, request, answer)
        report |= weights_report(shape, worker, step)
        rows += weights_rows(shape, worker, step)
    rows += [("objective", answer.objective.value), ("reason", answer.reason)]
    rows += [("", detail) for detail in answer.reason_details]
    if note is not None:
        rows.append(("not on this GPU", note))
    hand_over(report, lambda: print_table(facts_table(rows)), as_json=as_json, output=output)


def _with_tier(options: PlanOptions, shape: ModelShape, costs: Profile, request: PlanInput) -> Plan:
    """Return the plan, with a load from a tier before it if that pays."""
    answer = plan_request(shape, costs, request)
    if not options.tier_tokens:
        return answer
    # Imported here: it loads what only extras bring.
    from scheduler_service.placement.planning import ChunkSizes, best_fetch
    from scheduler_service.prefixes.lookup import FetchSource

    total = options.cached + options.new
    if options.tier_tokens > total:
        raise InvalidArgument(
            f"--tier-tokens is more than the {counted(total, 'prompt token')}", field="tier_tokens"
        )
    if options.tier_rate is not None:
        rate = parse_rate(options.tier_rate, field="tier_rate")
        costs = dataclasses.replace(costs, remote_bytes_per_second={Tier.DISK.value: rate})

    def planned(cached: int) -> Plan:
        longer = dataclasses.replace(request, cached_tokens=cached, new_tokens=total - cached)
        return plan_request(shape, costs, longer)

    token_bytes = shape.stored_kv_bytes_per_token(request.encoding)
    if request.has_activations:
        token_bytes += shape.layer_count * shape.stored_activation_bytes_per_token_layer(
            request.encoding
        )
    sizes = ChunkSizes(
        options.chunk_tokens, options.chunk_tokens * token_bytes, request.prefill_tokens
    )
    source = FetchSource("", options.tier_tokens, Tier.DISK)
    answer, _ = best_fetch(answer, planned, costs, [source], sizes, arena_tokens=options.cached)
    return answer


def _worker(options: PlanOptions, served: NamedModel, costs: Profile) -> Divided | None:
    """Return the worker with its memory divided; None: all weights fit."""
    if options.device_memory is None:
        return None
    node = Node(
        costs,
        parse_size(options.device_memory, field="device_memory"),
        max_batch=options.max_batch,
        max_batched_tokens=options.max_batched_tokens,
        chunk_tokens=options.chunk_tokens,
        encoding=Encoding(options.encoding),
        weight_objective=WeightObjective(options.weight_objective),
        folder=served.folder,
    )
    return divided(served.shape, node, has_activations=_has_activations(options, served.shape))


def _has_activations(options: PlanOptions, shape: ModelShape) -> bool:
    """Return whether the store keeps X: where it can pay, unless the options say no."""
    return options.activations and shape.activations_can_pay


def _check_request(options: PlanOptions, shape: ModelShape) -> None:
    """Raise InvalidArgument for options of the other residency, and beyond the context."""
    if options.residency == Residency.RESIDENT.value:
        has_spare = parse_size(options.spare, field="spare") > 0
        for field, is_given in (("spare", has_spare), ("step-ms", options.step_ms is not None)):
            if is_given:
                raise InvalidArgument(
                    f"--{field} is about a streamed cache: give --residency streamed, too",
                    field=field,
                )
    if options.token_count > shape.context_length:
        raise InvalidArgument(
            f"{counted(options.token_count, 'token')} (cached + new + max_tokens) are over "
            f"{shape.name}'s context of {shape.context_length:,}",
            field="cached_tokens",
        )


def _request(options: PlanOptions, shape: ModelShape, worker: Divided | None) -> PlanInput:
    staging, prefill = STAGING_PAGES * options.chunk_tokens, 0
    if worker is not None:
        staging, prefill = worker.staging_tokens, worker.device.max_batched_tokens
    return PlanInput(
        cached_tokens=options.cached,
        new_tokens=options.new,
        has_activations=_has_activations(options, shape),
        schedule=Schedule(options.schedule),
        residency=Residency(options.residency),
        objective=Objective(options.objective),
        encoding=Encoding(options.encoding),
        chunk_tokens=options.chunk_tokens,
        staging_tokens=staging,
        prefill_tokens=prefill,
        spare_bytes=parse_size(options.spare, field="spare"),
        keeps_activations=options.keep_activations,
        step_compute_seconds=options.step_seconds,
        footprint_bytes=options.token_count * shape.kv_bytes_per_token,
    )


def plan_report(
    shape: ModelShape, costs: Profile, request: PlanInput, answer: ExplainedPlan
) -> dict[str, object]:
    """Return the object that `--json` prints: sizes in bytes, times in seconds."""
    values = dataclasses.asdict(answer)
    del values["reasons"]  # its words are there
    return {
        "model": shape.name,
        "profile": dataclasses.asdict(costs),
        "encoding": request.encoding.value,
        "has_activations": request.has_activations,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "activation_bytes_per_token": shape.activation_bytes_per_token,
        "rho": shape.rho,
        "kappa_ratio": answer.kappa_ratio,
        **values,
        "residency": answer.residency.value,
        "method": answer.method.value,
        "schedule": answer.schedule.value,
        "objective": answer.objective.value,
    }


def _rows(
    shape: ModelShape, costs: Profile, request: PlanInput, answer: Plan
) -> list[tuple[str, str]]:
    return [
        ("model", f"{shape.name}, {shape.data_type.value}, {counted(shape.layer_count, 'layer')}"),
        ("profile", costs.description or "from a file"),
        ("cached K / new T", f"{answer.cached_tokens:,} / {answer.new_tokens:,}"),
        ("keys and values", f"{format_size(shape.kv_bytes_per_token)} a token"),
        ("activations X", f"{format_size(shape.activation_bytes_per_token)} a token"),
        ("rho = X / (K+V)", f"{shape.rho:.2f}"),
        ("schedule", f"{answer.schedule.value} ({_SCHEDULES[answer.schedule]})"),
        ("method", answer.method.value),
        *_fetched(answer),
        *_parts(answer),
        ("load everything", seconds_text(answer.predicted_load_seconds)),
        ("restore as planned", seconds_text(answer.predicted_restore_seconds)),
        *_step(costs, request, answer),
        ("first token after", seconds_text(answer.predicted_ttft_seconds)),
        ("cache in memory", format_size(answer.footprint_bytes)),
    ]


def _fetched(answer: Plan) -> list[tuple[str, str]]:
    if not answer.fetched_tokens:
        return []
    seconds = seconds_text(answer.predicted_fetch_seconds)
    return [("loaded from a tier first", f"{counted(answer.fetched_tokens, 'token')}, {seconds}")]


def _parts(answer: Plan) -> list[tuple[str, str]]:
    """Return rows that say which tokens come back in which way."""
    rows = []
    if answer.resident_tokens:
        kind = "X" if answer.schedule is Schedule.ROW else "K and V"
        rows.append(
            ("stays on the device", f"{kind} of {counted(answer.resident_tokens, 'token')}")
        )
    if answer.method is RestoreMethod.TOKENS:
        rows.append(("from token ids", f"{answer.recomputed_tokens:,}"))
    else:
        is_streamed = answer.residency is Residency.STREAMED
        at_first = f" of the {answer.cached_tokens:,} cached" if is_streamed else ""
        rows.append(("split", f"{answer.split_tokens:,}{at_first}"))
    if answer.tile_tokens:
        rows.append(("on the link at once", f"{counted(answer.tile_tokens, 'token')} a layer"))
    return rows


def _step(costs: Profile, request: PlanInput, answer: Plan) -> list[tuple[str, str]]:
    if answer.residency is Residency.RESIDENT:
        return []
    text = f"{seconds_text(answer.predicted_step_seconds)} for this request alone"
    if not costs.step_compute_seconds and request.step_compute_seconds is None:
        text += ", the step's own compute not counted: the profile lacks it (give --step-ms)"
    return [("each decode step", text)]
