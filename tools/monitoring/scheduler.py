"""Who waits for what: memory, steps, and workers that come and go."""

from __future__ import annotations

from tools.monitoring.panels import CHOSEN, Dashboard, Form, Panel, Query, Row, Unit, quantile, rate

_MEMORY = Row(
    "What do requests wait for?",
    (
        Panel(
            "VRAM ledger",
            Unit.BYTES,
            "Device cache by the scheduler's books: charged to requests, and capacity (dashed). "
            "Charged at the capacity while requests wait: memory is the limit; streamed requests "
            "take less of it (--residency).",
            (
                Query(
                    'splitpoint_ledger_bytes{worker=~"$worker", kind="charged"}',
                    "charged {{worker}}",
                ),
                Query(
                    'splitpoint_ledger_bytes{worker=~"$worker", kind="capacity"}',
                    "capacity {{worker}}",
                    is_limit=True,
                ),
            ),
        ),
        Panel(
            "Cache on the device",
            Unit.BYTES,
            "What workers really use. Far below the ledger for long: requests ask for more tokens "
            "(max_tokens) than they generate.",
            (
                Query(
                    'splitpoint_worker_cache_bytes{worker=~"$worker", kind="used"}',
                    "used {{worker}}",
                ),
                Query(
                    'splitpoint_worker_cache_bytes{worker=~"$worker", kind="capacity"}',
                    "capacity {{worker}}",
                    is_limit=True,
                ),
            ),
        ),
        Panel(
            "Cache on the device in use",
            Unit.SHARE,
            "Used over capacity of each worker, as vLLM's cache usage. At 100 % further requests "
            "wait, or stream.",
            (Query('splitpoint_worker_cache_usage_ratio{worker=~"$worker"}', "worker {{worker}}"),),
            top=1,
        ),
        Panel(
            "Slots promised to streamed requests",
            Unit.NUMBER,
            "And how many a store has (dashed). At the limit further streamed requests wait: a "
            "larger arena.",
            (
                Query('splitpoint_ledger_slots{kind="charged"}', "charged {{store}} {{instance}}"),
                Query(
                    'splitpoint_ledger_slots{kind="capacity"}',
                    "capacity {{store}} {{instance}}",
                    is_limit=True,
                ),
            ),
        ),
        Panel(
            "Queue",
            Unit.NUMBER,
            "Requests that wait, and the most that may (dashed).",
            (
                Query("splitpoint_requests_waiting", "waiting {{instance}}"),
                Query("splitpoint_queue_capacity", "capacity {{instance}}", is_limit=True),
            ),
        ),
        Panel(
            "Time in the queue",
            Unit.SECONDS,
            "Arrival to placement.",
            (
                Query(quantile(0.5, "splitpoint_queue_seconds", "instance"), "p50 {{instance}}"),
                Query("scheduler:queue_seconds:p95_rate1m", "p95 {{instance}}"),
            ),
        ),
        Panel(
            "Rejections by reason",
            Unit.PER_SECOND,
            "QUEUE_FULL: more load than workers. NEVER_FITS: the request is larger than any "
            "worker. TENANT_QUOTA: one tenant asks too much. NO_WORKER: nobody is ready.",
            (Query(rate("splitpoint_requests_rejected_total", "reason"), "{{reason}}"),),
            Form.STACK,
        ),
    ),
)

_STEPS = Row(
    "Are steps full?",
    (
        Panel(
            "Scheduled tokens over budget",
            Unit.SHARE,
            "Tokens of a step, on average, over the most that one may have. Low with a long queue: "
            "memory, not compute, keeps requests out. High: steps are long, gaps between tokens, "
            "too.",
            (
                Query(
                    'worker:scheduled_tokens_over_budget:ratio_rate1m{worker=~"$worker"}',
                    "worker {{worker}}",
                ),
            ),
            top=1,
        ),
        Panel(
            "Budget of a step",
            Unit.NUMBER,
            "A full batch of decodes beside one piece of a prefill (--max-batch, --prefill-chunk).",
            (Query('splitpoint_worker_step_token_budget{worker=~"$worker"}', "worker {{worker}}"),),
            Form.NUMBER,
            width=4,
        ),
        Panel(
            "Requests in the roster",
            Unit.NUMBER,
            "By worker. Uneven for long: prefixes draw requests to one worker, or another is not "
            "ready.",
            (Query('splitpoint_worker_running_requests{worker=~"$worker"}', "worker {{worker}}"),),
            width=12,
        ),
        Panel(
            "Scheduled tokens",
            Unit.TOKENS_PER_SECOND,
            "Tokens that steps computed, by phase.",
            (
                Query(
                    rate("splitpoint_worker_scheduled_tokens_total", "phase", of=CHOSEN),
                    "{{phase}}",
                ),
            ),
            Form.STACK,
        ),
        Panel(
            "Steps",
            Unit.PER_SECOND,
            "Mostly `mixed`: prefills and decodes share steps, and gaps between tokens grow.",
            (Query(rate("splitpoint_worker_steps_total", "kind", of=CHOSEN), "{{kind}}"),),
            Form.STACK,
        ),
        Panel(
            "Time of a step",
            Unit.SECONDS,
            "p95 far above p50: single prefills; a smaller --prefill-chunk cuts them.",
            tuple(
                Query(quantile(share, "splitpoint_worker_step_seconds", of=CHOSEN), name)
                for share, name in ((0.5, "p50"), (0.95, "p95"))
            ),
        ),
    ),
)

_WORKERS = Row(
    "Who comes and goes?",
    (
        Panel(
            "Ready",
            Unit.YES_NO,
            "0: lost, loading or draining. A lost worker is tried again by itself.",
            (Query('splitpoint_worker_ready{worker=~"$worker"}', "worker {{worker}}"),),
            Form.NUMBER,
            warn=1,
            alarm=1,
            low_is_bad=True,
        ),
        Panel(
            "Lost workers, last hour",
            Unit.NUMBER,
            "Times a stream broke. More than a few: the worker's log, memory (OOM killer), GPU "
            "errors (`dmesg`).",
            (
                Query(
                    "sum by (worker) "
                    '(increase(splitpoint_worker_losses_total{worker=~"$worker"}[1h]))',
                    "worker {{worker}}",
                ),
            ),
            Form.NUMBER,
            warn=1,
            alarm=3,
        ),
        Panel(
            "Failovers, last hour",
            Unit.NUMBER,
            "Requests that were placed again after a worker was lost; their clients saw a pause.",
            (Query("sum(increase(splitpoint_failovers_total[1h]))", "requests"),),
            Form.NUMBER,
        ),
        Panel(
            "Worker messages not taken",
            Unit.PER_SECOND,
            "Late ones after a failover are right; many without one: two schedulers run one "
            "worker.",
            (Query(rate("splitpoint_dropped_results_total", "cause"), "{{cause}}"),),
            width=12,
        ),
        Panel(
            "Calls by method",
            Unit.PER_SECOND,
            "gRPC calls that the scheduler answered.",
            (
                Query(
                    "sum by (method) "
                    '(rate(splitpoint_rpc_calls_total{job="scheduler"}[$__rate_interval]))',
                    "{{method}}",
                ),
            ),
            Form.STACK,
            width=12,
        ),
    ),
)

SCHEDULER = Dashboard(
    "scheduler",
    "The scheduler",
    "VRAM ledger, scheduled tokens beside the budget, rejections, failovers.",
    (_MEMORY, _STEPS, _WORKERS),
)
