"""The metrics of vLLM and SGLang, and those that answer the same questions here.

Names of theirs without their prefixes (`vllm:`, `sglang:`), as their documentation lists
them: vLLM's "Production Metrics" and `vllm/v1/metrics`, SGLang's "Production Metrics" and
`sglang/srt/metrics`, both as of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from splitpoint.observe.metrics import (
    CACHED_TOKENS,
    DECODE_SECONDS,
    FAILOVERS,
    GENERATED_TOKENS,
    ITL_SECONDS,
    PREFILL_SECONDS,
    PROMPT_TOKENS,
    QUEUE_SECONDS,
    REQUEST_GENERATED_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_SECONDS,
    REQUESTS_FINISHED,
    REQUESTS_REJECTED,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    STORE_HIT_TOKENS,
    STORE_INFO,
    STORE_QUERY_TOKENS,
    TPOT_SECONDS,
    TTFT_SECONDS,
    WORKER_CACHE_BYTES,
    WORKER_CACHE_USAGE,
    WORKER_RUNNING,
    WORKER_SCHEDULED_TOKENS,
    WORKER_STEPS,
    Metric,
    Service,
)


class Row(NamedTuple):
    """Names there, separated by spaces, and metrics here. `note`: how they differ."""

    vllm: str
    sglang: str
    here: tuple[Metric, ...]
    note: str = ""


ROWS = (
    Row("num_requests_running", "num_running_reqs", (REQUESTS_RUNNING, WORKER_RUNNING)),
    Row("num_requests_waiting", "num_queue_reqs", (REQUESTS_WAITING,)),
    Row(
        "kv_cache_usage_perc",
        "token_usage",
        (WORKER_CACHE_USAGE,),
        "1 means full, as there; what is kept for reuse lies in host memory, not in this cache",
    ),
    Row(
        "prefix_cache_queries prefix_cache_hits",
        "cache_hit_rate",
        (STORE_QUERY_TOKENS, STORE_HIT_TOKENS),
        "tokens, as in vLLM; divide their rates",
    ),
    Row(
        "num_preemptions",
        "num_retracted_reqs",
        (FAILOVERS,),
        "a request is placed when all of it fits and is never preempted; it is placed again only "
        "after its worker was lost",
    ),
    Row(
        "prompt_tokens generation_tokens",
        "prompt_tokens_total generation_tokens_total",
        (PROMPT_TOKENS, GENERATED_TOKENS),
        "prompts count when their requests complete",
    ),
    Row("prompt_tokens_cached", "cached_tokens_total", (CACHED_TOKENS,)),
    Row("", "gen_throughput", (GENERATED_TOKENS,), "its rate"),
    Row(
        "request_success",
        "num_requests_total num_aborted_requests_total",
        (REQUESTS_FINISHED, REQUESTS_REJECTED),
        "by `outcome`, which is vLLM's `finished_reason`; requests that were turned away are apart",
    ),
    Row("time_to_first_token_seconds", "time_to_first_token_seconds", (TTFT_SECONDS,)),
    Row("inter_token_latency_seconds", "inter_token_latency_seconds", (ITL_SECONDS,)),
    Row("request_time_per_output_token_seconds", "time_per_output_token_seconds", (TPOT_SECONDS,)),
    Row("e2e_request_latency_seconds", "e2e_request_latency_seconds", (REQUEST_SECONDS,)),
    Row("request_queue_time_seconds", "queue_time_seconds", (QUEUE_SECONDS,)),
    Row(
        "request_prefill_time_seconds",
        "",
        (PREFILL_SECONDS,),
        "restoring a cached prefix is part of it",
    ),
    Row("request_decode_time_seconds", "", (DECODE_SECONDS,)),
    Row("request_inference_time_seconds", "", (PREFILL_SECONDS, DECODE_SECONDS), "their sum"),
    Row("request_prompt_tokens", "prompt_tokens_histogram", (REQUEST_PROMPT_TOKENS,)),
    Row("request_generation_tokens", "generation_tokens_histogram", (REQUEST_GENERATED_TOKENS,)),
    Row(
        "iteration_tokens_total",
        "",
        (WORKER_SCHEDULED_TOKENS, WORKER_STEPS),
        "divide their rates: the mean, not the distribution",
    ),
    Row("cache_config_info", "max_total_num_tokens", (STORE_INFO, WORKER_CACHE_BYTES)),
)

_HEAD = """\
## Coming from vLLM or SGLang

Their names without the prefixes `vllm:` and `sglang:`, and the metrics here that answer the same
question. vLLM's counters appear with `_total` when they are scraped. Buckets of times are vLLM's
or finer.

Their label `model_name` is `splitpoint_model_info` here, since a process serves one model. Join it
to add the name to a series:

```
rate(splitpoint_generated_tokens_total[5m])
  * on (instance) group_left (model_name) splitpoint_model_info
```

| vLLM | SGLang | Splitpoint | measured by | difference |
|---|---|---|---|---|
"""
_SERVICES = {
    Service.KVSTORE: "the store",
    Service.WORKER: "workers",
    Service.SCHEDULER: "the scheduler",
}


def section() -> str:
    """The part of docs/metrics.md."""
    return _HEAD + "".join(f"| {' | '.join(_cells(row))} |\n" for row in ROWS)


def _cells(row: Row) -> Iterator[str]:
    yield _code(row.vllm.split())
    yield _code(row.sglang.split())
    yield _code([metric.name for metric in row.here])
    services = dict.fromkeys(service for metric in row.here for service in metric.services)
    yield ", ".join(_SERVICES[service] for service in services)
    yield row.note


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"
