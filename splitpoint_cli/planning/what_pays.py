"""`splitpoint what-pays`: for which model and machine which way to restore a prefix pays.

Asks the planner for every built-in shape. docs/lab/what-pays.md has what it prints without options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile, load_profile
from splitpoint.planning.plan import Plan, PlanInput, RestoreMethod
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding, ModelShape
from splitpoint_cli.output import EXIT_HELP, AsJson, OutputFile, hand_over
from worker_service.device.memory import STAGING_PAGES

CHUNK_TOKENS = 64
NEW_TOKENS = 64
# Tokens of one piece of a prefill: the workers' default.
PREFILL_TOKENS = 512
# Whole chunks; with the new tokens they fit contexts of 2,048, 8,192 and 32,768.
CACHED_TOKENS = (512, 1920, 7936, 31744)

_LEGEND = f"""\
| cell | the prefix comes back by |
|---|---|
| `load` | copying all keys and values: nothing else saves 2 % |
| `X 1,024 ×0.60` | rebuilding 1,024 tokens from stored activations, meanwhile copying the rest |
| `ids 512 ×0.80` | recomputing 512 tokens from their ids, meanwhile copying the rest, last first |
| – | longer than the model's context |

`×0.60`: share of the time that loading everything would take. Pipelined schedule, chunks of
{CHUNK_TOKENS} tokens, {STAGING_PAGES} of them in staging memory, {NEW_TOKENS} new tokens, prefills
in pieces of {PREFILL_TOKENS}.
"""


def what_pays(
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="A JSON file with measured costs, or a built-in name; may be given more than "
            "once; absent: every built-in one.",
            metavar="NAME|FILE",
        ),
    ] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Print which way to restore a prefix pays for each model and machine, as Markdown."""
    names = profile or list(BUILT_IN_PROFILES)
    profiles = [(name, load_profile(name)) for name in names]
    hand_over(
        report_of(profiles),
        lambda: print(tables(profiles)),
        as_json=as_json,
        output=output,
    )


what_pays.__doc__ = f"{what_pays.__doc__}\n\n{EXIT_HELP}"


def report_of(profiles: Sequence[tuple[str, Profile]]) -> dict[str, object]:
    """Return the object that `--json` prints: each cell, times in seconds."""
    plans = [
        {
            "profile": name,
            "model": shape.name,
            "encoding": encoding.value,
            "cached_tokens": cached,
            "method": plan.method.value,
            "split_tokens": plan.split_tokens,
            "recomputed_tokens": plan.recomputed_tokens,
            "predicted_restore_seconds": plan.predicted_restore_seconds,
            "predicted_load_seconds": plan.predicted_load_seconds,
        }
        for name, profile in profiles
        for shape in BUILT_IN_SHAPES.values()
        for encoding in Encoding
        for cached in CACHED_TOKENS
        if (plan := _plan(shape, profile, encoding, cached)) is not None
    ]
    return {"plans": plans}


def tables(profiles: Sequence[tuple[str, Profile]]) -> str:
    """Return the legend, and a section for each profile."""
    lines = [_LEGEND]
    for name, profile in profiles:
        lines += [f"## {name}", "", profile.description or "From a file.", ""]
        lines += [*_table(profile), ""]
    return "\n".join(lines).rstrip()


def _table(profile: Profile) -> Iterator[str]:
    columns = [(encoding, cached) for encoding in Encoding for cached in CACHED_TOKENS]
    titles = [f"{encoding.value} {cached:,}" for encoding, cached in columns]
    yield f"| model | rho | {' | '.join(titles)} |"
    yield "|---|---|" + "---|" * len(columns)
    for shape in BUILT_IN_SHAPES.values():
        cells = [_cell(shape, profile, encoding, cached) for encoding, cached in columns]
        yield f"| {shape.name} | {shape.rho:.2f} | {' | '.join(cells)} |"


def _cell(shape: ModelShape, profile: Profile, encoding: Encoding, cached: int) -> str:
    plan = _plan(shape, profile, encoding, cached)
    return "–" if plan is None else _words(plan)


def _plan(shape: ModelShape, profile: Profile, encoding: Encoding, cached: int) -> Plan | None:
    """None if the prefix is longer than the model's context."""
    if cached + NEW_TOKENS > shape.context_length:
        return None
    return plan_request(
        shape,
        profile,
        PlanInput(
            cached,
            NEW_TOKENS,
            has_activations=shape.activations_can_pay,
            schedule=Schedule.PIPELINED,
            chunk_tokens=CHUNK_TOKENS,
            staging_tokens=STAGING_PAGES * CHUNK_TOKENS,
            prefill_tokens=PREFILL_TOKENS,
            encoding=encoding,
        ),
    )


def _words(plan: Plan) -> str:
    if plan.method is RestoreMethod.LOAD:
        return "load"
    factor = f"×{plan.predicted_restore_seconds / plan.predicted_load_seconds:.2f}"
    if plan.method is RestoreMethod.TOKENS:
        return f"ids {plan.recomputed_tokens:,} {factor}"
    return f"X {plan.split_tokens:,} {factor}"
