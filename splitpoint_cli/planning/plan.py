"""`splitpoint plan`: the split point for a model on a machine, without either of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from splitpoint.checkpoint.config import read_shape
from splitpoint.checkpoint.resolve import NO_SUCH_MODEL, resolve_model
from splitpoint.config import format_size, parse_size
from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile, load_profile
from splitpoint.errors import InvalidArgument, NotFound
from splitpoint.planning.planner import (
    Objective,
    Plan,
    PlanInput,
    Residency,
    RestoreMethod,
    plan_request,
)
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding, ModelShape
from splitpoint.words import counted
from splitpoint_cli.output import EXIT_HELP, seconds_text
from splitpoint_cli.planning.plan_weights import plan_weights, report, rows, step_of
from splitpoint_cli.report import AsJson, OutputFile, hand_over, print_table
from splitpoint_cli.stack.plan import parse_dtype
from splitpoint_cli.stack.up import Dtype
from worker_service.device.memory import STAGING_PAGES

_Named = TypeVar("_Named", bound=Enum)

_SCHEDULES = {
    Schedule.SERIAL: "one after the other: X, rebuild, load",
    Schedule.COLUMN: "X over the link first, then rebuilding beside loading",
    Schedule.ROW: "X on the device already, rebuilding beside loading",
    Schedule.PIPELINED: "X in tiles, each rebuilt while the next copy is on the link",
}


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A checkpoint folder, a hub name that was downloaded before, or one of "
            f"{', '.join(BUILT_IN_SHAPES)}.",
            metavar="DIR|SHAPE",
        ),
    ],
    profile: Annotated[
        str,
        typer.Option(
            help=f"A JSON file with measured costs, or one of {', '.join(BUILT_IN_PROFILES)}.",
            metavar="NAME|FILE",
        ),
    ],
    cached: Annotated[int, typer.Option(help="K: cached prefix tokens.", metavar="K")],
    new: Annotated[int, typer.Option(help="T: new prompt tokens.", metavar="T")],
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate, for the footprint.", min=1)
    ] = 128,
    schedule: Annotated[
        str,
        typer.Option(
            help="What overlaps: pipelined (X in tiles, rebuilt while the rest is on the link), "
            "serial (X, rebuild, load in turn: workers with --serial), column (X, then rebuild "
            "beside load: KVPR), row (X already on the device).",
            metavar="pipelined|serial|column|row",
        ),
    ] = Schedule.PIPELINED.value,
    objective: Annotated[
        str,
        typer.Option(
            help="latency: least time for this request; throughput: least use of whichever of "
            "link and device is busier, when many requests share them.",
            metavar="latency|throughput",
        ),
    ] = Objective.LATENCY.value,
    residency: Annotated[
        str,
        typer.Option(
            help="resident: restored once; streamed: pulled in each decode step.",
            metavar="resident|streamed",
        ),
    ] = Residency.RESIDENT.value,
    spare: Annotated[
        str,
        typer.Option(
            help="Streamed: device memory in which a part of the prefix may stay.", metavar="SIZE"
        ),
    ] = "0",
    keep_activations: Annotated[
        bool,
        typer.Option(
            "--keep-activations/--no-keep-activations",
            help="Streamed: whether X may be what stays, instead of keys and values.",
        ),
    ] = True,
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="Streamed: what a decode step computes beside; absent: as in the profile.",
            metavar="MS",
            min=0,
        ),
    ] = None,
    encoding: Annotated[
        str,
        typer.Option(
            help="How the store keeps keys, values and activations.", metavar="native|int8|int4"
        ),
    ] = Encoding.NATIVE.value,
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens per chunk of the store.", min=1, max=4096)
    ] = 64,
    activations: Annotated[
        bool,
        typer.Option("--activations/--no-activations", help="Whether the store holds activations."),
    ] = True,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory of the worker: weights that do not fit stay on the host. Absent: "
            "all fit.",
            metavar="SIZE",
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(help="With --device-memory: as the worker's.", min=1)
    ] = 32,
    max_batched_tokens: Annotated[
        int,
        typer.Option(
            "--max-batched-tokens",
            "--prefill-chunk",
            help="With --device-memory: as the worker's.",
            min=1,
        ),
    ] = 512,
    dtype: Annotated[Dtype, typer.Option(help="Element type; auto: the model's.")] = Dtype.AUTO,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Where the split point would lie, and why. Needs no server and no GPU."""
    shape = find_shape(model, dtype.value)
    costs = load_profile(profile)
    weights = None
    if device_memory is not None:
        weights = plan_weights(
            shape,
            costs,
            budget_bytes=parse_size(device_memory, field="device_memory"),
            chunk_tokens=chunk_tokens,
            has_activations=activations,
            max_batch=max_batch,
            max_batched_tokens=max_batched_tokens,
        )
        costs = weights.profile
    wanted = parse_residency(residency)
    spare_bytes = parse_size(spare, field="spare")
    if wanted is Residency.RESIDENT:
        for field, is_given in (("spare", spare_bytes > 0), ("step_ms", step_ms is not None)):
            if is_given:
                option = f"--{field.replace('_', '-')}"
                raise InvalidArgument(
                    f"{option} is about a streamed cache: give --residency streamed, too",
                    field=field,
                )
    request = PlanInput(
        cached_tokens=cached,
        new_tokens=new,
        has_activations=activations,
        schedule=parse_schedule(schedule),
        residency=wanted,
        objective=parse_objective(objective),
        encoding=_parse(Encoding, encoding, "encoding"),
        chunk_tokens=chunk_tokens,
        staging_tokens=STAGING_PAGES * chunk_tokens,
        spare_bytes=spare_bytes,
        keeps_activations=keep_activations,
        step_compute_seconds=None if step_ms is None else step_ms / 1e3,
        prefill_tokens=0 if weights is None else max_batched_tokens,
        footprint_bytes=(cached + new + max_tokens) * shape.kv_bytes_per_token,
    )
    _check_context(shape, cached + new + max_tokens)
    answer = plan_request(shape, costs, request)
    step = None if weights is None else step_of(shape, weights, request, answer)
    more = {} if weights is None or step is None else report(weights, step)
    more_rows = [] if weights is None or step is None else rows(weights, step)
    hand_over(
        {**plan_report(shape, costs, request, answer), **more},
        lambda: print_table(_table_of(shape, costs, request, answer, more_rows)),
        as_json=as_json,
        output=output,
    )


plan.__doc__ = f"{plan.__doc__}\n\n{EXIT_HELP}"


def find_shape(model: str, dtype: str = "auto") -> ModelShape:
    """A built-in shape by name, else the shape of a checkpoint on this machine.

    Raises NotFound when `model` is neither, InvalidArgument for a folder that
    is no checkpoint.
    """
    data_type = parse_dtype(dtype)
    built_in = BUILT_IN_SHAPES.get(model.lower())
    if built_in is not None:
        return built_in if data_type is None else dataclasses.replace(built_in, data_type=data_type)
    try:
        folder = resolve_model(model, download=False)
    except (NotFound, InvalidArgument) as error:
        if isinstance(error, InvalidArgument) and error.reason != NO_SUCH_MODEL:
            raise
        raise NotFound(
            f"{error.message}, nor one of the built-in shapes: {', '.join(BUILT_IN_SHAPES)}"
        ) from error
    return read_shape(folder, data_type=data_type)


def parse_schedule(text: str) -> Schedule:
    return _parse(Schedule, text, "schedule")


def parse_objective(text: str) -> Objective:
    return _parse(Objective, text, "objective")


def parse_residency(text: str) -> Residency:
    return _parse(Residency, text, "residency")


def _parse(kind: type[_Named], text: str, field: str) -> _Named:
    """A value of the enum by its name. Raises InvalidArgument."""
    try:
        return kind(text)
    except ValueError:
        names = ", ".join(str(value.value) for value in kind)
        raise InvalidArgument(f"{field} {text!r} is not one of {names}", field=field) from None


def _check_context(shape: ModelShape, tokens: int) -> None:
    if tokens > shape.context_length:
        raise InvalidArgument(
            f"{counted(tokens, 'token')} (cached + new + max_tokens) are over {shape.name}'s "
            f"context of {shape.context_length:,}",
            field="cached_tokens",
        )


def plan_report(
    shape: ModelShape, costs: Profile, request: PlanInput, answer: Plan
) -> dict[str, object]:
    """The object that `--json` prints: sizes in bytes, times in seconds."""
    return {
        "model": shape.name,
        "profile": dataclasses.asdict(costs),
        "encoding": request.encoding.value,
        "has_activations": request.has_activations,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "activation_bytes_per_token": shape.activation_bytes_per_token,
        "rho": shape.rho,
        "kappa_ratio": answer.kappa_ratio,
        **dataclasses.asdict(answer),
        "residency": answer.residency.value,
        "method": answer.method.value,
        "schedule": answer.schedule.value,
        "objective": answer.objective.value,
    }


def _table_of(
    shape: ModelShape,
    costs: Profile,
    request: PlanInput,
    answer: Plan,
    more: Sequence[tuple[str, str]],
) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in (
        ("model", f"{shape.name}, {shape.data_type.value}, {counted(shape.layer_count, 'layer')}"),
        ("profile", costs.description or "from a file"),
        ("cached K / new T", f"{answer.cached_tokens:,} / {answer.new_tokens:,}"),
        ("keys and values", f"{format_size(shape.kv_bytes_per_token)} a token"),
        ("activations X", f"{format_size(shape.activation_bytes_per_token)} a token"),
        ("rho = X / (K+V)", f"{shape.rho:.2f}"),
        ("schedule", f"{answer.schedule.value} ({_SCHEDULES[answer.schedule]})"),
        ("method", answer.method.value),
        *_parts(answer),
        ("load everything", seconds_text(answer.predicted_load_seconds)),
        ("restore as planned", seconds_text(answer.predicted_restore_seconds)),
        *_step(costs, request, answer),
        ("first token after", seconds_text(answer.predicted_ttft_seconds)),
        ("cache in memory", format_size(answer.footprint_bytes)),
        *more,
        ("objective", answer.objective.value),
        ("reason", answer.reason),
    ):
        table.add_row(name, value)
    return table


def _parts(answer: Plan) -> list[tuple[str, str]]:
    """Which tokens come back in which way."""
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
    text = seconds_text(answer.predicted_step_seconds)
    if not costs.step_compute_seconds and request.step_compute_seconds is None:
        text += ", the step's own compute not counted: the profile lacks it (give --step-ms)"
    return [("each decode step", text)]
