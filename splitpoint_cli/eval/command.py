"""`splitpoint eval`: what selections of cached tokens cost in accuracy.

runs.py has what is run; it is imported, with torch, only once the evaluation starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitpoint.extras import need_all
from splitpoint_cli.bench import harness
from splitpoint_cli.bench.ending import ending_by_signals
from splitpoint_cli.bench.harness import Progress, hand_over_report
from splitpoint_cli.eval.report import report_of, table_of
from splitpoint_cli.eval.workload import EvalWorkload, default_selections, read_selections
from splitpoint_cli.output import AsJson, OutputFile, with_exit_codes

_Model = Annotated[
    str | None,
    typer.Argument(
        help="Checkpoint folder or Hugging Face name; default: the bundled model.",
        metavar="DIR|NAME",
    ),
]
_Select = Annotated[
    list[str],
    typer.Option(
        "--select",
        help="Selection, such as columns:0.1; may be repeated. Default: every screen at 2, 5, 10, "
        "20 and 50 %, the papers' own settings, small screens and bounded pools.",
        metavar="METHOD:RATIO[,...]",
    ),
]
_Text = Annotated[
    list[Path],
    typer.Option(
        "--text",
        help="Read this file; may be repeated. Default: Python files that the bundled model "
        "never saw.",
        metavar="FILE",
    ),
]
_Tokens = Annotated[int, typer.Option(help="Tokens of each text.")]
_Prompt = Annotated[
    int | None,
    typer.Option(help="Tokens of a text that are computed exactly; default: half of them."),
]
_Windows = Annotated[
    int, typer.Option(help="Number of texts of each unseen package, or of the files.", min=1)
]
_Tasks = Annotated[int, typer.Option(help="Number of needles, and of tables; 0: no tasks.", min=0)]
_Guess = Annotated[
    str,
    typer.Option(
        help="Guess a layer's queries from its own input, or from the residual of the previous "
        "layer.",
        metavar="own|previous",
    ),
]
_Norm = Annotated[
    str,
    typer.Option(
        help="With --guess previous: the layer whose norm the residual gets.",
        metavar="own|previous",
    ),
]
_KvHeads = Annotated[
    int | None,
    typer.Option(
        help="Average the checkpoint's KV heads to this many, for grouped queries; screens that "
        "need calibration are left out. Default: its own.",
        min=1,
    ),
]
_Artifacts = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the artefacts of `splitpoint calibrate`; default: beside the model.",
        metavar="DIR",
    ),
]


@with_exit_codes
@ending_by_signals
def evaluate(
    model: _Model = None,
    select: _Select = [],  # noqa: B006 (typer copies it)
    text: _Text = [],  # noqa: B006
    tokens: _Tokens = 2048,
    prompt: _Prompt = None,
    windows: _Windows = 2,
    tasks: _Tasks = 4,
    guess: _Guess = "own",
    norm: _Norm = "own",
    kv_heads: _KvHeads = None,
    artifacts: _Artifacts = None,
    threads: harness.Threads = 0,
    seed: harness.Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Measure what reading a part of the cached tokens costs in accuracy.

    Texts are read with teacher forcing: the prompt exactly, each later token as decoding would
    compute it under the selection. Reports perplexity, the part of the KV that is read, the bytes
    that the screen keeps on the device, recall of the tokens with the largest attention weights,
    overlap of adjacent steps, and right answers of tasks that need distant tokens. fp32 on the
    CPU.
    """
    need_all("an evaluation")
    workload = EvalWorkload(
        model=model,
        selections=read_selections(select) if select else default_selections(),
        is_default=not select,
        tokens=tokens,
        prompt=tokens // 2 if prompt is None else prompt,
        windows=windows,
        tasks=tasks,
        text=tuple(text),
        guess=guess,
        norm=norm,
        kv_heads=kv_heads,
        artifacts=artifacts,
        threads=harness.thread_count(threads),
        seed=seed,
    )
    from splitpoint_cli.eval.runs import run_all

    report = report_of(workload, *run_all(workload, Progress()))
    hand_over_report(report, table_of, as_json=as_json, output=output)
