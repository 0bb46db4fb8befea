"""The runs of `bench offload`: rounds of all contenders, a sweep, a changed link.

Rounds alternate the order of contenders. Imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_schedule import WeightOrder
from splitpoint.shapes import DataType, Encoding, ModelShape
from splitpoint_cli.bench.engine import use_worker_kernels
from splitpoint_cli.bench.harness import CHUNK_TOKENS, Progress
from splitpoint_cli.bench.offload.costs import BatchCosts
from splitpoint_cli.bench.offload.engine import OffloadHost, Way, make_model
from splitpoint_cli.bench.offload.peer import Peer
from splitpoint_cli.bench.offload.report import (
    COARSE,
    ENCODED,
    FULL_LOAD,
    KVPR,
    PIPELINED,
    RESIDENT,
    SEQUENTIAL,
    Bound,
    Contender,
    DecodeRun,
    LinkChange,
    OffloadResults,
    OffloadWorkload,
    SweepPoint,
)
from worker_service.device.choice import choose_device

WARM_UP_TOKENS = 4
SWEEP_POINTS = 9
SWEEP_TOKENS = 6
# The serial run takes longest, and the reference only has to tell which tokens are right.
MOST_REFERENCE_TOKENS = 32


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
    kernels = use_worker_kernels(
        choose_device(workload.device), DataType(workload.dtype), [shape.head_dim]
    )
    model = make_model(shape, workload, peer)
    with ExitStack() as stack:
        host = stack.enter_context(closing(OffloadHost(model, workload)))
        encoded = {
            f"{ENCODED}{name}": stack.enter_context(
                closing(OffloadHost(model, workload, Encoding(name), host.link))
            )
            for name in workload.kv_encodings
        }
        progress.say("storing the prompts")
        for each in (host, *encoded.values()):
            each.prefill()
        bench = _Bench(host, encoded, workload, progress, peer)
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
        return OffloadResults(
            profile=host.profile,
            reason=bench.reason,
            bound=_bound(grown, bench.split),
            contenders=contenders,
            sweep=sweep,
            change=change,
            peers=tuple(name for name in contenders if name.startswith("transformers")),
            unpredicted="no step of the pipelined split was predicted",
            pinning=host.store.pinning,
            kernels=kernels,
            skipped=tuple(skipped),
        )


class _Bench:
    """One host, those of other encodings by contender, and the splits they use.

    Attributes:
        split, reason: the planner's choice, and why.
    """

    def __init__(
        self,
        host: OffloadHost,
        encoded: Mapping[str, OffloadHost],
        workload: OffloadWorkload,
        progress: Progress,
        peer: Peer | None,
    ) -> None:
        self._host = host
        self._encoded = encoded
        self._workload = workload
        self._progress = progress
        self._peer = peer
        progress.say(f"warming up {RESIDENT}")
        run = host.decode(min(workload.new, WARM_UP_TOKENS), Way(residency=Residency.RESIDENT))
        # What a step computes beside: the planner's choice depends on it.
        compute = statistics.median(step.seconds for step in run.steps)
        # As a worker, it plans by what its own steps taught it.
        for split in (host.costs(workload.prompt, compute).planned().split_tokens, 0):
            host.decode(min(workload.new, WARM_UP_TOKENS), Way(split_tokens=split))
        costs = host.costs(workload.prompt, compute)
        planned = costs.planned()
        self.split, self.reason = planned.split_tokens, planned.reason
        self._line = planned.line
        self._serial_split = costs.best(Schedule.SERIAL).split_tokens
        self._kvpr_split = costs.best(Schedule.COLUMN).split_tokens

    def rounds(self) -> dict[str, Contender]:
        """Run all contenders: warm them up, then alternate their order."""
        host, workload = self._host, self._workload
        ways = self._ways()
        decodes = {
            name: partial(self._encoded.get(name, host).decode, way=way)
            for name, way in ways.items()
        }
        warm_up = min(workload.new, WARM_UP_TOKENS)
        for name in self._progress.track("warming up", list(ways)):
            decodes[name](warm_up)
        splits = {
            name: None if way.residency is Residency.RESIDENT else way.split_tokens
            for name, way in ways.items()
        }
        if self._peer is not None:
            self._progress.say("trying transformers' attention implementations")
            peer = self._peer
            peer.choose(host.prompts, warm_up)
            name = f"transformers {peer.cache} {peer.attention}"
            decodes[name] = partial(peer.decode, host.prompts)
            splits[name] = None
        runs: dict[str, list[DecodeRun]] = {name: [] for name in decodes}
        for name in self._progress.rounds("timed runs", decodes, workload.repeats):
            new = workload.new
            if name in (SEQUENTIAL, RESIDENT):
                new = min(new, MOST_REFERENCE_TOKENS)
            runs[name].append(decodes[name](new))
        return {name: Contender(splits.get(name), tuple(each)) for name, each in runs.items()}

    def _ways(self) -> dict[str, Way]:
        """Return how each contender decodes."""
        ours = Way(split_tokens=self.split)
        ways = {
            FULL_LOAD: Way(),
            SEQUENTIAL: Way(Schedule.SERIAL, split_tokens=self._serial_split),
            KVPR: Way(Schedule.COLUMN, split_tokens=self._kvpr_split),
            PIPELINED: ours,
            **dict.fromkeys(self._encoded, ours),
            RESIDENT: Way(residency=Residency.RESIDENT),
        }
        if self._workload.weights_on_host:
            ways[COARSE] = replace(ours, weights=WeightOrder.COARSE)
        return ways

    def sweep(self, compute_seconds: float) -> tuple[SweepPoint, ...]:
        """Measure step times over the split in each order, beside prediction and bound."""
        workload = self._workload
        tokens = min(workload.new, SWEEP_TOKENS)
        splits = self._swept_splits()
        orders = (Schedule.PIPELINED, Schedule.COLUMN, Schedule.SERIAL)
        measured: dict[tuple[int, Schedule], list[float]] = {
            (split, order): [] for split in splits for order in orders
        }
        for split, order in self._progress.rounds("sweep", measured, workload.repeats):
            run = self._host.decode(tokens, Way(order, split_tokens=split))
            measured[split, order] += [step.seconds for step in run.steps]
        costs = self._host.costs(workload.prompt, compute_seconds)
        return tuple(
            SweepPoint(
                split_tokens=split,
                seconds=statistics.median(measured[split, Schedule.PIPELINED]),
                kvpr_seconds=statistics.median(measured[split, Schedule.COLUMN]),
                sequential_seconds=statistics.median(measured[split, Schedule.SERIAL]),
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
                Way(split_tokens=self.split, split_line=self._line),
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
