"""The link to the device: is it the limit, what goes over it, is the plan right?"""

from __future__ import annotations

from tools.monitoring.panels import CHOSEN, Dashboard, Form, Panel, Query, Row, Unit, quantile, rate

_LIMIT = Row(
    "Is the link the limit?",
    (
        Panel(
            "Link busy",
            Unit.SHARE,
            "Share of the time in which copies ran, by direction; above 100 % where lanes copy "
            "side by side. Near 100 %: the link is the limit, and fewer bytes are the cure "
            "(rebuild more, --kv-encoding int8). Low while requests are slow: the device is.",
            (
                Query(
                    'worker:link_busy:ratio_rate1m{worker=~"$worker"}',
                    "worker {{worker}} {{direction}}",
                ),
            ),
            warn=0.95,
        ),
        Panel(
            "Bytes over the link's ceiling",
            Unit.SHARE,
            "Bytes a second over what the link can reach. Far below the busy share: copies are "
            "slow; pieces are too small or memory is not page-locked.",
            (
                Query(
                    'worker:link_bytes_over_ceiling:ratio_rate1m{worker=~"$worker"}',
                    "worker {{worker}} {{direction}}",
                ),
            ),
            top=1,
        ),
        Panel(
            "PCIe utilisation",
            Unit.SHARE,
            "All traffic of the GPU by the driver's counters over what the link can reach. More "
            "than the panel before: somebody else uses this link, too.",
            (
                Query(
                    'worker:pcie_bytes_over_ceiling:ratio_rate1m{worker=~"$worker"}',
                    "worker {{worker}} {{direction}}",
                ),
            ),
            top=1,
        ),
        Panel(
            "What copies reach",
            Unit.BYTES_PER_SECOND,
            "As fitted from copies' own times, beside what the link can reach. Falls below half: "
            "another process on the link, an old kernel's IOMMU, or the wrong NUMA node "
            "(`splitpoint doctor`).",
            (
                Query(
                    'splitpoint_link_rate_bytes_per_second{worker=~"$worker"}', "worker {{worker}}"
                ),
                Query(
                    'splitpoint_link_ceiling_bytes_per_second{worker=~"$worker"}',
                    "ceiling {{worker}}",
                    is_limit=True,
                ),
            ),
        ),
        Panel(
            "kappa over kappa_crit",
            Unit.NUMBER,
            "Cached over new tokens of the median request, over where loading takes as long as "
            "prefilling. Above 1 the link is the limit of a restore, below it the device.",
            (Query("scheduler:kappa_over_crit:ratio_rate1m", "{{instance}}"),),
            warn=1,
        ),
        Panel(
            "kappa",
            Unit.NUMBER,
            "Cached over new tokens of placed requests, and kappa_crit of each worker (dashed). A "
            "kappa_crit that falls: the link got slower or the device faster.",
            (
                Query(quantile(0.5, "splitpoint_kappa_ratio"), "p50"),
                Query(quantile(0.9, "splitpoint_kappa_ratio"), "p90"),
                Query('splitpoint_kappa_crit{worker=~"$worker"}', "crit {{worker}}", is_limit=True),
            ),
        ),
    ),
)

_TRAFFIC = Row(
    "What goes over it, and what is done instead?",
    (
        Panel(
            "Bytes by method",
            Unit.BYTES_PER_SECOND,
            "in: keys and values, activations, weights that stay on the host; out: write-back. "
            "Much `weights`: the model does not fit, and every step pays (docs/weights.md).",
            (
                Query(
                    rate("splitpoint_link_bytes_total", "direction, method", of=CHOSEN),
                    "{{direction}} {{method}}",
                ),
            ),
            Form.STACK,
        ),
        Panel(
            "Cached tokens by method",
            Unit.TOKENS_PER_SECOND,
            "Loaded, rebuilt from activations, or recomputed from token ids; restores count "
            "tokens, streamed steps the tokens of each step.",
            (
                Query(
                    rate("splitpoint_cache_tokens_total", "residency, method", of=CHOSEN),
                    "{{residency}} {{method}}",
                ),
            ),
            Form.STACK,
        ),
        Panel(
            "Share of each method",
            Unit.SHARE,
            "All loaded while the link is the limit: the model's keys are grouped (nothing to "
            "gain by activations), or the store keeps none (--activations).",
            (
                Query(
                    'worker:cache_tokens:share_rate1m{worker=~"$worker"}',
                    "worker {{worker}} {{method}}",
                ),
            ),
            top=1,
        ),
        Panel(
            "Split point",
            Unit.NUMBER,
            "Tokens before it are rebuilt, those after it loaded. 0 throughout: the planner found "
            "that loading wins; each answer's reason says by how much.",
            (
                Query(quantile(0.5, "splitpoint_split_tokens", of=CHOSEN), "p50"),
                Query(quantile(0.9, "splitpoint_split_tokens", of=CHOSEN), "p90"),
            ),
        ),
        Panel(
            "Restores",
            Unit.PER_SECOND,
            "Prefixes brought back, by method.",
            (Query(rate("splitpoint_restores_total", "method", of=CHOSEN), "{{method}}"),),
            Form.STACK,
        ),
        Panel(
            "Time of a restore, p95",
            Unit.SECONDS,
            "Part of the first token's time. Longer than recomputing would be: the profile is off "
            "(predictions, below).",
            (
                Query(
                    quantile(0.95, "splitpoint_restore_seconds", "method", of=CHOSEN), "{{method}}"
                ),
            ),
        ),
        Panel(
            "Fetched from other hosts",
            Unit.TOKENS_PER_SECOND,
            "Tokens brought from other hosts' stores; 0 on one host.",
            (
                Query(
                    rate("splitpoint_fetched_tokens_total", "worker", of=CHOSEN),
                    "worker {{worker}}",
                ),
            ),
        ),
        Panel(
            "Time for fetches",
            Unit.SHARE,
            "Share of the time spent fetching. High: prefixes live on the wrong host; route by "
            "prefix, or keep the scheduler's catalog (Redis) up.",
            (
                Query(
                    rate("splitpoint_fetch_seconds_total", "worker", of=CHOSEN), "worker {{worker}}"
                ),
            ),
        ),
        Panel(
            "Device work",
            Unit.SHARE,
            "Share of the time in which the device worked (prefill, decode, restores), and of it "
            "rebuilding. Both this and the link well below 100 % under load: neither overlaps; "
            "is the worker --serial?",
            (
                Query(
                    rate("splitpoint_compute_busy_seconds_total", "worker", of=CHOSEN),
                    "worker {{worker}} all",
                ),
                Query(
                    rate("splitpoint_recompute_seconds_total", "worker, method", of=CHOSEN),
                    "worker {{worker}} {{method}}",
                ),
            ),
        ),
    ),
)

_PLAN = Row(
    "Is the plan right?",
    (
        Panel(
            "Measured over predicted",
            Unit.NUMBER,
            "1 is right. Away from 1 for long: the machine is not what it was when it was "
            "measured (clocks, another load); a restarted worker measures anew.",
            (
                Query(
                    'worker:prediction:ratio_rate1m{worker=~"$worker"}',
                    "worker {{worker}} {{what}}",
                ),
            ),
            warn=1.5,
            alarm=3,
        ),
        Panel(
            "Predicted and measured time",
            Unit.SHARE,
            "Seconds a second, of what was predicted at all.",
            (
                Query(
                    rate("splitpoint_predicted_seconds_total", "what", of=CHOSEN),
                    "{{what}} predicted",
                ),
                Query(
                    rate("splitpoint_measured_seconds_total", "what", of=CHOSEN),
                    "{{what}} measured",
                ),
            ),
        ),
        Panel(
            "Spread of predictions",
            Unit.NUMBER,
            "Measured over predicted: the tenth that was fastest, the median, the slowest tenth. "
            "A wide spread around 1: single copies wait for something else on the machine.",
            tuple(
                Query(quantile(share, "splitpoint_prediction_ratio", of=CHOSEN), name)
                for share, name in ((0.1, "p10"), (0.5, "p50"), (0.9, "p90"))
            ),
        ),
        Panel(
            "Plans",
            Unit.PER_SECOND,
            "What plans chose. Streamed although memory is free: the request is larger than the "
            "device; see the VRAM ledger.",
            (
                Query(
                    rate("splitpoint_plans_total", "residency, method"), "{{residency}} {{method}}"
                ),
            ),
            Form.STACK,
        ),
        Panel(
            "Fitted rates of the device",
            Unit.FLOPS,
            "What plans reckon with: rebuilding K,V from activations, and prefilling. A fall: "
            "clocks are held down, or cores are shared.",
            (
                Query(
                    'splitpoint_profile_flops_per_second{worker=~"$worker"}',
                    "worker {{worker}} {{work}}",
                ),
            ),
        ),
        Panel(
            "How workers move the cache",
            Unit.NUMBER,
            "Device, schedule and where weights are. `serial` is for comparing only.",
            (
                Query(
                    "max by (worker, device, schedule, weights) "
                    '(splitpoint_worker_info{worker=~"$worker"})',
                    "{{worker}}: {{device}}, {{schedule}}, weights {{weights}}",
                ),
            ),
            Form.NAMES,
        ),
    ),
)

_BUS = Row(
    "The bus",
    (
        Panel(
            "PCIe traffic",
            Unit.BYTES_PER_SECOND,
            "By the driver's monotonic counters: rx to the GPU, tx from it.",
            (
                Query(
                    rate("splitpoint_gpu_pcie_bytes_total", "worker, direction", of=CHOSEN),
                    "worker {{worker}} {{direction}}",
                ),
            ),
        ),
        Panel(
            "PCIe generation",
            Unit.NUMBER,
            "An idle GPU may lower it; under load current must be max. Otherwise: BIOS, riser, or "
            "slot.",
            (
                Query(
                    'splitpoint_gpu_pcie_generation{worker=~"$worker"}',
                    "worker {{worker}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "PCIe lanes",
            Unit.NUMBER,
            "Fewer than max: the slot, a riser, or a neighbour takes them; the link is that much "
            "slower.",
            (Query('splitpoint_gpu_pcie_lanes{worker=~"$worker"}', "worker {{worker}} {{kind}}"),),
        ),
    ),
)

LINK = Dashboard(
    "link",
    "The link",
    "PCIe utilisation, bytes by method, split point, predicted and measured time, kappa.",
    (_LIMIT, _TRAFFIC, _PLAN, _BUS),
)
