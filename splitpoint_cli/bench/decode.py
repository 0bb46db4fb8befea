"""`splitpoint bench decode`: our worker beside other engines and the limit of the memory.

decode_runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need_all
from splitpoint.shapes import DataType, ModelShape, WeightFormat
from splitpoint.speculation import ALIASES, MOST_SPECULATIVE_TOKENS, DraftMethod
from splitpoint_cli.bench import harness
from splitpoint_cli.bench.decode_report import Workload, report_of, table_of
from splitpoint_cli.bench.harness import Progress, hand_over_report
from splitpoint_cli.bench.peers import check_peers, parse_peers
from splitpoint_cli.models import find_shape
from splitpoint_cli.output import AsJson, OutputFile

# `self` drafts for streamed requests: `bench offload` measures it.
METHODS = [DraftMethod.SUFFIX, DraftMethod.MODEL, DraftMethod.AUTO]

_Peers = Annotated[
    str,
    typer.Option(
        help="Peers, separated by commas: transformers, vllm; or none.", metavar="PEER,...|none"
    ),
]
_PeerPython = Annotated[
    list[Path],
    typer.Option(
        "--peer-python",
        help="Interpreter of an environment that has peers; may be repeated. Default: this one.",
        metavar="PATH",
    ),
]
_Text = Annotated[
    Path | None,
    typer.Option(help="Take prompts from this file, for --model's weights.", metavar="FILE"),
]
_Model = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint that --text's prompts are for; default: the bundled model.",
        metavar="DIR|NAME",
    ),
]
_Speculate = Annotated[
    list[str],
    typer.Option(
        "--speculate",
        help="Also decode with drafts of this method; may be repeated.",
        metavar="|".join(METHODS),
    ),
]
_SpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        help="Most drafts of a step; default: chosen by measurement.",
        min=1,
        max=MOST_SPECULATIVE_TOKENS,
    ),
]
_Temperature = Annotated[
    float,
    typer.Option(help="Sample at this temperature; with --peers none. 0: greedy.", min=0),
]
_DraftModel = Annotated[
    str | None,
    typer.Option(help="Draft model of `--speculate model`.", metavar="DIR|NAME"),
]


_Weights = Annotated[
    str,
    typer.Option(
        help="int8: also decode with int8 weights, and with --text report both perplexities.",
        metavar="|".join(each.value for each in WeightFormat),
    ),
]


def decode(
    shape: harness.RandomShape = "opt-125m",
    dtype: harness.ElementType = "float32",
    batch: harness.Batch = 8,
    prompt: harness.PromptTokens = 512,
    new: harness.NewTokens = 128,
    peers: _Peers = "transformers",
    peer_python: _PeerPython = [],  # noqa: B006 - typer's way to say "none"
    text: _Text = None,
    model: _Model = None,
    speculate: _Speculate = [],  # noqa: B006 - typer's way to say "none"
    speculative_tokens: _SpeculativeTokens = None,
    draft_model: _DraftModel = None,
    temperature: _Temperature = 0.0,
    weights: _Weights = "native",
    repeats: harness.Repeats = 5,
    device: harness.ContendersDevice = "cpu",
    threads: harness.Threads = 0,
    seed: harness.Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Our worker, in process, against other engines and the memory's limit.

    Each of transformers' caches runs with both of its attention implementations. Other
    peers run in processes of their own. Runs alternate; figures are medians. A peer's
    fastest setting counts; those that are slower by a quarter in the first round run once.
    """
    need_all("a benchmark")
    harness.check_data_type(dtype)
    _check_weights(weights, device)
    names = parse_peers(peers)
    folder = _checkpoint(text, model)
    dimensions = _dimensions(shape, folder, dtype)
    check_peers(names, dimensions, device)
    if temperature and names:
        raise InvalidArgument("peers decode greedily: --peers none", field="temperature")
    workload = Workload(
        shape=dimensions.name.lower(),
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        repeats=repeats,
        device=device,
        threads=harness.thread_count(threads),
        seed=seed,
        peers=names,
        text="" if text is None else text.name,
        model="" if folder is None else str(folder),
        speculate=_methods(speculate, draft_model),
        speculative_tokens=speculative_tokens,
        temperature=temperature,
        weights=weights,
        draft_model="" if draft_model is None else str(resolve_model(draft_model, download=False)),
    )
    with harness.importing_peer():
        from splitpoint_cli.bench.decode_runs import run_all
    measured = run_all(workload, dimensions, text, peer_python, Progress())
    hand_over_report(report_of(workload, measured), table_of, as_json=as_json, output=output)


def _check_weights(weights: str, device: str) -> None:
    """Raise InvalidArgument for an unknown format, and for one that the device cannot have."""
    names = [each.value for each in WeightFormat]
    if weights not in names:
        raise InvalidArgument(f"{weights!r} is none of {', '.join(names)}", field="weights")
    if weights != WeightFormat.NATIVE.value and device != "cpu":
        raise InvalidArgument("int8 weights are for CPU workers", field="weights")


def _checkpoint(text: Path | None, model: str | None) -> Path | None:
    """Return the folder whose weights are used; None: they are random."""
    if text is None and model is not None:
        raise InvalidArgument("--model goes with --text, which takes real prompts", field="model")
    return None if text is None else resolve_model(model, download=False)


def _dimensions(shape: str, folder: Path | None, dtype: str) -> ModelShape:
    if folder is not None:
        return read_shape(folder, DataType(dtype))
    harness.built_in_shape(shape.lower())
    return find_shape(shape, dtype)


def _methods(names: list[str], draft_model: str | None) -> tuple[str, ...]:
    """Return the draft methods, each once. Raises InvalidArgument."""
    methods = [_method(name) for name in names]
    if DraftMethod.MODEL in methods and draft_model is None:
        raise InvalidArgument("--speculate model needs --draft-model", field="draft_model")
    return tuple(dict.fromkeys(methods))


def _method(name: str) -> DraftMethod:
    """Return a method that this benchmark measures. Raises InvalidArgument."""
    found = DraftMethod(name) if name in (*DraftMethod, *ALIASES) else None
    if found not in METHODS:
        raise InvalidArgument(
            f"{name!r} is none of {', '.join(METHODS)}"
            + (": bench offload measures it" if found is DraftMethod.SELF else ""),
            field="speculate",
        )
    return found
