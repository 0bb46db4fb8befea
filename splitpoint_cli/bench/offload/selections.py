"""`bench offload --select`: decode steps that read by a selection, beside those that read all.

A contender more fetches all chosen rows in each step: it shows how many of them adjacent steps
share, and what fetching differences saves. Imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from splitpoint.errors import FailedPrecondition
from splitpoint.planning.plan import Residency
from splitpoint.residency.selecting import predict_step
from splitpoint.shapes import DataType
from splitpoint_cli.bench.engine import outputs_until_idle, use_worker_kernels
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.offload.engine import OffloadHost, Prompts, Way, make_model
from splitpoint_cli.bench.offload.pooled import load_pooled, pooled_shape
from splitpoint_cli.bench.offload.report import FULL_LOAD, RESIDENT
from splitpoint_cli.bench.offload.selections_report import (
    ANEW,
    SELECTED,
    LengthResults,
    RowSums,
    SelectResults,
    SelectRun,
    SelectWorkload,
)
from splitpoint_cli.bench.texts import beginnings, held_back_files
from splitpoint_cli.models import NamedModel
from worker_service.device.choice import choose_device
from worker_service.engine.engine import Engine
from worker_service.lanes.timeline import StepTimes
from worker_service.model.decoder import Decoder
from worker_service.retrieval.sequence_reads import SequenceReads

# Steps that build screens, and fill the rows.
FIRST_STEPS = 2
WARM_UP_TOKENS = FIRST_STEPS + 3


def run_selections(
    named: NamedModel, workload: SelectWorkload, progress: Progress
) -> SelectResults:
    """Measure each length, with prompts of its own."""
    torch.set_num_threads(workload.threads)
    progress.say("loading weights")
    device, data_type = choose_device(workload.device), DataType(workload.dtype)
    kernels = use_worker_kernels(device, data_type, [named.shape.head_dim])
    model, files = _model_of(named, workload)
    return SelectResults(
        model.shape,
        tuple(
            _measure(model, named.folder, files, length, workload, progress)
            for length in workload.lengths
        ),
        tuple(path.name for path in files),
        kernels,
    )


def _model_of(named: NamedModel, workload: SelectWorkload) -> tuple[Decoder, list[Path]]:
    """Return the model, and the files that its prompts are cut from; none: they are drawn."""
    if named.folder is not None:
        device, data_type = choose_device(workload.device), DataType(workload.dtype)
        model = load_pooled(named.folder, workload.kv_heads, device, data_type)
        return model, [Path(each) for each in workload.text] or held_back_files()
    longest = max(workload.lengths) + workload.new
    shape = replace(
        named.shape,
        layer_count=workload.layers or named.shape.layer_count,
        # Random weights have not learned any context.
        context_length=max(longest, named.shape.context_length),
    )
    if workload.kv_heads is not None:
        shape = pooled_shape(
            replace(shape, kv_head_count=shape.query_head_count), workload.kv_heads
        )
    return make_model(shape, workload.as_offload(shape.name, longest)), []


def _measure(
    model: Decoder,
    folder: Path | None,
    files: list[Path],
    length: int,
    workload: SelectWorkload,
    progress: Progress,
) -> LengthResults:
    prompts: Prompts | None = None
    if folder is not None:
        prompts = beginnings(files, folder, workload.batch, length)
    offload = workload.as_offload(model.shape.name, length)
    with closing(OffloadHost(model, offload, prompts=prompts)) as host:
        progress.say(f"storing prompts of {length:,} tokens")
        host.prefill()
        selecting = Way(selection=workload.select)
        decodes = {
            FULL_LOAD: partial(_decode, host, way=Way()),
            SELECTED: partial(_decode, host, way=selecting),
            ANEW: partial(_decode, host, way=selecting, all_anew=True),
            RESIDENT: partial(_decode, host, way=Way(residency=Residency.RESIDENT)),
        }
        for name in progress.track("warming up", list(decodes)):
            decodes[name](WARM_UP_TOKENS)
        runs: dict[str, list[SelectRun]] = {name: [] for name in decodes}
        for name in progress.rounds("timed runs", decodes, workload.repeats):
            runs[name].append(decodes[name](workload.new))
        chunk = host.store.layout.chunk_tokens
        stored = (length + workload.new // 2) // chunk * chunk
        return LengthResults(
            length,
            {name: tuple(each) for name, each in runs.items()},
            predict_step(model.shape, host.refitted_profile, workload.select, stored),
        )


def _decode(host: OffloadHost, new_tokens: int, *, way: Way, all_anew: bool = False) -> SelectRun:
    """Decode all sequences together; count the steps behind the first ones."""
    engine, names = host.admit(host.prompts, new_tokens, way)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    watched = _Watched(engine, all_anew)
    seconds: list[float] = []
    times: list[StepTimes] = []
    begun: float | None = None
    for output in outputs_until_idle(engine, host.store):
        now = time.perf_counter()
        for finish in output.finishes:
            if finish.selection_off_reason:
                raise FailedPrecondition(
                    f"nothing was selected: {finish.selection_off_reason}", reason="NO_GAIN"
                )
        for event in output.tokens:
            tokens[event.key[0]].append(event.choice.token_id)
        steps = min(len(each) for each in tokens.values())
        if output.ran and engine.last_step is not None and steps > FIRST_STEPS + 1:
            times.append(engine.last_step)
            seconds.append(now - (begun or now))
        if steps:
            watched.step_ended(counts=steps > FIRST_STEPS)
        begun = time.perf_counter()
    rows = watched.rows
    expected = sum(each.loaded_tokens for each in times) * host.shape.kv_bytes_per_token_layer
    return SelectRun(
        step_seconds=tuple(seconds),
        link_bytes=tuple(each.link_bytes for each in times),
        expected_bytes=rows.link_bytes + expected if host.device.type == "cpu" else None,
        rows=rows,
        overlap=watched.overlap,
        tokens=tuple(tuple(tokens[name]) for name in names),
    )


class _Watched:
    """The rows of an engine's sequences, from step to step."""

    def __init__(self, engine: Engine, all_anew: bool) -> None:
        """`all_anew`: forget the rows after each step, so that the next one fetches all."""
        self._engine = engine
        self._all_anew = all_anew
        # All that there were: who has ended keeps its counts.
        self._seen: set[SequenceReads] = set()
        self._before: RowSums | None = None
        self._last = RowSums()
        self._chosen: dict[tuple[tuple[str, int, int], int], torch.Tensor] = {}
        self._shared = self._adjacent = 0

    @property
    def rows(self) -> RowSums:
        """What the counted steps did."""
        if self._before is None:
            return RowSums()
        sums, before = self._last, self._before
        return RowSums(
            sums.chosen - before.chosen,
            sums.fetched - before.fetched,
            sums.read - before.read,
            sums.visible - before.visible,
            sums.link_bytes - before.link_bytes,
        )

    @property
    def overlap(self) -> float | None:
        return self._shared / self._adjacent if self._adjacent else None

    def step_ended(self, *, counts: bool) -> None:
        """Look at the rows; what steps did counts from the first call with `counts` on."""
        running = self._engine.queues.running
        reads = {each.key: each.reads for each in running if each.reads is not None}
        self._seen |= set(reads.values())
        self._last = _sums(self._seen)
        if counts and self._before is None:
            self._before = self._last
        if self._all_anew:
            for key, each in reads.items():
                self._compare(key, each)
                each.forget_rows()

    def _compare(self, key: tuple[str, int, int], reads: SequenceReads) -> None:
        """Count the rows that this step and the one before chose; all that are there."""
        if not reads.is_built:
            return
        for layer in reads.layers:
            chosen = reads.tokens(layer)
            before = self._chosen.get((key, layer))
            if before is not None and chosen.numel():
                for head, other in zip(chosen, before, strict=True):
                    self._shared += int(torch.isin(head, other).sum())
                self._adjacent += chosen.numel()
            if chosen.numel():
                self._chosen[key, layer] = chosen.clone()


def _sums(reads: Iterable[SequenceReads]) -> RowSums:
    sums = RowSums()
    for each in reads:
        counts = each.counts
        sums = sums.plus(
            RowSums(counts.wanted, counts.fetched, counts.read, counts.visible, counts.link_bytes)
        )
    return sums
