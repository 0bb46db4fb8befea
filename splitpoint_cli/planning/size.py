"""`splitpoint size`: how much host memory, how many requests at once, which split.

The arithmetic is sizing.py's. `--examples` prints known models on one H100, as the table of
docs/lab/sizing.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import typer

from splitpoint.config import counted, format_size, parse_size
from splitpoint.costs.page_choice import LEAST_PIECE
from splitpoint.costs.profile import MACHINES, Profile, load_profile
from splitpoint.errors import InvalidArgument
from splitpoint.options.speculation import SpeculativeConfig, read_speculative_config
from splitpoint.planning.plan import Plan, RestoreMethod
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, WeightObjective
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding, ModelShape, WeightFormat
from splitpoint_cli.models import NamedModel, find_named, find_profiled, format_note
from splitpoint_cli.options import takes_options
from splitpoint_cli.output import (
    AsJson,
    OutputFile,
    facts_table,
    hand_over,
    print_table,
    seconds_text,
    with_exit_codes,
)
from splitpoint_cli.planning.options import SizeOptions
from splitpoint_cli.planning.sizing import Load, Node, Sizing, host_memory_of, size_up
from splitpoint_cli.top.bars import amount

# Time to read 15 GiB of weights from memory of 3.35 TB/s, and for the launches.
_STEP_SECONDS = 6e-3
_MACHINE = MACHINES["h100"]
# Of a request, unless its number is given or the model's context is shorter.
_TOKENS = 32_768
_EXAMPLES_BATCH = 32
_EXAMPLES = (
    ("llama-3.1-8b", Load(32768, 512, 256)),
    ("llama-3-8b", Load(8192, 512, 256)),
    ("opt-6.7b", Load(2048, 512, 128)),
)


def examples_table() -> str:
    """Return a row for each model and encoding, as Markdown."""
    lines = [
        f"One H100 with PCIe 5, {format_size(_MACHINE.memory_bytes)} of its memory for a worker,",
        f"bfloat16, batches of at most {_EXAMPLES_BATCH},",
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
        _MACHINE.profile,
        _MACHINE.memory_bytes,
        max_batch=_EXAMPLES_BATCH,
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


@with_exit_codes
@takes_options
def size(
    options: SizeOptions,
    as_json: AsJson = False,
    output: OutputFile = None,
    examples: Annotated[
        bool,
        typer.Option("--examples", help="Print a table of known models; takes no options."),
    ] = False,
) -> None:
    """Print how much host memory, how many requests at once, which split. Needs no GPU."""
    if examples:
        print(examples_table())
        return
    costs = load_profile(options.profile)
    served = find_profiled(options.model, options.dtype, costs, options.profile)
    note = format_note(served, WeightFormat(options.weights), options.profile)
    shape, node = served.shape, _node(options, served, costs)
    tokens = options.tokens or min(_TOKENS, shape.context_length)
    load = Load(tokens, options.new, options.max_tokens)
    found = size_up(shape, node, load)
    streamed = _streamed_count(found, options.streamed)
    host = host_memory_of(found, streamed_count=streamed, prefix_count=options.prefixes)
    report = {
        "model": shape.name,
        "profile": node.profile.description,
        **dataclasses.asdict(found),
        "restore": {
            **dataclasses.asdict(found.restore),
            "method": found.restore.method.value,
            "residency": found.restore.residency.value,
            "schedule": found.restore.schedule.value,
            "objective": found.restore.objective.value,
        },
        "host_memory_bytes": host,
        "streamed_wanted": streamed,
        "prefix_count": options.prefixes,
    }
    prefixes = counted(options.prefixes, "cached prefix", "cached prefixes")
    needed = f"{prefixes} and {counted(streamed, 'streamed request')}, and a tenth more"
    rows = [
        *_rows(shape, node, load, found),
        ("--host-memory", f"{format_size(host)}: {needed}"),
        *([] if note is None else [("not on this GPU", note)]),
    ]
    hand_over(report, lambda: print_table(facts_table(rows)), as_json=as_json, output=output)


def _node(options: SizeOptions, served: NamedModel, costs: Profile) -> Node:
    config = read_speculative_config(options.speculative_config, options.draft_model)
    return Node(
        costs,
        _device_memory(options.device_memory, options.profile),
        max_batch=options.max_batch,
        max_batched_tokens=options.max_batched_tokens,
        chunk_tokens=options.chunk_tokens,
        encoding=Encoding(options.kv_encoding),
        weights=WeightFormat(options.weights),
        weight_objective=WeightObjective(options.weight_objective),
        step_compute_seconds=None if options.step_ms is None else options.step_ms / 1e3,
        drafts=None if config is None else config.defaults.method,
        folder=served.folder,
        draft=_draft_model(config, served),
    )


def _draft_model(config: SpeculativeConfig | None, served: NamedModel) -> NamedModel | None:
    """Return the draft model; None if there is none.

    Raises InvalidArgument for another vocabulary; of built-in shapes only the sizes are known.
    """
    if config is None or config.model is None:
        return None
    from splitpoint.checkpoint.vocabulary import (  # loads the tokenizers library
        check_vocabulary,
        check_vocabulary_size,
    )

    draft = find_named(config.model, served.shape.data_type.value)
    if draft.folder is not None and served.folder is not None:
        check_vocabulary(draft.folder, draft.shape, served.folder, served.shape)
    else:
        check_vocabulary_size(config.model, draft.shape, served.shape)
    return draft


def _device_memory(text: str | None, profile: str) -> int:
    """Return bytes. Raises InvalidArgument for measured costs without a size."""
    if text is not None:
        return parse_size(text, field="device_memory")
    if profile.lower() in MACHINES:
        return MACHINES[profile.lower()].memory_bytes
    raise InvalidArgument(
        f"how much memory does a worker of {profile} have? Give --device-memory "
        "(`splitpoint status` shows what its cache has of it)",
        field="device_memory",
    )


def _streamed_count(found: Sizing, wanted: int | None) -> int:
    """Return the number of streamed requests. Raises InvalidArgument if too many are wanted."""
    if wanted is None:
        if found.batch_streams:
            return found.full_batch.streamed
        return 0 if found.resident_count else found.streamed_count
    if wanted > found.streamed_count:
        raise InvalidArgument(
            f"{counted(wanted, 'streamed request does', 'streamed requests do')} not run at once "
            f"here: {found.streamed_count} do "
            "(--max-batch, --device-memory)",
            field="streamed",
        )
    return wanted


def _draft_words(node: Node, found: Sizing) -> str:
    """Return what the draft model takes of the device; empty if there is none."""
    draft = found.draft
    if draft is None or node.draft is None:
        return ""
    cache = counted(draft.page_count * node.chunk_tokens, "token")
    return (
        f"draft model {node.draft.shape.name} {format_size(draft.budget_bytes)} (weights "
        f"{format_size(draft.weight_bytes)}, cache of {cache}), "
    )


def _batch_words(found: Sizing) -> str:
    """Return how many requests share each pass over the weights, and their tokens per second."""
    full, residents = found.full_batch, found.residents
    count = counted(full.resident + full.streamed, "request")
    chosen = f"--objective throughput takes the {'first' if found.batch_streams else 'second'}"
    return (
        f"for {count} at once, {full.streamed} of them streamed: "
        f"{amount(full.tokens_per_second)} tokens/s; with {residents.resident} resident "
        f"alone: {amount(residents.tokens_per_second)} tokens/s ({chosen})"
    )


def _rows(shape: ModelShape, node: Node, load: Load, found: Sizing) -> Iterator[tuple[str, str]]:
    memory = found.memory
    yield "model", f"{shape.name}, {shape.data_type.value}, {counted(shape.layer_count, 'layer')}"
    yield "costs", node.profile.description or "from a file"
    yield (
        "device",
        f"{format_size(node.device_memory_bytes)}: {_draft_words(node, found)}weights "
        f"{format_size(memory.weight_bytes)}, "
        f"workspace {format_size(memory.workspace_bytes)}, cache "
        f"{format_size(memory.cache_capacity_bytes)} "
        f"({counted(found.cached_tokens_in_memory, 'token')})",
    )
    if found.placement.on_host != NOTHING_ON_HOST:
        yield "weights", found.placement.reason
    yield (
        "a request",
        f"{counted(load.token_count, 'token')}: {load.cached_tokens:,} cached, "
        f"{load.new_tokens:,} new, {load.generated_tokens:,} generated; "
        f"{format_size(found.resident_request_bytes)} of cache",
    )
    yield "in one step", found.batch.reason
    yield "resident at once", f"{found.resident_count:,}"
    yield "restoring one", restore_words(found.restore)
    yield "first token after", seconds_text(found.restore.predicted_ttft_seconds)
    yield (
        "streamed at once",
        f"{found.streamed_count:,}, {format_size(found.streamed_request_bytes)} of device cache "
        f"each, and {format_size(found.host_request_bytes)} of the arena",
    )
    yield (
        "a streamed step",
        f"{seconds_text(found.lone_step_seconds)} for one alone, "
        f"{seconds_text(found.step_seconds)} for {found.streamed_count} together "
        f"({amount(found.streamed_count / found.step_seconds)} tokens/s)",
    )
    # From an encoded store no request is streamed unless asked.
    if found.placement.streamed_bytes and not node.encoding.is_lossy:
        yield "weights crossing once", _batch_words(found)
    piece = node.chunk_tokens * shape.kv_bytes_per_token_layer // 2
    yield (
        "a chunk",
        f"{counted(node.chunk_tokens, 'token')}; K of one layer is {format_size(piece)}, and "
        f"copies want {format_size(LEAST_PIECE)} at least (--chunk-tokens)",
    )
    kept = "K, V and X" if found.has_activations else "K and V"
    yield (
        "host memory",
        f"{format_size(found.host_token_bytes)} a token ({kept}, {node.encoding.value}), "
        f"{format_size(found.prefix_bytes)} a cached prefix",
    )
