"""`splitpoint bench offload`: decoding with the cache on the host, beside its limit and its peers.

offload_runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from splitpoint.checkpoint.resolve import BUNDLED_MODEL, resolve_model
from splitpoint.config import parse_rate
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need_all
from splitpoint.selection import Selection, SelectionMethod, check_served, check_speculation
from splitpoint.shapes import Encoding
from splitpoint.speculation import ALIASES, DraftMethod, Speculation
from splitpoint_cli.bench import harness
from splitpoint_cli.bench.harness import Progress, hand_over_report
from splitpoint_cli.bench.offload_report import (
    OffloadWorkload,
    compared_report_of,
    picture_of,
    report_of,
    table_of,
)
from splitpoint_cli.files import check_output
from splitpoint_cli.models import find_named, find_shape
from splitpoint_cli.output import AsJson, OutputFile, check_picture, save_picture

# Draft methods that are measured here; "off" is what all are compared with.
MEASURED = (DraftMethod.SELF, DraftMethod.SUFFIX, DraftMethod.OFF)
LEAST_SELECTED = 6
ENCODINGS = [each.value for each in Encoding if each.is_lossy]

_Shape = Annotated[
    str | None,
    typer.Option(
        help="A built-in shape, or a checkpoint folder for its sizes; the weights are random. "
        "Absent: opt-125m.",
        metavar="SHAPE|DIR",
    ),
]
_Sweep = Annotated[bool, typer.Option("--sweep", help="Also measure the step time over the split.")]
_WeightsOnHost = Annotated[
    bool,
    typer.Option(
        "--weights-on-host", help="Keep all layers, the head and the table on the host, too."
    ),
]
_MicroBatch = Annotated[
    int | None,
    typer.Option(
        help="KVPR's order holds a layer of this many sequences at once, one such batch after the "
        "other (Algorithm 1); absent: of all.",
        min=1,
    ),
]
_Encodings = Annotated[
    list[str],
    typer.Option(
        "--kv-encoding",
        help="Also the pipelined split, or each selection that does not verify, from a store with "
        "this encoding; may be repeated.",
        metavar="int8|int4",
    ),
]
_Speculate = Annotated[
    str | None,
    typer.Option(
        help="Measure these drafts beside full load instead. SHAPE absent: the bundled model.",
        metavar="METHOD",
    ),
]
_DraftTokens = Annotated[
    int | None,
    typer.Option(
        help="--speculate: most drafts for a step of a sequence, 0 to 32. Absent: as many as "
        "measurements say pay.",
        min=0,
        max=32,
    ),
]
_KvHeads = Annotated[
    int | None,
    typer.Option(
        help="--speculate, --select: average the checkpoint's KV heads to this many, for grouped "
        "queries; of a built-in shape: its number of KV heads.",
        min=1,
    ),
]
_Select = Annotated[
    list[str],
    typer.Option(
        "--select",
        help="Measure steps that read by this selection beside full load instead, or H2O from host "
        "memory; may be repeated. SHAPE absent: the bundled model. With --speculate self, drafts "
        "attend what it fetches.",
        metavar="METHOD:RATIO",
    ),
]
_Lengths = Annotated[
    list[int],
    typer.Option(
        "--length",
        help="--speculate, --select: prompts of this many tokens; may be repeated. Absent: "
        "--prompt.",
        min=1,
    ),
]
_Layers = Annotated[
    int | None,
    typer.Option(help="--speculate, --select: layers of a built-in shape. Absent: its own.", min=1),
]
_Text = Annotated[
    list[Path],
    typer.Option(
        "--text",
        help="--speculate, --select: cut a checkpoint's prompts from this file; may be repeated. "
        "Absent: Python files that the bundled model has not seen.",
        metavar="FILE",
    ),
]
_Picture = Annotated[
    Path | None,
    typer.Option("--png", help="Draw the sweep and the contenders.", metavar="FILE"),
]
_TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the timeline as Chrome trace JSON.", metavar="FILE"),
]


def offload(
    shape: _Shape = None,
    dtype: harness.ElementType = "float32",
    batch: harness.Batch = 8,
    prompt: harness.PromptTokens = 512,
    new: harness.NewTokens = 32,
    link_rate: harness.LinkRate = None,
    device: harness.ContendersDevice = "cpu",
    threads: harness.Threads = 0,
    repeats: harness.Repeats = 5,
    sweep: _Sweep = False,
    weights_on_host: _WeightsOnHost = False,
    micro_batch: _MicroBatch = None,
    kv_encoding: _Encodings = [],  # noqa: B006 - typer's way to say "none"
    seed: harness.Seed = 0,
    speculate: _Speculate = None,
    draft_tokens: _DraftTokens = None,
    kv_heads: _KvHeads = None,
    select: _Select = [],  # noqa: B006 - typer's way to say "none"
    length: _Lengths = [],  # noqa: B006 - typer's way to say "none"
    layers: _Layers = None,
    text: _Text = [],  # noqa: B006 - typer's way to say "none"
    as_json: AsJson = False,
    output: OutputFile = None,
    png_file: _Picture = None,
    trace_file: _TraceFile = None,
) -> None:
    """Decode from a cache on the host: loading all of it, KVPR's order, and ours.

    Decoding from device memory tells which tokens are right; on a GPU transformers runs, too.
    """
    need_all("a benchmark")
    harness.check_data_type(dtype)
    workload = OffloadWorkload(
        shape=shape or BUNDLED_MODEL,
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        link_rate=None if link_rate is None else parse_rate(link_rate, field="link_rate"),
        repeats=repeats,
        device=device,
        threads=harness.thread_count(threads),
        seed=seed,
        draft_tokens=draft_tokens,
        layers=layers,
        kv_heads=kv_heads,
        text=tuple(map(str, text)),
    )
    if png_file is not None and (not sweep or speculate is not None or select):
        raise InvalidArgument("--png draws what --sweep measures", field="png")
    check_picture(png_file)
    workload = replace(workload, kv_encodings=_encodings(kv_encoding))
    if speculate is not None or select:
        if micro_batch is not None:
            raise InvalidArgument("has no part in --speculate and --select", field="micro_batch")
        method = None if speculate is None else _method(speculate)
        workload = replace(
            workload,
            speculate=method,
            compared=_selections(select, method),
            lengths=tuple(dict.fromkeys(length)) or (prompt,),
        )
        report = _compared(shape, workload)
    else:
        if micro_batch is not None and micro_batch > batch:
            raise InvalidArgument("more than the sequences of --batch", field="micro_batch")
        _check_alone(kv_heads=kv_heads, length=length, layers=layers, text=text)
        check_output(trace_file, "trace")
        workload = replace(
            workload,
            sweep=sweep,
            weights_on_host=weights_on_host,
            micro_batch=micro_batch,
        )
        report = _measured(shape or "opt-125m", workload, trace_file)
    if png_file is not None:
        save_picture(picture_of(report), png_file)
    hand_over_report(report, table_of, as_json=as_json, output=output)


def _measured(name: str, workload: OffloadWorkload, trace_file: Path | None) -> dict[str, Any]:
    shape = find_shape(name, workload.dtype)
    workload = replace(workload, shape=shape.name)
    from splitpoint_cli.bench.offload_runs import peer_of, run_all

    progress = Progress()
    peer = peer_of(shape, workload, progress)
    return report_of(workload, run_all(shape, workload, progress, peer, trace_file))


def _compared(name: str | None, workload: OffloadWorkload) -> dict[str, Any]:
    # The bundled model has no name that is found.
    named = find_named(name or str(resolve_model(None)), workload.dtype)
    if workload.layers is not None and named.folder is not None:
        raise InvalidArgument("a checkpoint has its own layers", field="layers")
    if workload.new < LEAST_SELECTED and not all(each.verify for each in workload.compared):
        # Steps that build screens and fill rows are not counted, and two are compared.
        raise InvalidArgument(f"--select needs at least {LEAST_SELECTED} new tokens", field="new")
    from splitpoint_cli.bench.offload_runs import run_compared

    return compared_report_of(workload, *run_compared(named, workload, Progress()))


def _check_alone(**given: object) -> None:
    """Raise InvalidArgument for an option that says nothing without --select or --speculate."""
    for name, value in given.items():
        if value:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{flag} needs --select or --speculate", field=name)


def _encodings(names: list[str]) -> tuple[str, ...]:
    """Return each encoding once. Raises InvalidArgument."""
    for name in names:
        if name not in ENCODINGS:
            raise InvalidArgument(
                f"{name!r} is none of {', '.join(ENCODINGS)}", field="kv_encoding"
            )
    return tuple(dict.fromkeys(names))


def _selections(texts: list[str], method: DraftMethod | None) -> tuple[Selection, ...]:
    """Return what is compared; with drafts all of them verify. Raises InvalidArgument."""
    found = [_selection(each) for each in dict.fromkeys(texts)]
    if method is not None:
        found = [replace(each, verify=True) for each in found]
    columns: dict[SelectionMethod, int | None] = {}
    for each in found:
        if each.method is not SelectionMethod.H2O or each.verify:
            check_served(each)
        if method is not None:
            check_speculation(each, Speculation(method))
        if each.method.is_calibrated and columns.setdefault(each.method, each.columns) != (
            each.columns
        ):
            raise InvalidArgument(
                f"{each.method} needs the same columns in every --select", field="select"
            )
    return tuple(found)


def _selection(text: str) -> Selection:
    """Return what decode steps read. Raises InvalidArgument for what cannot be measured here."""
    selection = Selection.parsed(text)
    if selection.reads_all:
        raise InvalidArgument(f"{selection} reads every token: full load does", field="select")
    if selection.pool is not None:
        raise InvalidArgument("bounded pools are not measured here", field="select")
    return selection


def _method(name: str) -> DraftMethod:
    """Return a method that this benchmark measures. Raises InvalidArgument."""
    found = DraftMethod(name) if name in (*DraftMethod, *ALIASES) else None
    if found not in MEASURED:
        raise InvalidArgument(f"{name!r} is none of {', '.join(MEASURED)}", field="speculate")
    return found
