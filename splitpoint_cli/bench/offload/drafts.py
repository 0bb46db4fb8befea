"""`bench offload --speculate`: streamed decoding with drafts beside plain streaming.

Both decode the same prompts, with the checkpoint's own weights: random ones have no text
that could be guessed. Imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import torch

from splitpoint.planning.plan import Residency
from splitpoint.shapes import DataType, ModelShape
from splitpoint.speculation import PLAIN, Speculation
from splitpoint_cli.bench.engine import outputs_until_idle, use_worker_kernels
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.offload.drafts_report import (
    PLAIN_STREAMING,
    DraftResults,
    DraftRun,
    DraftWorkload,
)
from splitpoint_cli.bench.offload.engine import OffloadHost, Prompts, Way
from splitpoint_cli.bench.offload.pooled import load_pooled
from splitpoint_cli.bench.offload.report import RESIDENT
from splitpoint_cli.bench.texts import beginnings, held_back_files
from worker_service.device.choice import choose_device

WARM_UP_TOKENS = 8
STREAMED = Way()
ON_DEVICE = Way(residency=Residency.RESIDENT)


def run_drafts(
    folder: Path, shape: ModelShape, workload: DraftWorkload, progress: Progress
) -> DraftResults:
    """Measure rounds of plain streaming and of drafts, each round with prompts of its own.

    `shape`: the checkpoint's own, with all its KV heads.
    """
    torch.set_num_threads(workload.threads)
    progress.say("loading weights, cutting prompts")
    device, data_type = choose_device(workload.device), DataType(workload.dtype)
    kernels = use_worker_kernels(device, data_type, [shape.head_dim])
    model = load_pooled(folder, workload.kv_heads, device, data_type)
    count = workload.batch * workload.repeats
    files = [Path(each) for each in workload.text] or held_back_files()
    prompts = beginnings(files, folder, count, workload.prompt)
    offload = workload.as_offload(model.shape.name)
    with (
        closing(OffloadHost(model, offload, prompts=prompts)) as plain,
        closing(
            OffloadHost(model, offload, link=plain.link, prompts=prompts, drafts=workload.method)
        ) as drafting,
    ):
        progress.say("storing the prompts")
        for host in (plain, drafting):
            host.prefill()
        speculation = Speculation(
            method=workload.method, num_speculative_tokens=workload.draft_tokens
        )
        ways = {
            PLAIN_STREAMING: (plain, STREAMED, PLAIN),
            workload.method.value: (drafting, Way(selection=workload.select), speculation),
            RESIDENT: (plain, ON_DEVICE, PLAIN),
        }
        runs: dict[str, list[DraftRun]] = {name: [] for name in ways}
        for name, (host, way, chosen) in ways.items():
            progress.say(f"warming up {name}")
            decode(host, prompts[: workload.batch], WARM_UP_TOKENS, way, chosen)
        for name in progress.rounds("timed runs", ways, workload.repeats):
            first = len(runs[name]) * workload.batch
            host, way, chosen = ways[name]
            batch = prompts[first : first + workload.batch]
            runs[name].append(decode(host, batch, workload.new, way, chosen))
        memory = drafting.memory
        return DraftResults(
            runs={name: tuple(each) for name, each in runs.items()},
            window_tokens=memory.window_page_count * drafting.store.layout.chunk_tokens,
            sink_tokens=memory.sink_page_count * drafting.store.layout.chunk_tokens,
            kv_head_count=model.shape.kv_head_count,
            checkpoint_kv_head_count=shape.kv_head_count,
            query_head_count=model.shape.query_head_count,
            kv_bytes_per_token=model.shape.kv_bytes_per_token,
            files=tuple(path.name for path in files),
            kernels=kernels,
        )


def decode(
    host: OffloadHost, prompts: Prompts, new_tokens: int, way: Way, speculation: Speculation
) -> DraftRun:
    """Decode the stored prompts together; count from when each has its first token."""
    engine, names = host.admit(prompts, new_tokens, way, speculation)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    begun: float | None = None
    ended = 0.0
    counted = pulls = link_bytes = drafted = accepted = 0
    for output in outputs_until_idle(engine, host.store):
        for event in output.tokens:
            tokens[event.key[0]].append(event.choice.token_id)
        if begun is None:
            if all(tokens.values()):
                begun = time.perf_counter()
            continue
        if output.tokens:
            ended = time.perf_counter()
            counted += len(output.tokens)
            pulls += len({event.key for event in output.tokens})
        if output.ran and engine.last_step is not None:
            link_bytes += engine.last_step.link_bytes
        drafted += sum(each.drafted for each in output.drafts)
        accepted += sum(each.accepted for each in output.drafts)
    if begun is None:
        raise RuntimeError("a sequence has no token")
    return DraftRun(
        seconds=ended - begun,
        token_count=counted,
        pull_count=pulls,
        link_bytes=link_bytes,
        drafted=drafted,
        accepted=accepted,
        tokens=tuple(tuple(tokens[name]) for name in names),
    )
