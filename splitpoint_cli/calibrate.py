"""`splitpoint calibrate MODEL --screen METHOD`: factors of a screen, and their table.

Torch is loaded once the arguments are checked.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need
from splitpoint.host.files import replace_file
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import ModelShape
from splitpoint_cli.bench import harness
from splitpoint_cli.bench.calibration import LENGTH, RATE, TOKENS, calibration_passages
from splitpoint_cli.bench.harness import Progress, commit, hand_over_report, hardware, report_table
from splitpoint_cli.models import parse_dtype
from splitpoint_cli.output import AsJson, OutputFile, duration_text

_MIB = 1 << 20


def mean_of(layers: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of one figure over the layers."""
    return sum(float(layer[name]) for layer in layers) / len(layers)


def table_of(report: Mapping[str, Any]) -> Table:
    """Return one row per layer, and their mean."""
    layers = report["layers"]
    table = report_table(
        f"{report['screen']} for {report['model']}: {counted(report['tokens'], 'token')}, rank "
        f"{report['rank']}",
        "layer",
        *("loss at start", "loss at end", "epochs"),
        *("recall, closed form", "recall", "weight, closed form", "weight"),
    )
    for layer in layers:
        losses = layer["losses"]
        table.add_row(
            str(layer["layer"]),
            *((f"{losses[0]:.4g}", f"{min(losses):.4g}") if losses else ("-", "-")),
            str(len(losses) - 1) if losses else "-",
            *(f"{layer[name]:.3f}" for name in _SHARES),
        )
    table.add_row(
        *("mean", "", "", ""),
        *(f"{mean_of(layers, name):.3f}" for name in _SHARES),
    )
    tuned = report.get("fine_tuning")
    table.caption = "" if tuned is None else _tuned(tuned)
    table.caption += (
        "recall, weight: of a query's true top tenth of the tokens, and of its attention, in the "
        "guessed top tenth\n"
        f"{duration_text(report['seconds'])}, {report['peak_memory_bytes'] / _MIB:,.0f} MiB at "
        f"most; {report['path']}"
    )
    return table


def _tuned(facts: Mapping[str, Any]) -> str:
    """Return what became of the losses of MAPLE's second stage, as a line."""
    model, scores = (
        " to ".join(f"{loss:.4g}" for loss in facts[f"{name}_losses"])
        for name in ("model", "score")
    )
    kept = "" if facts["is_kept"] else ", not kept"
    return f"second stage, {facts['selection']}: model's loss {model}, scores' {scores}{kept}\n"


_SHARES = ("closed_recall", "recall", "closed_weight", "weight")


_CALIBRATED = [method for method in SelectionMethod if method.is_calibrated]
_KIB = 1024

_Model = Annotated[
    str | None,
    typer.Argument(help="Checkpoint; default: the bundled model.", metavar="DIR|NAME"),
]
_Screen = Annotated[
    str, typer.Option(help="The method to calibrate.", metavar="|".join(_CALIBRATED))
]
_Artifacts = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the artefacts; default: `screens` beside the model.", metavar="DIR"
    ),
]
_Text = Annotated[
    Path | None,
    typer.Option(help="Text to calibrate on; default: Python's library.", metavar="FILE"),
]
_Tokens = Annotated[int, typer.Option(help="Tokens of calibration text.", min=2)]
_Length = Annotated[
    int | None,
    typer.Option(
        help=f"Tokens of each passage of it; default: {LENGTH:,}, or the model's context.", min=32
    ),
]
_Columns = Annotated[
    int | None,
    typer.Option(help="Columns of each head's factors; default: 30 % of the head.", min=1),
]
_Projection = Annotated[
    int,
    typer.Option(help="Columns of MAPLE's random projection of X; 0: X is not projected.", min=0),
]
_Ratio = Annotated[
    float,
    typer.Option(
        help="Share of the tokens that layers read while MAPLE's factors learn from the model's "
        "loss; 0: they do not.",
        min=0.0,
        max=1.0,
    ),
]
_Alpha = Annotated[
    float, typer.Option(help="Weight of the squared error of scores beside that loss.", min=0.0)
]
_Epochs = Annotated[int, typer.Option(help="Most epochs of training; 0: the closed form.", min=0)]
_Rate = Annotated[
    float,
    typer.Option(help="First step of training, as a share of the factors' size.", min=0.0),
]


def calibrate(
    model: _Model = None,
    *,
    screen: _Screen,
    artifacts: _Artifacts = None,
    text: _Text = None,
    tokens: _Tokens = TOKENS,
    length: _Length = None,
    columns: _Columns = None,
    projection: _Projection = 0,
    epochs: _Epochs = 3,
    rate: _Rate = RATE,
    ratio: _Ratio = 0.125,
    alpha: _Alpha = 1.0,
    dtype: Annotated[str, typer.Option(help="Element type; auto: the checkpoint's.")] = "auto",
    device: Annotated[str, typer.Option(help="Where it runs.", metavar="auto|cpu|cuda")] = "auto",
    seed: harness.Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Make the factors of a screen from text, for `splitpoint eval` and selection.

    The last eighth of the text measures; the rest is learned from. The model itself does not
    change, and the artefacts are refused for any other model.
    """
    need("calibration", "worker")
    method = _method_of(screen)
    data_type = parse_dtype(dtype)
    folder = resolve_model(model, download=False)
    shape = read_shape(folder, data_type)
    length = _passage_length(length, shape)
    # Loads torch, which other commands do without.
    from worker_service.device.cache import TORCH_TYPES
    from worker_service.device.choice import choose_device
    from worker_service.distillation.calibrate import calibrate as calibrated
    from worker_service.distillation.fine_tuning import FineTuning
    from worker_service.distillation.training import Training
    from worker_service.kernels.choice import plain_weights
    from worker_service.model.decoder import Decoder
    from worker_service.selection.artifacts import artifacts_path, encoded

    path = artifacts_path(method, folder, artifacts)
    _check_folder(path.parent)
    rank = Selection(method=method, ratio=1.0, columns=columns).kept_columns(shape.head_dim)
    started, progress = time.monotonic(), Progress()
    passages = calibration_passages(folder, text, tokens, length, seed)
    tuning = None
    if method is SelectionMethod.MAPLE and ratio and epochs:
        selection = Selection(method=method, ratio=ratio, columns=rank)
        # A model whose layers all read everything has nothing to tune.
        if selection.exact_layers < shape.layer_count:
            tuning = FineTuning(selection, alpha)
    with plain_weights() if tuning else nullcontext():
        decoder = Decoder.load(folder, choose_device(device), TORCH_TYPES[shape.data_type])
    made, layers = calibrated(
        decoder,
        method,
        passages,
        rank=rank,
        projection=projection,
        training=Training(epochs=epochs, rate=rate, seed=seed),
        tuning=tuning,
        track=progress.track,
        say=progress.say,
    )
    replace_file(path, encoded(made, folder), 0o644)
    report = {
        "screen": str(method),
        "model": shape.name,
        **made.facts,
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_bytes": _KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "path": str(path),
        "layers": [asdict(layer) for layer in layers],
        "hardware": hardware(),
        "commit": commit(),
    }
    hand_over_report(report, table_of, as_json=as_json, output=output)


def _passage_length(length: int | None, shape: ModelShape) -> int:
    """Return the tokens of a passage. Raises InvalidArgument for more than the context."""
    if length is None:
        return min(LENGTH, shape.context_length)
    if length > shape.context_length:
        raise InvalidArgument(
            f"passages of {counted(length, 'token')} are longer than the context of {shape.name}, "
            f"{shape.context_length}",
            field="length",
        )
    return length


def _method_of(screen: str) -> SelectionMethod:
    if screen not in _CALIBRATED:
        what = "needs no calibration" if screen in list(SelectionMethod) else "is no screen"
        raise InvalidArgument(
            f"{screen!r} {what}: there are {', '.join(_CALIBRATED)}", field="screen"
        )
    return SelectionMethod(screen)


def _check_folder(folder: Path) -> None:
    """Make the folder of artefacts. Raises InvalidArgument, before any work, if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"{folder} cannot be made ({error.strerror}): name another one by --artifacts",
            field="artifacts",
        ) from error
    if not os.access(folder, os.W_OK):
        raise InvalidArgument(
            f"{folder} cannot be written: name another one by --artifacts", field="artifacts"
        )
