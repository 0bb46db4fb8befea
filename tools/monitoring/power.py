"""Watts, and what a token costs."""

from __future__ import annotations

from tools.monitoring.panels import CHOSEN, Dashboard, Form, Panel, Query, Row, Unit, rate

_COST = Row(
    "What does a token cost?",
    (
        Panel(
            "Joules per token, GPU",
            Unit.JOULES,
            "Energy over generated tokens, prefills and idle power included. Falls with larger "
            "batches; rises when the GPU waits for the link.",
            (
                Query(
                    'worker:gpu_joules_per_token:ratio_rate1m{worker=~"$worker"}',
                    "worker {{worker}}",
                ),
            ),
        ),
        Panel(
            "Joules per token, CPU",
            Unit.JOULES,
            "Energy of a host's CPU packages over all tokens its workers generated. Everything "
            "else on the host counts, too.",
            (Query("host:cpu_joules_per_token:ratio_rate1m", "host {{host}}"),),
        ),
        Panel(
            "Generated tokens",
            Unit.TOKENS_PER_SECOND,
            "The divisor. Joules per token jump where this falls: an idle GPU draws power, too.",
            (
                Query(
                    rate("splitpoint_worker_generated_tokens_total", "worker", of=CHOSEN),
                    "worker {{worker}}",
                ),
            ),
        ),
    ),
)

_WATTS = Row(
    "Where do the watts go?",
    (
        Panel(
            "Power of the GPU",
            Unit.WATTS,
            "Beside its limit (dashed). At the limit clocks are held down: raise it "
            "(nvidia-smi -pl), or cool.",
            (
                Query('splitpoint_gpu_power_watts{worker=~"$worker"}', "worker {{worker}}"),
                Query(
                    'splitpoint_gpu_power_limit_watts{worker=~"$worker"}',
                    "limit {{worker}}",
                    is_limit=True,
                ),
            ),
        ),
        Panel(
            "Power over its limit",
            Unit.SHARE,
            "98 % for minutes: the GPU throttles, and predictions of rebuilding are too fast.",
            (Query('worker:gpu_power_over_limit:ratio{worker=~"$worker"}', "worker {{worker}}"),),
            warn=0.9,
            alarm=0.98,
            top=1,
        ),
        Panel(
            "Power of the CPU packages",
            Unit.WATTS,
            "By RAPL zone, of the whole host.",
            (Query("host:cpu_power_watts:rate1m", "host {{host}} {{zone}}"),),
            Form.STACK,
        ),
        Panel(
            "Energy of the last hour, GPU",
            Unit.JOULES,
            "3.6 MJ are one kilowatt hour.",
            (
                Query(
                    "sum by (worker) "
                    '(increase(splitpoint_gpu_energy_joules_total{worker=~"$worker"}[1h]))',
                    "worker {{worker}}",
                ),
            ),
            Form.NUMBER,
        ),
        Panel(
            "GPU answers",
            Unit.YES_NO,
            "0: the driver does not; `nvidia-smi` in the worker's container says why.",
            (Query('splitpoint_gpu_up{worker=~"$worker"}', "worker {{worker}}"),),
            Form.NUMBER,
            warn=1,
            alarm=1,
            low_is_bad=True,
        ),
        Panel(
            "What this GPU can tell",
            Unit.YES_NO,
            "0: the panel of this field stays empty, because GPU or driver do not have it.",
            (
                Query(
                    'min by (field) (splitpoint_gpu_field_supported{worker=~"$worker"})',
                    "{{field}}",
                ),
            ),
            Form.NUMBER,
        ),
    ),
)

_DEVICE = Row(
    "What is the GPU doing?",
    (
        Panel(
            "Utilisation",
            Unit.SHARE,
            "Share of the time in which any kernel ran. Low while requests are slow: it waits for "
            "the link or for requests.",
            (Query('splitpoint_gpu_utilization_ratio{worker=~"$worker"}', "worker {{worker}}"),),
            top=1,
        ),
        Panel(
            "Clocks",
            Unit.HERTZ,
            "Fall under load: power limit or temperature.",
            (Query('splitpoint_gpu_clock_hertz{worker=~"$worker"}', "worker {{worker}} {{kind}}"),),
        ),
        Panel(
            "Temperature",
            Unit.CELSIUS,
            "Most GPUs slow down from 85 °C on: airflow.",
            (Query('splitpoint_gpu_temperature_celsius{worker=~"$worker"}', "worker {{worker}}"),),
            warn=80,
            alarm=87,
        ),
        Panel(
            "Memory of the GPU",
            Unit.BYTES,
            "Of all processes on it. More than --device-memory: another process is there.",
            (
                Query(
                    'splitpoint_gpu_memory_bytes{worker=~"$worker", kind="used"}',
                    "worker {{worker}}",
                ),
                Query(
                    'splitpoint_gpu_memory_bytes{worker=~"$worker", kind="total"}',
                    "total {{worker}}",
                    is_limit=True,
                ),
            ),
        ),
        Panel(
            "Arena memory page-locked",
            Unit.BYTES,
            "Less than the arena: copies from the rest are slower; --pin-limit or `ulimit -l`.",
            (Query('splitpoint_worker_pinned_bytes{worker=~"$worker"}', "worker {{worker}}"),),
        ),
    ),
)

POWER = Dashboard(
    "power",
    "Power",
    "Watts beside their limits, and joules per token of GPU and CPU.",
    (_COST, _WATTS, _DEVICE),
)
