"""Is it well, and if not: where to look next."""

from __future__ import annotations

from tools.monitoring.panels import Dashboard, Form, Panel, Query, Row, Unit, quantile, rate

# Of several schedulers one has a worker, the others only know it.
_READY = "sum(max by (worker) (splitpoint_worker_ready))"
_KNOWN = "count(max by (worker) (splitpoint_worker_known))"

_NOW = Row(
    "Now",
    (
        Panel(
            "Workers ready, of those known",
            Unit.SHARE,
            "Green only when all known workers take requests. Orange: the others serve; see "
            "`splitpoint status` and the log of the worker that is missing. Red: no request is "
            "served.",
            (
                Query(f"{_READY} / {_KNOWN}", "share"),
                Query(_READY, "ready", unit=Unit.NUMBER, colour="text"),
                Query(_KNOWN, "known", unit=Unit.NUMBER, colour="text"),
            ),
            Form.NUMBER,
            width=6,
            warn=1,
            alarm=0.001,
            low_is_bad=True,
        ),
        Panel(
            "Running",
            Unit.NUMBER,
            "Requests placed on a worker.",
            (Query("sum(splitpoint_requests_running)", "running"),),
            Form.NUMBER,
            width=3,
        ),
        Panel(
            "Queue",
            Unit.SHARE,
            "Requests that wait, over the most that may. At 100 % further ones are refused: more "
            "workers, or callers that come back later.",
            (Query("scheduler:queue_fill:ratio", "{{instance}}"),),
            Form.NUMBER,
            width=3,
            warn=0.5,
            alarm=0.8,
        ),
        Panel(
            "First token, p95",
            Unit.SECONDS,
            "One request in 20 waits longer. Bad: is it the queue (below), or the prefill (how "
            "many prompt tokens are cached)?",
            (Query("scheduler:ttft_seconds:p95_rate1m", "{{instance}}"),),
            Form.NUMBER,
            width=4,
            warn=2.5,
            alarm=10,
        ),
        Panel(
            "Between tokens, p95",
            Unit.SECONDS,
            "One gap in 20 is longer. Bad: look at the link's dashboard for streamed requests, "
            "at the tokens per step of the scheduler's dashboard for resident ones.",
            (Query("scheduler:itl_seconds:p95_rate1m", "{{instance}}"),),
            Form.NUMBER,
            width=4,
            warn=0.2,
            alarm=1,
        ),
        Panel(
            "Prompt tokens from a store",
            Unit.SHARE,
            "Little although prompts begin alike: the arena is too small (the store's "
            "dashboard), or tenants and salts keep them apart.",
            (Query("scheduler:cached_tokens:ratio_rate1m", "{{instance}}"),),
            Form.NUMBER,
            width=4,
            top=1,
        ),
        Panel(
            "Alerts",
            Unit.NUMBER,
            "Alerts that fire, or are pending: their condition holds, but not for long enough. "
            "What to do about each: docs/monitoring.md.",
            (
                Query(
                    "max by (severity, alertstate, alertname, worker, instance) "
                    '(ALERTS{alertname=~"Splitpoint.*"})',
                    "{{severity}} {{alertstate}} {{alertname}} {{worker}} {{instance}}",
                ),
            ),
            Form.TABLE,
            width=24,
        ),
    ),
)

_LATENCY = Row(
    "How long it takes",
    (
        Panel(
            "Time to first token",
            Unit.SECONDS,
            "From arrival to the first token, queueing included. High with the queue's time: more "
            "requests than the workers can take. High without it: prefills are long; see what "
            "share is cached.",
            (
                Query("scheduler:ttft_seconds:p50_rate1m", "p50 {{instance}}"),
                Query("scheduler:ttft_seconds:p95_rate1m", "p95 {{instance}}"),
                Query("scheduler:ttft_seconds:p99_rate1m", "p99 {{instance}}"),
            ),
            warn=2.5,
            alarm=10,
        ),
        Panel(
            "Between tokens",
            Unit.SECONDS,
            "Gaps between a request's tokens. A high p99 beside a low p50: prefills of others come "
            "between (a smaller --prefill-chunk). All of it high: the step is slow.",
            (
                Query("scheduler:itl_seconds:p50_rate1m", "p50 {{instance}}"),
                Query("scheduler:itl_seconds:p95_rate1m", "p95 {{instance}}"),
                Query("scheduler:itl_seconds:p99_rate1m", "p99 {{instance}}"),
            ),
            warn=0.2,
            alarm=1,
        ),
        Panel(
            "In the queue, and in all",
            Unit.SECONDS,
            "Arrival to placement, and arrival to last token, p95. Where the first comes near the "
            "second, requests wait for memory: see the VRAM ledger.",
            (
                Query("scheduler:queue_seconds:p95_rate1m", "queue p95 {{instance}}"),
                Query(
                    quantile(0.95, "splitpoint_request_seconds", "instance"),
                    "whole request p95 {{instance}}",
                ),
            ),
        ),
        Panel(
            "Prefill and decode",
            Unit.SECONDS,
            "Placement to first token, and first to last token, of completed requests. Long "
            "prefills: see what share of the prompts is cached. Long decodes: many tokens, or "
            "slow ones (next panel).",
            tuple(
                Query(
                    quantile(share, f"splitpoint_{phase}_seconds", "instance"),
                    f"{phase} {name} {{{{instance}}}}",
                )
                for phase in ("prefill", "decode")
                for share, name in ((0.5, "p50"), (0.95, "p95"))
            ),
        ),
        Panel(
            "Time per output token",
            Unit.SECONDS,
            "TPOT: the mean of each completed request, first token left out. What a reader feels "
            "as speed; single long gaps show in the panel between tokens.",
            tuple(
                Query(
                    quantile(share, "splitpoint_tpot_seconds", "instance"),
                    f"{name} {{{{instance}}}}",
                )
                for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
            warn=0.2,
            alarm=1,
        ),
        Panel(
            "Length of prompts and answers",
            Unit.NUMBER,
            "Tokens of completed requests. Longer ones than before explain longer times; a look "
            "at the other panels then explains the rest.",
            tuple(
                Query(quantile(share, f"splitpoint_request_{what}_tokens"), f"{what} {name}")
                for what in ("prompt", "generated")
                for share, name in ((0.5, "p50"), (0.95, "p95"))
            ),
        ),
    ),
)

_THROUGHPUT = Row(
    "How much is done",
    (
        Panel(
            "Tokens",
            Unit.TOKENS_PER_SECOND,
            "Generated tokens, prompt tokens of completed requests, and of these the cached ones. "
            "Few generated tokens beside a long queue: a worker is lost or slow.",
            (
                Query(
                    "sum(rate(splitpoint_generated_tokens_total[$__rate_interval]))", "generated"
                ),
                Query("sum(rate(splitpoint_prompt_tokens_total[$__rate_interval]))", "prompt"),
                Query(
                    "sum(rate(splitpoint_cached_tokens_total[$__rate_interval]))", "of these cached"
                ),
            ),
        ),
        Panel(
            "Requests by how they ended",
            Unit.PER_SECOND,
            "`error`: look into the scheduler's log; `abandoned`: callers went away, often because "
            "answers took too long.",
            (
                Query(rate("splitpoint_requests_finished_total", "outcome"), "{{outcome}}"),
                Query(
                    "sum(rate(splitpoint_requests_rejected_total[$__rate_interval]))",
                    "rejected",
                    colour="dark-red",
                ),
            ),
            Form.STACK,
            colours={
                "stop": "green",
                "length": "dark-green",
                "abandoned": "orange",
                "error": "red",
            },
        ),
        Panel(
            "Running and waiting",
            Unit.NUMBER,
            "Waiting grows while running stays: admission is at its limit. Which one says the VRAM "
            "ledger of the scheduler's dashboard.",
            (
                Query("sum(splitpoint_requests_running)", "running"),
                Query("sum(splitpoint_requests_waiting)", "waiting"),
                Query("sum(splitpoint_queue_capacity)", "most that may wait", is_limit=True),
            ),
        ),
    ),
)

_HEALTH = Row(
    "Who is there",
    (
        Panel(
            "Scraped",
            Unit.YES_NO,
            "0: no metrics from there; the process is gone or hangs, or --metrics is missing.",
            (Query('min by (job) (up{job=~"kvstore|worker|scheduler"})', "{{job}}"),),
            Form.NUMBER,
            warn=1,
            alarm=1,
            low_is_bad=True,
        ),
        Panel(
            "Store attached",
            Unit.YES_NO,
            "0: this worker has no session of its store; nothing is reused, streamed requests "
            "wait. Look at the store's log.",
            (Query('splitpoint_worker_store_up{worker=~"$worker"}', "worker {{worker}}"),),
            Form.NUMBER,
            warn=1,
            alarm=1,
            low_is_bad=True,
        ),
        Panel(
            "Redis answers",
            Unit.YES_NO,
            "0: the service goes on without it; what other hosts have is not found.",
            (Query("min by (job) (splitpoint_redis_up)", "{{job}}"),),
            Form.NUMBER,
            warn=1,
            alarm=1,
            low_is_bad=True,
        ),
        Panel(
            "Calls by status",
            Unit.PER_SECOND,
            "gRPC calls of all services. RESOURCE_EXHAUSTED: a limit (queue, arena, quota); "
            "UNAVAILABLE: somebody was not there; INTERNAL: a bug, please report it.",
            (Query(rate("splitpoint_rpc_calls_total", "job, code"), "{{job}} {{code}}"),),
            width=12,
        ),
        Panel(
            "Release",
            Unit.NUMBER,
            "One release everywhere, or an upgrade is under way.",
            (
                Query(
                    "max by (service, version) (splitpoint_build_info)", "{{service}} {{version}}"
                ),
            ),
            Form.NAMES,
            width=6,
        ),
        Panel(
            "Model",
            Unit.NUMBER,
            "The model that is served; more than one: several stacks, or an upgrade.",
            (Query("max by (model_name) (splitpoint_model_info)", "{{model_name}}"),),
            Form.NAMES,
            width=6,
        ),
    ),
)

OVERVIEW = Dashboard(
    "overview",
    "Overview",
    "Latency, throughput and queue; from here to the dashboard that says why. "
    "How to read them: docs/monitoring.md.",
    (_NOW, _LATENCY, _THROUGHPUT, _HEALTH),
)
