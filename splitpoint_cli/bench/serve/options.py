"""Options of `bench serve`, named as those of `vllm bench serve` where that has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from splitpoint.errors import InvalidArgument
from splitpoint.options.option import Option
from splitpoint_cli.bench.serve.backends import Sampling
from splitpoint_cli.bench.serve.prompts import RandomPrompts
from splitpoint_cli.bench.serve.requests import Requests
from splitpoint_cli.bench.serve.saving import Saving
from splitpoint_cli.bench.serve.workload import (
    GOALS,
    METRICS,
    Arrivals,
    Figures,
    RampUp,
    read_goals,
    read_metrics,
    read_percentiles,
)
from splitpoint_cli.options import of
from splitpoint_cli.traces.arrival import Trace, scaled
from splitpoint_cli.traces.formats import load_trace

_LOAD = "Load"
_DATA = "Requests"
_SAMPLING = "Sampling"
_RESULT = "Result"

# Bounds of factors: beyond them, no trace has a length or a rate that means anything.
_LEAST_FACTOR, _MOST_FACTOR = 1e-6, 1e6

BACKEND: Option[str] = Option(
    "backend",
    str,
    "splitpoint",
    "What the server speaks: splitpoint, gRPC with the scheduler; openai, HTTP with a gateway or "
    "any server that says its vocabulary_size in /v1/models.",
    choices=("splitpoint", "openai"),
)
BASE_URL: Option[str] = Option(
    "base-url",
    str,
    "http://127.0.0.1:8000",
    "Server of the backend openai; its paths follow.",
    unit="URL",
)
MODEL: Option[str] = Option("model", str, "", "Served model; absent: the only one.", unit="NAME")
REQUEST_RATE: Option[str] = Option(
    "request-rate",
    str,
    "inf",
    "Requests per second, whatever the server does; inf: all at once, or as --max-concurrency "
    "lets them, or when the trace says.",
    unit="RATE|inf",
)
BURSTINESS: Option[float] = Option(
    "burstiness",
    float,
    1.0,
    "Shape of the gamma distribution of the gaps: 1, a Poisson process; less: bursts; more: "
    "evenly.",
)
MAX_CONCURRENCY: Option[int | None] = Option(
    "max-concurrency",
    int,
    None,
    "Hold requests back while this many run; the load is not open then; absent: never.",
    unit="N",
    least=1,
)
RAMP_UP_STRATEGY: Option[str | None] = Option(
    "ramp-up-strategy",
    str,
    None,
    "Raise the rate from the first request to the last; absent: constant.",
    choices=tuple(RampUp),
)
RAMP_UP_START: Option[float] = Option(
    "ramp-up-start-rps", float, 0.0, "Requests per second of the first.", unit="RATE", least=0
)
RAMP_UP_END: Option[float] = Option(
    "ramp-up-end-rps", float, 0.0, "Requests per second of the last.", unit="RATE", least=0
)
NUM_PROMPTS: Option[int] = Option(
    "num-prompts", int, 1000, "Number of requests; of a trace at most this many.", least=1
)
NUM_WARMUPS: Option[int] = Option(
    "num-warmups",
    int,
    0,
    "Requests before them that are not measured, one after the other.",
    least=0,
)
SEED: Option[int] = Option("seed", int, 0, "Seed of prompts and gaps.", least=0)
DATASET_NAME: Option[str] = Option(
    "dataset-name", str, "random", "What is asked for.", choices=("random", "trace")
)
DATASET_PATH: Option[str | None] = Option(
    "dataset-path",
    str,
    None,
    "The trace: a file (JSON lines or CSV), or the name of a made one.",
    unit="FILE|NAME",
)
INPUT_LENGTH: Option[int] = Option(
    "random-input-len", int, 1024, "Prompt tokens of each random request.", least=1
)
OUTPUT_LENGTH: Option[int] = Option(
    "random-output-len", int, 128, "Tokens that each generates at most.", least=1
)
PREFIX_LENGTH: Option[int] = Option(
    "random-prefix-len", int, 0, "Prompt tokens before them that all share.", least=0
)
RANGE_RATIO: Option[float] = Option(
    "random-range-ratio",
    float,
    0.0,
    "Draw both lengths between this share below and above.",
    least=0,
    most=1,
)
TRACE_RATE: Option[float] = Option(
    "trace-rate",
    float,
    1.0,
    "Factor of the trace's requests per second.",
    least=_LEAST_FACTOR,
    most=_MOST_FACTOR,
)
TRACE_INPUT: Option[float] = Option(
    "trace-input",
    float,
    1.0,
    "Factor of its prompts' lengths.",
    least=_LEAST_FACTOR,
    most=_MOST_FACTOR,
)
TRACE_OUTPUT: Option[float] = Option(
    "trace-output",
    float,
    1.0,
    "Factor of its answers' lengths.",
    least=_LEAST_FACTOR,
    most=_MOST_FACTOR,
)
TRACE_TENANTS: Option[int] = Option(
    "trace-tenants", int, 1, "Number of tenants of a made trace.", least=1
)
IGNORE_EOS: Option[bool] = Option(
    "ignore-eos", bool, False, "Generate all tokens asked for, past the end of the text."
)
TEMPERATURE: Option[float | None] = Option(
    "temperature", float, None, "0: greedy; absent: the server's.", unit="T", least=0
)
TOP_P: Option[float | None] = Option("top-p", float, None, "As in generate.", unit="P")
TOP_K: Option[int | None] = Option("top-k", int, None, "As in generate.", unit="K")
MIN_P: Option[float | None] = Option("min-p", float, None, "As in generate.", unit="P")
LOGPROBS: Option[int | None] = Option(
    "logprobs", int, None, "Ask for log-probabilities, too; absent: no.", unit="N", least=0
)
PERCENTILE_METRICS: Option[str] = Option(
    "percentile-metrics",
    str,
    "ttft,tpot,itl",
    f"Metrics that are reported, of {', '.join(METRICS)}.",
    unit="METRIC,...",
)
METRIC_PERCENTILES: Option[str] = Option(
    "metric-percentiles", str, "99", "Their percentiles.", unit="P,..."
)
LABEL: Option[str | None] = Option(
    "label", str, None, "Name of the run; absent: the backend's.", unit="NAME"
)
SAVE_RESULT: Option[bool] = Option(
    "save-result", bool, False, "Write the result into --result-dir."
)
SAVE_DETAILED: Option[bool] = Option(
    "save-detailed", bool, False, "With the values of each request."
)
APPEND_RESULT: Option[bool] = Option(
    "append-result", bool, False, "Append a line to the file instead of replacing it."
)
RESULT_DIR: Option[str] = Option(
    "result-dir", str, ".", "Folder of the result; must exist.", unit="DIR"
)
RESULT_FILENAME: Option[str | None] = Option(
    "result-filename",
    str,
    None,
    "Its name there; absent: made of label, rate, model and date.",
    unit="NAME",
)

Goodput = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Most milliseconds of a good request, by {', '.join(GOALS)}; more may follow.",
        metavar="METRIC:MS",
        rich_help_panel=_RESULT,
    ),
]
MoreGoals = Annotated[
    list[str] | None,
    typer.Argument(help="More of --goodput.", metavar="METRIC:MS", show_default=False),
]
TenantTokens = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-token-file",
        help="Token of one of the trace's tenants; repeatable; the others use the caller's.",
        metavar="TENANT=PATH",
        rich_help_panel=_DATA,
    ),
]
Metadata = Annotated[
    list[str] | None,
    typer.Option(
        help="Put this into the result; repeatable.", metavar="KEY=VALUE", rich_help_panel=_RESULT
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        help="Draw the run into this file; absent: none.", metavar="FILE", rich_help_panel=_RESULT
    ),
]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Values of the options that are no lists."""

    backend: str = of(BACKEND)
    base_url: str = of(BASE_URL)
    model: str = of(MODEL)
    request_rate: str = of(REQUEST_RATE, _LOAD)
    burstiness: float = of(BURSTINESS, _LOAD)
    max_concurrency: int | None = of(MAX_CONCURRENCY, _LOAD)
    ramp_up_strategy: str | None = of(RAMP_UP_STRATEGY, _LOAD)
    ramp_up_start: float = of(RAMP_UP_START, _LOAD)
    ramp_up_end: float = of(RAMP_UP_END, _LOAD)
    num_prompts: int = of(NUM_PROMPTS, _LOAD)
    num_warmups: int = of(NUM_WARMUPS, _LOAD)
    seed: int = of(SEED, _DATA)
    dataset_name: str = of(DATASET_NAME, _DATA)
    dataset_path: str | None = of(DATASET_PATH, _DATA)
    input_length: int = of(INPUT_LENGTH, _DATA)
    output_length: int = of(OUTPUT_LENGTH, _DATA)
    prefix_length: int = of(PREFIX_LENGTH, _DATA)
    range_ratio: float = of(RANGE_RATIO, _DATA)
    trace_rate: float = of(TRACE_RATE, _DATA)
    trace_input: float = of(TRACE_INPUT, _DATA)
    trace_output: float = of(TRACE_OUTPUT, _DATA)
    trace_tenants: int = of(TRACE_TENANTS, _DATA)
    ignore_eos: bool = of(IGNORE_EOS, _SAMPLING)
    temperature: float | None = of(TEMPERATURE, _SAMPLING)
    top_p: float | None = of(TOP_P, _SAMPLING)
    top_k: int | None = of(TOP_K, _SAMPLING)
    min_p: float | None = of(MIN_P, _SAMPLING)
    logprobs: int | None = of(LOGPROBS, _SAMPLING)
    percentile_metrics: str = of(PERCENTILE_METRICS, _RESULT)
    metric_percentiles: str = of(METRIC_PERCENTILES, _RESULT)
    label: str | None = of(LABEL, _RESULT)
    save_result: bool = of(SAVE_RESULT, _RESULT)
    save_detailed: bool = of(SAVE_DETAILED, _RESULT)
    append_result: bool = of(APPEND_RESULT, _RESULT)
    result_dir: str = of(RESULT_DIR, _RESULT)
    result_filename: str | None = of(RESULT_FILENAME, _RESULT)

    def arrivals(self) -> Arrivals | None:
        """Return when requests come; None: a trace says it. Raises InvalidArgument."""
        try:
            rate = float(self.request_rate)
        except ValueError:
            raise InvalidArgument(
                f"--request-rate {self.request_rate!r} is neither a number nor inf",
                field="request_rate",
            ) from None
        ramp = None if self.ramp_up_strategy is None else RampUp(self.ramp_up_strategy)
        found = Arrivals(rate, self.burstiness, ramp, self.ramp_up_start, self.ramp_up_end)
        return found if found.is_open or self.dataset_name == "random" else None

    def requests(self) -> Requests:
        """Return what is sent when. Raises InvalidArgument."""
        source = self._trace() if self.dataset_name == "trace" else self._random()
        count = len(source.arrivals) if isinstance(source, Trace) else self.num_prompts
        return Requests(source, self.arrivals(), count, self.num_warmups, self.seed)

    def _random(self) -> RandomPrompts:
        if self.dataset_path is not None:
            raise InvalidArgument(
                "random requests come from no file: --dataset-path is for a trace",
                field="dataset_path",
            )
        return RandomPrompts(
            self.input_length, self.output_length, self.prefix_length, self.range_ratio
        )

    def _trace(self) -> Trace:
        if self.dataset_path is None:
            raise InvalidArgument("a trace needs --dataset-path", field="dataset_path")
        trace = load_trace(
            self.dataset_path, seed=self.seed, count=self.num_prompts, tenants=self.trace_tenants
        )
        return scaled(
            trace, rate=self.trace_rate, length=self.trace_input, output=self.trace_output
        )

    def sampling(self) -> Sampling:
        return Sampling(
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            logprobs=self.logprobs,
        )

    def figures(self, goals: list[str]) -> Figures:
        """Return what of the results is wanted. Raises InvalidArgument."""
        return Figures(
            read_metrics(self.percentile_metrics),
            read_percentiles(self.metric_percentiles),
            read_goals(goals),
        )

    def saving(self) -> Saving | None:
        """Return where the result is kept; None: nowhere. Raises InvalidArgument."""
        if not self.save_result and not self.append_result:
            if self.result_filename is not None or self.save_detailed:
                raise InvalidArgument(
                    "--result-filename and --save-detailed need --save-result or --append-result",
                    field="save_result",
                )
            return None
        folder = Path(self.result_dir)
        return Saving(folder, self.result_filename, self.append_result, self.save_detailed)
