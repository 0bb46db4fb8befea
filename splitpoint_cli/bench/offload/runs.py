"""The runs of `bench offload`: rounds of all contenders, a sweep, a changed link.

Rounds alternate the order of contenders. Imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from splitpoint.planning.plan import Residency
from splitpoint.shapes import ModelShape
from splitpoint_cli.bench.offload.costs import BatchCosts
from splitpoint_cli.bench.offload.engine import OffloadHost
from splitpoint_cli.bench.offload.peer import Peer
from splitpoint_cli.bench.offload.report import (
    FULL_LOAD,
    PIPELINED,
    RESIDENT,
    SEQUENTIAL,
    Bound,
    Contender,
    DecodeRun,
    Formula,
    LinkChange,
    OffloadResults,
    OffloadWorkload,
    SweepPoint,
)
from splitpoint_cli.bench.shared.engine_memory import CHUNK_TOKENS
from splitpoint_cli.bench.shared.progress import Progress
from worker_service.startup import choose_device

WARM_UP_TOKENS = 4
SWEEP_POINTS = 9
SWEEP_TOKENS = 6
# The serial run takes longest, and the reference only has to tell which tokens are right.
MOST_REFERENCE_TOKENS = 32

Decode = Callable[[int], DecodeRun]


def peer_of(shape: ModelShape, workload: OffloadWorkload, progress: Progress) -> Peer | None:
    """Return transformers with its offloaded cache; None without a GPU, which it needs."""
    device = choose_device(workload.device)
    if device.type != "cuda":
        return None
    progress.say("building transformers' model")
    return Peer(shape, workload.seed, device)


def run_all(
    shape: ModelShape,
    workload: OffloadWorkload,
    progress: Progress,
    peer: Peer | None,
    trace_file: Path | None = None,
) -> OffloadResults:
    """Measure all that the workload asks for; `trace_file` gets the timeline of our runs."""
    torch.set_num_threads(workload.threads)
    skipped: list[str] = []
    if peer is None:
        skipped.append("transformers' offloaded cache: this peer needs a GPU")
    progress.say("loading weights, measuring costs, making the arena")
    with closing(OffloadHost(shape, workload, peer)) as host:
        progress.say("storing the prompts")
        host.prefill()
        bench = _Bench(host, workload, progress, peer)
        contenders = bench.rounds()
        compute = contenders[RESIDENT].step_seconds
        sweep = bench.sweep(compute) if workload.sweep else ()
        change = None
        if workload.changed_link_factor is not None:
            if host.link is None:
                skipped.append("a changed link: a device's own link has no rate to change")
            else:
                change = bench.changed_link(workload.changed_link_factor)
        if trace_file is not None:
            host.trace.write(trace_file)
        # Half way through its growth, as the median of its steps is.
        grown = host.costs(workload.prompt + workload.new // 2, compute)
        column = grown.column()
        return OffloadResults(
            profile=host.profile,
            reason=bench.reason,
            bound=_bound(grown, bench.split),
            column=Formula(column.split_tokens, column.step_seconds),
            contenders=contenders,
            sweep=sweep,
            change=change,
            peers=tuple(name for name in contenders if name.startswith("transformers")),
            unpredicted="no step of the pipelined split was predicted",
            pinning=host.store.pinning,
            skipped=tuple(skipped),
        )


class _Bench:
    """One host, and the splits its contenders use.

    Attributes:
        split, reason: the planner's choice, and why.
    """

    def __init__(
        self, host: OffloadHost, workload: OffloadWorkload, progress: Progress, peer: Peer | None
    ) -> None:
        self._host = host
        self._workload = workload
        self._progress = progress
        self._peer = peer
        progress.say(f"warming up {RESIDENT}")
        run = host.decode(min(workload.new, WARM_UP_TOKENS), residency=Residency.RESIDENT)
        # What a step computes beside: the planner's choice depends on it.
        compute = statistics.median(step.seconds for step in run.steps)
        costs = host.costs(workload.prompt, compute)
        planned = costs.planned()
        self.split, self.reason = planned.split_tokens, planned.reason
        self._line = planned.line
        self._serial_split = costs.sequential().split_tokens

    def rounds(self) -> dict[str, Contender]:
        """Run all contenders: warm them up, then alternate their order."""
        host, workload = self._host, self._workload
        splits: dict[str, int | None] = {
            FULL_LOAD: 0,
            SEQUENTIAL: self._serial_split,
            PIPELINED: self.split,
            RESIDENT: None,
        }
        decodes: dict[str, Decode] = {
            FULL_LOAD: host.decode,
            SEQUENTIAL: lambda new: host.decode(
                min(new, MOST_REFERENCE_TOKENS),
                split_tokens=self._serial_split,
                overlapped=False,
            ),
            PIPELINED: lambda new: host.decode(new, split_tokens=self.split),
            RESIDENT: lambda new: host.decode(
                min(new, MOST_REFERENCE_TOKENS), residency=Residency.RESIDENT
            ),
        }
        warm_up = min(workload.new, WARM_UP_TOKENS)
        for name in self._progress.track("warming up", (FULL_LOAD, SEQUENTIAL, PIPELINED)):
            decodes[name](warm_up)
        if self._peer is not None:
            self._progress.say("trying transformers' attention implementations")
            peer = self._peer
            peer.choose(host.prompts, warm_up)
            name = f"transformers {peer.cache} {peer.attention}"
            decodes[name] = lambda new: peer.decode(host.prompts, new)
            splits[name] = None
        runs: dict[str, list[DecodeRun]] = {name: [] for name in decodes}
        for name in self._progress.rounds("timed runs", decodes, workload.repeats):
            runs[name].append(decodes[name](workload.new))
        return {name: Contender(splits[name], tuple(each)) for name, each in runs.items()}

    def sweep(self, compute_seconds: float) -> tuple[SweepPoint, ...]:
        """Measure step times over the split, pipelined and serial, beside prediction and bound."""
        workload = self._workload
        tokens = min(workload.new, SWEEP_TOKENS)
        splits = self._swept_splits()
        measured: dict[tuple[int, bool], list[float]] = {
            (split, overlapped): [] for split in splits for overlapped in (True, False)
        }
        for split, overlapped in self._progress.rounds("sweep", measured, workload.repeats):
            run = self._host.decode(tokens, split_tokens=split, overlapped=overlapped)
            measured[split, overlapped] += [step.seconds for step in run.steps]
        costs = self._host.costs(workload.prompt, compute_seconds)
        return tuple(
            SweepPoint(
                split_tokens=split,
                seconds=statistics.median(measured[split, True]),
                sequential_seconds=statistics.median(measured[split, False]),
                predicted_seconds=costs.step_seconds(split),
                bound_seconds=_bound(costs, split).seconds,
            )
            for split in splits
        )

    def changed_link(self, factor: float) -> LinkChange:
        """Run with a link whose rate changes in the middle; restore its rate afterwards.

        The split follows the plan's line, which the engine draws anew as it learns.
        """
        link = self._host.link
        if link is None:
            raise RuntimeError("only an emulated link has a rate to change")
        self._progress.say(f"a link that changes to {factor:g} of its rate")
        before, middle = link.bytes_per_second, self._workload.new // 2

        def change(step_count: int) -> None:
            if step_count == middle:
                link.bytes_per_second = before * factor

        try:
            run = self._host.decode(
                self._workload.new,
                split_tokens=self.split,
                split_line=self._line,
                on_step=change,
            )
        finally:
            link.bytes_per_second = before
        return LinkChange(factor, middle, run.steps)

    def _swept_splits(self) -> list[int]:
        """Return whole chunks from nothing to everything, and the planner's choice."""
        prompt = self._workload.prompt
        if not self._host.has_activations:
            return [0]
        even = (prompt * index // (SWEEP_POINTS - 1) for index in range(SWEEP_POINTS))
        chunks = {min(prompt, round(each / CHUNK_TOKENS) * CHUNK_TOKENS) for each in even}
        return sorted(chunks | {self.split, prompt})


def _bound(costs: BatchCosts, split: int) -> Bound:
    link, compute = costs.bound(split)
    return Bound(split, link, compute, "the resident decode, and the profile's rebuild")
