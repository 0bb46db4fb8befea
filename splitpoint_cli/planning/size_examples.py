"""`splitpoint size --examples`: known models on one H100, as the table of docs/sizing.md."""

from __future__ import annotations

from splitpoint.config import counted, format_size
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import Plan, RestoreMethod
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding, ModelShape
from splitpoint_cli.output import seconds_text
from splitpoint_cli.planning.sizing import Load, Node, host_memory_of, size_up

# Of a card with 80 GB, after the driver and CUDA.
DEVICE_MEMORY = 72 << 30
# Time to read 15 GiB of weights from memory of 3.35 TB/s, and for the launches.
_STEP_SECONDS = 6e-3
_PROFILE = "h100-pcie5"
_EXAMPLES = (
    ("llama-3.1-8b", Load(32768, 512, 256)),
    ("llama-3-8b", Load(8192, 512, 256)),
    ("opt-6.7b", Load(2048, 512, 128)),
)


def examples_table() -> str:
    """Return a row for each model and encoding, as Markdown."""
    lines = [
        f"One H100 with PCIe 5, {format_size(DEVICE_MEMORY)} of its memory for a worker, bfloat16, "
        f"batches of at most 32,",
        f"and {_STEP_SECONDS * 1e3:g} ms for what a decode step does beside the cache.",
        "",
        "| model | tokens | store keeps | resident at once | streamed at once | step of one "
        "streamed | of all | arena of one streamed | prefix | restored in | host memory for 100 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, load in _EXAMPLES:
        lines += [_line(BUILT_IN_SHAPES[name], load, encoding) for encoding in Encoding]
    return "\n".join(lines)


def _line(shape: ModelShape, load: Load, encoding: Encoding) -> str:
    node = Node(
        BUILT_IN_PROFILES[_PROFILE],
        DEVICE_MEMORY,
        encoding=encoding,
        step_compute_seconds=_STEP_SECONDS,
    )
    found = size_up(shape, node, load)
    host = host_memory_of(found, streamed_count=0, prefix_count=100)
    cells = (
        shape.name,
        f"{load.token_count:,}",
        encoding.value,
        str(found.resident_count),
        str(found.streamed_count),
        seconds_text(found.lone_step_seconds),
        seconds_text(found.step_seconds),
        format_size(found.host_request_bytes),
        f"{counted(load.cached_tokens, 'token')}, {format_size(found.prefix_bytes)}",
        restore_words(found.restore),
        format_size(host),
    )
    return f"| {' | '.join(cells)} |"


def restore_words(plan: Plan) -> str:
    """Return how long a restore takes, and its method."""
    took = seconds_text(plan.predicted_restore_seconds)
    if plan.method is RestoreMethod.LOAD:
        return f"{took}, all loaded"
    whole = seconds_text(plan.predicted_load_seconds)
    if plan.method is RestoreMethod.TOKENS:
        return f"{took} ({whole} loaded): {counted(plan.recomputed_tokens, 'token')} from their ids"
    return f"{took} ({whole} loaded): split {plan.split_tokens:,} of {plan.cached_tokens:,}"
