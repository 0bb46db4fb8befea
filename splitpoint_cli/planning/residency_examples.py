"""`splitpoint what-pays --residency`: known models on built-in machines, as a table of the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitpoint.config import counted, format_size
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Objective
from splitpoint.planning.schedule import Schedule
from splitpoint.residency.load import SLICE_TOKENS, RequestLoad
from splitpoint.residency.ways import Forecast, Impossible
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.output import seconds_text
from splitpoint_cli.planning.residency import Explained, explained
from splitpoint_cli.planning.sizing import Node

_GIB = 1 << 30
_MAX_BATCH = 64
_OPT = RequestLoad(64, 1088, 1024, 64)
_LLAMA = RequestLoad(64, 7808, 7680, 256)
_LONG = RequestLoad(64, 31872, 31744, 128)


def _load(name: str, load: RequestLoad) -> str:
    counts = (load.cached_tokens, load.new_tokens, load.answer_tokens)
    return f"| {name} | {' | '.join(f'{count:,}' for count in counts)} |"


# (model, load, device memory): little beside the weights, more, and a whole card.
_EXAMPLES = (
    ("opt-6.7b", _OPT, 16 * _GIB),
    ("opt-6.7b", _OPT, 24 * _GIB),
    ("opt-6.7b", _OPT, 72 * _GIB),
    ("llama-3-8b", _LLAMA, 18 * _GIB),
    ("llama-3-8b", _LLAMA, 24 * _GIB),
    ("llama-3-8b", _LLAMA, 72 * _GIB),
    ("llama-3.1-8b", _LONG, 18 * _GIB),
)
_AT_ONCE = counted(_OPT.request_count, "request")
_LEGEND = f"""\
{_AT_ONCE} at once, each with a cached prefix of its own, all in bfloat16.
Batches of at most {_MAX_BATCH}, time slices of {SLICE_TOKENS} tokens, objective throughput.

| model | cached | new | generated |
|---|---|---|---|
{_load("OPT-6.7B", _OPT)}
{_load("Llama-3-8B", _LLAMA)}
{_load("Llama-3.1-8B", _LONG)}

| cell | meaning |
|---|---|
| `812 (7, 4.5 s)` | 812 tokens/s, 7 requests decode together, the last one ends after 4.5 s |
| – | not possible; for waves and time slices also: not needed, all fit |
| **bold** | the planner's choice |
"""


def examples(profiles: Sequence[tuple[str, Profile]]) -> Iterator[tuple[str, Explained]]:
    """Yield the profile's name and the comparison of each example."""
    for name, profile in profiles:
        for model, load, memory in _EXAMPLES:
            shape = BUILT_IN_SHAPES[model]
            yield (
                name,
                explained(
                    shape,
                    Node(profile, memory, max_batch=_MAX_BATCH),
                    load,
                    has_activations=shape.activations_can_pay,
                    schedule=Schedule.PIPELINED,
                    objective=Objective.THROUGHPUT,
                    slice_tokens=SLICE_TOKENS,
                ),
            )


def residency_table(profiles: Sequence[tuple[str, Profile]]) -> str:
    """Return the legend, and a row for each example."""
    lines = [
        _LEGEND,
        "| machine | model | device memory | for caches | resident | waves | time slices "
        "| streamed | link alone |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in examples(profiles):
        best = found.comparison.best
        cells = [
            name,
            found.shape.name,
            format_size(found.device_memory_bytes),
            format_size(found.room.cache_bytes),
            *(_cell(each, is_best=each is best) for each in found.comparison.ways),
            f"{found.comparison.link_bound:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(each: Forecast | Impossible, *, is_best: bool) -> str:
    if isinstance(each, Impossible):
        return "–"
    text = f"{each.tokens_per_second:,.0f} ({each.at_once}, {_duration(each.last_seconds)})"
    return f"**{text}**" if is_best else text


def _duration(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else seconds_text(seconds)
