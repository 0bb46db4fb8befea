"""`splitpoint bench numerics`: one prompt, one answer, whatever else runs and is cached.

runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from typing import Annotated

import typer

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.extras import need_all
from splitpoint.options.cpu_kernels import check_cpu_kernels
from splitpoint.shapes import DataType
from splitpoint_cli.bench.numerics.report import NumericsWorkload, report_of, table_of
from splitpoint_cli.bench.shared import options
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import hand_over_report
from splitpoint_cli.output import AsJson, OutputFile

NO_COST = "none"
# Pages of the longest prompt, so that each way of restoring and streaming has some to take.
LEAST_PAGES = 6

_Model = Annotated[
    str | None,
    typer.Option(help="Checkpoint; default: the bundled model.", metavar="DIR|NAME"),
]
_Prompts = Annotated[int, typer.Option(help="Prompts whose answers are compared.", min=1)]
_Prompt = Annotated[int, typer.Option(help="Tokens of the longest prompt.", min=16)]
_PageTokens = Annotated[int, typer.Option(help="Tokens of a page and chunk.", min=1)]
_Kernels = Annotated[
    str,
    typer.Option(
        "--cpu-kernels",
        help="Kernels of the compared worker, which runs with invariant numerics.",
        metavar="auto|flags|NAME=KERNEL,...",
    ),
]
_FastKernels = Annotated[
    str,
    typer.Option(help="Kernels that its cost is a ratio to.", metavar="auto|flags|NAME=KERNEL,..."),
]
_CostShape = Annotated[
    str,
    typer.Option(help="A built-in shape for the cost, or none.", metavar=f"SHAPE|{NO_COST}"),
]


def numerics(
    model: _Model = None,
    dtype: options.ElementType = "bfloat16",
    prompts: _Prompts = 20,
    prompt: _Prompt = 512,
    new: options.NewTokens = 64,
    page_tokens: _PageTokens = 64,
    cpu_kernels: _Kernels = "auto",
    fast_kernels: _FastKernels = "auto",
    cost_shape: _CostShape = "opt-125m",
    repeats: options.Repeats = 5,
    device: options.ContendersDevice = "cpu",
    threads: options.Threads = 0,
    seed: options.Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Answers that should be equal, bit for bit: cold, cached, streamed, batched, with drafts.

    Each greedy answer and its log-probabilities are compared with those of the same prompt
    computed alone and with nothing cached. Prompts are passages of Python's library. Then
    decoding is timed beside the fast kernels. All of it takes about 25 minutes on 2 cores; the
    time grows with --prompts in groups of 16, with --prompt and --new.

    If a variant fails, those before it are reported, and the exit code is 1.
    """
    need_all("a benchmark")
    options.check_data_type(dtype)
    for kernels in (cpu_kernels, fast_kernels):
        check_cpu_kernels(kernels)
    cost_shape = cost_shape.lower()
    if cost_shape != NO_COST:
        options.built_in_shape(cost_shape)
    folder = resolve_model(model, download=False)
    shape = read_shape(folder, DataType(dtype))
    if prompt < LEAST_PAGES * page_tokens:
        raise InvalidArgument(
            f"a prompt of {prompt} tokens is too short for restores at every split: at least "
            f"{LEAST_PAGES} pages of {page_tokens} tokens, or smaller --page-tokens",
            field="prompt",
        )
    if prompt + new > shape.context_length:
        raise InvalidArgument(
            f"{prompt} prompt and {new} new tokens are more than the context of {shape.name}, "
            f"{shape.context_length}",
            field="prompt",
        )
    workload = NumericsWorkload(
        model=str(folder),
        dtype=dtype,
        prompts=prompts,
        prompt=prompt,
        new=new,
        page_tokens=page_tokens,
        kernels=cpu_kernels,
        fast_kernels=fast_kernels,
        cost_shape="" if cost_shape == NO_COST else cost_shape,
        repeats=repeats,
        device=device,
        threads=options.thread_count(threads),
        seed=seed,
    )
    from splitpoint_cli.bench.numerics.runs import run_all

    results = run_all(workload, Progress())
    hand_over_report(report_of(workload, results), table_of, as_json=as_json, output=output)
    if results.error:
        raise Internal(results.error)
