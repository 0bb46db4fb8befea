"""`splitpoint bench offload`: decoding with the cache on the host, beside its limit and its peers.

runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.resolve import BUNDLED_MODEL, resolve_model
from splitpoint.config import parse_rate
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need_all
from splitpoint.selection import FULL, Selection, check_served, check_speculation
from splitpoint.shapes import DataType, Encoding, ModelShape
from splitpoint.speculation import ALIASES, DraftMethod, Speculation
from splitpoint_cli.bench import harness as options
from splitpoint_cli.bench.harness import Progress, hand_over_report
from splitpoint_cli.bench.offload.drafts_report import (
    DraftWorkload,
    drafts_report_of,
    drafts_table_of,
)
from splitpoint_cli.bench.offload.picture import draw_selections, draw_sweep
from splitpoint_cli.bench.offload.report import OffloadWorkload, report_of, table_of
from splitpoint_cli.bench.offload.selections_report import (
    SelectWorkload,
    select_report_of,
    select_table_of,
)
from splitpoint_cli.files import check_output
from splitpoint_cli.models import find_named, find_shape
from splitpoint_cli.output import AsJson, OutputFile
from splitpoint_cli.plots import check_picture

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
_ChangedRate = Annotated[
    float | None,
    typer.Option(
        help="Also a run in whose middle the emulated link's rate is multiplied by this.",
        metavar="FACTOR",
    ),
]
_WeightsOnHost = Annotated[
    bool,
    typer.Option(
        "--weights-on-host", help="Keep all layers, the head and the table on the host, too."
    ),
]
_Encodings = Annotated[
    list[str],
    typer.Option(
        "--kv-encoding",
        help="Also the pipelined split from a store with this encoding; may be repeated.",
        metavar="int8|int4",
    ),
]
_Speculate = Annotated[
    str | None,
    typer.Option(
        help="Measure these drafts beside plain streaming instead. SHAPE is then a checkpoint, "
        "read with its weights; absent: the bundled model.",
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
    str | None,
    typer.Option(
        help="Measure steps that read by this selection beside full load instead. SHAPE absent: "
        "the bundled model. With --speculate self, drafts also attend what it fetches.",
        metavar="METHOD:RATIO",
    ),
]
_Lengths = Annotated[
    list[int],
    typer.Option(
        "--length",
        help="--select: prompts of this many tokens; may be repeated. Absent: --prompt.",
        min=1,
    ),
]
_Layers = Annotated[
    int | None,
    typer.Option(help="--select: layers of a built-in shape. Absent: its own.", min=1),
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
    typer.Option("--png", help="Draw the sweep here, or --select over lengths.", metavar="FILE"),
]
_TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the timeline as Chrome trace JSON.", metavar="FILE"),
]


def offload(
    shape: _Shape = None,
    dtype: options.ElementType = "float32",
    batch: options.Batch = 8,
    prompt: options.PromptTokens = 512,
    new: options.NewTokens = 32,
    link_rate: options.LinkRate = None,
    device: options.ContendersDevice = "cpu",
    threads: options.Threads = 0,
    repeats: options.Repeats = 5,
    sweep: _Sweep = False,
    change_link_rate: _ChangedRate = None,
    weights_on_host: _WeightsOnHost = False,
    kv_encoding: _Encodings = [],  # noqa: B006 - typer's way to say "none"
    seed: options.Seed = 0,
    speculate: _Speculate = None,
    draft_tokens: _DraftTokens = None,
    kv_heads: _KvHeads = None,
    select: _Select = None,
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
    options.check_data_type(dtype)
    common: dict[str, Any] = {
        "dtype": dtype,
        "batch": batch,
        "new": new,
        "link_rate": None if link_rate is None else parse_rate(link_rate, field="link_rate"),
        "repeats": repeats,
        "device": device,
        "threads": options.thread_count(threads),
    }
    files = tuple(map(str, text))
    of_text = common | {"shape": shape or BUNDLED_MODEL, "kv_heads": kv_heads, "text": files}
    if speculate is not None:
        drafts = DraftWorkload(
            prompt=prompt,
            method=_method(speculate),
            draft_tokens=draft_tokens,
            select=_drafting(select, speculate),
            **of_text,
        )
        _measure_drafts(resolve_model(shape), drafts, as_json=as_json, output=output)
        return
    if select is not None:
        selecting = SelectWorkload(
            lengths=tuple(dict.fromkeys(length)) or (prompt,),
            seed=seed,
            select=_selection(select),
            layers=layers,
            **of_text,
        )
        _measure_selections(shape, selecting, png_file, as_json=as_json, output=output)
        return
    _check_alone(kv_heads=kv_heads, length=length, layers=layers, text=text)
    model = find_shape(shape or "opt-125m", dtype)
    _check_options(change_link_rate, png_file, kv_encoding, trace_file, sweep=sweep)
    workload = OffloadWorkload(
        shape=model.name,
        prompt=prompt,
        seed=seed,
        sweep=sweep,
        changed_link_factor=change_link_rate,
        weights_on_host=weights_on_host,
        kv_encodings=tuple(dict.fromkeys(kv_encoding)),
        **common,
    )
    report = _measured(model, workload, trace_file, png_file)
    hand_over_report(report, table_of, as_json=as_json, output=output)


def _measured(
    model: ModelShape, workload: OffloadWorkload, trace_file: Path | None, png_file: Path | None
) -> dict[str, Any]:
    """Run all contenders; return the report, and draw it if wanted."""
    with options.importing_peer():
        from splitpoint_cli.bench.offload.runs import peer_of, run_all
    progress = Progress()
    peer = peer_of(model, workload, progress)
    report = report_of(workload, run_all(model, workload, progress, peer, trace_file))
    if png_file is not None:
        draw_sweep(report, png_file)
    return report


def _check_alone(**given: object) -> None:
    """Raise InvalidArgument for an option that says nothing without --select or --speculate."""
    for name, value in given.items():
        if value:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{flag} needs --select or --speculate", field=name)


def _check_options(
    change_link_rate: float | None,
    png_file: Path | None,
    kv_encodings: list[str],
    trace_file: Path | None,
    *,
    sweep: bool,
) -> None:
    """Raise InvalidArgument with the option's name if one cannot be what it is."""
    if change_link_rate is not None and not 0 < change_link_rate < float("inf"):
        raise InvalidArgument("the factor must be above 0", field="change_link_rate")
    if png_file is not None:
        if not sweep:
            raise InvalidArgument("--png draws what --sweep measures", field="png")
        check_picture(png_file)
    for name in kv_encodings:
        if name not in ENCODINGS:
            raise InvalidArgument(
                f"{name!r} is none of {', '.join(ENCODINGS)}", field="kv_encoding"
            )
    check_output(trace_file, "trace")


def _measure_drafts(
    folder: Path, workload: DraftWorkload, *, as_json: bool, output: Path | None
) -> None:
    from splitpoint_cli.bench.offload.drafts import run_drafts

    shape = read_shape(folder, data_type=DataType(workload.dtype))
    results = run_drafts(folder, shape, workload, Progress())
    report = drafts_report_of(workload, results)
    hand_over_report(report, drafts_table_of, as_json=as_json, output=output)


def _measure_selections(
    shape: str | None,
    workload: SelectWorkload,
    png_file: Path | None,
    *,
    as_json: bool,
    output: Path | None,
) -> None:
    # The bundled model has no name that is found.
    named = find_named(shape or str(resolve_model(None)), workload.dtype)
    if workload.layers is not None and named.folder is not None:
        raise InvalidArgument("a checkpoint has its own layers", field="layers")
    if workload.new < LEAST_SELECTED:
        # Steps that build screens and fill rows are not counted, and two are compared.
        raise InvalidArgument(f"--select needs at least {LEAST_SELECTED} new tokens", field="new")
    if png_file is not None:
        check_picture(png_file)
    from splitpoint_cli.bench.offload.selections import run_selections

    report = select_report_of(workload, run_selections(named, workload, Progress()))
    if png_file is not None:
        draw_selections(report, png_file)
    hand_over_report(report, select_table_of, as_json=as_json, output=output)


def _selection(text: str) -> Selection:
    """Return what decode steps read. Raises InvalidArgument for what is not approximate."""
    selection = Selection.parsed(text)
    check_served(selection)
    if not selection.is_approximate or selection.method.is_calibrated:
        raise InvalidArgument(
            f"{selection} is not measured here: it reads every token, verifies or needs artefacts",
            field="select",
        )
    return selection


def _drafting(text: str | None, method: str) -> Selection:
    """Return what drafts attend. Raises InvalidArgument."""
    if text is None:
        return FULL
    selection = replace(Selection.parsed(text), verify=True)
    check_served(selection)
    check_speculation(selection, Speculation(_method(method)))
    return selection


def _method(name: str) -> DraftMethod:
    """Return a method that this benchmark measures. Raises InvalidArgument."""
    found = DraftMethod(name) if name in (*DraftMethod, *ALIASES) else None
    if found not in MEASURED:
        raise InvalidArgument(f"{name!r} is none of {', '.join(MEASURED)}", field="speculate")
    return found
