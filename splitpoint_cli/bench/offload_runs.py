"""The runs of `bench offload`, in its two forms; contenders take turns.

`run_all` loads in several orders; `run_compared` drafts and reads by selections, beside H2O from
host memory. Imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, OnHost
from splitpoint.planning.weight_schedule import WeightOrder
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import DataType, Encoding, ModelShape
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint_cli.bench.calibration import LENGTH, RATE, TOKENS, calibration_passages
from splitpoint_cli.bench.engine import make_model, use_worker_kernels
from splitpoint_cli.bench.harness import CHUNK_TOKENS, Progress, importing_peer
from splitpoint_cli.bench.heavy_hitters import HeavyHitterHost, KeptTokens
from splitpoint_cli.bench.offload_host import ON_DEVICE, STREAMED, OffloadHost, Way
from splitpoint_cli.bench.offload_report import (
    COARSE,
    ENCODED,
    FULL_LOAD,
    KVPR,
    PEER,
    PIPELINED,
    RESIDENT,
    SEQUENTIAL,
    Contender,
    OffloadResults,
    OffloadSample,
    OffloadWorkload,
    Runs,
    SweepPoint,
)
from splitpoint_cli.bench.pooled import load_pooled, pooled_shape
from splitpoint_cli.bench.texts import Prompts, beginnings, held_back_files, random_prompts
from splitpoint_cli.models import NamedModel
from worker_service.device.choice import choose_device
from worker_service.distillation.calibrate import calibrate
from worker_service.distillation.training import Training
from worker_service.model.decoder import Decoder
from worker_service.retrieval.selector import ScreenSource
from worker_service.selection.artifacts import Artifacts

if TYPE_CHECKING:
    from splitpoint_cli.bench.limits import Peer

WARM_UP_TOKENS = 4
SWEEP_POINTS = 9
SWEEP_TOKENS = 6
# The serial run takes longest, and the reference only has to tell which tokens are right.
MOST_REFERENCE_TOKENS = 32
DRAFT_WARM_UP_TOKENS = 8
# Steps of a selection that build screens, and fill the rows.
FIRST_STEPS = 2


# -- loading ------------------------------------------------------------------------------


def peer_of(shape: ModelShape, workload: OffloadWorkload, progress: Progress) -> Peer | None:
    """Return transformers with its offloaded cache; None without a GPU, which it needs.

    Raises FailedPrecondition if transformers is not installed.
    """
    device = choose_device(workload.device)
    if device.type != "cuda":
        return None
    with importing_peer():
        from splitpoint_cli.bench.limits import Peer
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
    kernels = _use_kernels(workload, shape)
    model = model_of(shape, workload, peer)
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
        if trace_file is not None:
            host.trace.write(trace_file)
        # Half way through its growth, as the median of its steps is.
        grown = host.costs(workload.prompt + workload.new // 2, compute)
        return OffloadResults(
            profile=host.profile,
            reason=bench.reason,
            bound=grown.bound(bench.split),
            contenders=contenders,
            sweep=sweep,
            pinning=host.store.pinning,
            kernels=kernels,
            skipped=tuple(skipped),
        )


def model_of(shape: ModelShape, workload: OffloadWorkload, weights: Peer | None = None) -> Decoder:
    """Return the model of a workload: a peer's weights, or random ones from the seed."""
    on_host = NOTHING_ON_HOST
    if workload.weights_on_host:
        on_host = OnHost(tuple(range(shape.layer_count)), table=True, head=True)
    return make_model(
        replace(shape, data_type=DataType(workload.dtype)),
        workload.seed,
        choose_device(workload.device),
        weights=weights,
        on_host=on_host,
    )


def _use_kernels(workload: OffloadWorkload, shape: ModelShape) -> str:
    device, data_type = choose_device(workload.device), DataType(workload.dtype)
    return use_worker_kernels(device, data_type, [shape.head_dim])


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
        self._warm_up = min(workload.new, WARM_UP_TOKENS)
        progress.say(f"warming up {RESIDENT}")
        run = host.decode(self._warm_up, ON_DEVICE)
        # What a step computes beside: the planner's choice depends on it.
        compute = run.median_step
        # As a worker, it plans by what its own steps taught it.
        for split in (host.costs(workload.prompt, compute).planned().split_tokens, 0):
            host.decode(self._warm_up, Way(split_tokens=split))
        costs = host.costs(workload.prompt, compute)
        planned = costs.planned()
        self.split, self.reason = planned.split_tokens, planned.reason
        self._serial_split = costs.best(Schedule.SERIAL).split_tokens
        self._kvpr_split = costs.best(Schedule.COLUMN).split_tokens

    def rounds(self) -> dict[str, Contender]:
        """Run all contenders: warm them up, then alternate their order."""
        host, new = self._host, self._workload.new
        ways = self._ways()
        decodes = {}
        for name in self._progress.track("warming up", list(ways)):
            decode = partial(self._encoded.get(name, host).decode, way=ways[name])
            decode(self._warm_up)
            is_reference = name in (SEQUENTIAL, RESIDENT)
            decodes[name] = partial(
                decode, min(new, MOST_REFERENCE_TOKENS) if is_reference else new
            )
        splits = {
            name: None if way.residency is Residency.RESIDENT else way.split_tokens
            for name, way in ways.items()
        }
        if self._peer is not None:
            self._progress.say("trying transformers' attention implementations")
            peer = self._peer
            peer.choose(host.prompts, self._warm_up)
            name = f"{PEER}{peer.cache} {peer.attention}"
            decodes[name] = partial(peer.decode, host.prompts, new)
        runs = self._progress.in_turns("timed runs", decodes, self._workload.repeats)
        return {name: Contender(splits.get(name), tuple(each)) for name, each in runs.items()}

    def _ways(self) -> dict[str, Way]:
        """Return how each contender decodes."""
        ours = Way(split_tokens=self.split)
        ways = {
            FULL_LOAD: STREAMED,
            SEQUENTIAL: Way(Schedule.SERIAL, split_tokens=self._serial_split),
            KVPR: Way(Schedule.COLUMN, split_tokens=self._kvpr_split),
            PIPELINED: ours,
            **dict.fromkeys(self._encoded, ours),
            RESIDENT: ON_DEVICE,
        }
        if self._workload.weights_on_host:
            ways[COARSE] = replace(ours, weights=WeightOrder.COARSE)
        return ways

    def sweep(self, compute_seconds: float) -> tuple[SweepPoint, ...]:
        """Measure step times over the split in each order, beside prediction and bound."""
        workload = self._workload
        tokens = min(workload.new, SWEEP_TOKENS)
        splits = self._swept_splits()
        decodes = {
            (split, order): partial(self._host.decode, tokens, Way(order, split_tokens=split))
            for split in splits
            for order in (Schedule.PIPELINED, Schedule.COLUMN, Schedule.SERIAL)
        }
        runs = self._progress.in_turns("sweep", decodes, workload.repeats)
        seconds = {place: Contender(None, each).step_seconds for place, each in runs.items()}
        costs = self._host.costs(workload.prompt, compute_seconds)
        return tuple(
            SweepPoint(
                split_tokens=split,
                seconds=seconds[split, Schedule.PIPELINED],
                kvpr_seconds=seconds[split, Schedule.COLUMN],
                sequential_seconds=seconds[split, Schedule.SERIAL],
                predicted_seconds=costs.step_seconds(split),
                bound_seconds=max(costs.bound(split)),
            )
            for split in splits
        )

    def _swept_splits(self) -> list[int]:
        """Return whole chunks from nothing to everything, and the planner's choice."""
        prompt = self._workload.prompt
        if not self._host.has_activations:
            return [0]
        even = (prompt * index // (SWEEP_POINTS - 1) for index in range(SWEEP_POINTS))
        chunks = {min(prompt, round(each / CHUNK_TOKENS) * CHUNK_TOKENS) for each in even}
        return sorted(chunks | {self.split, prompt})


# -- drafts and selections ----------------------------------------------------------------


def run_compared(
    named: NamedModel, workload: OffloadWorkload, progress: Progress
) -> tuple[dict[int, dict[str, Runs]], dict[str, Any]]:
    """Measure drafts and selections beside full load, H2O from host memory among them.

    Factors are made first, from text that no prompt is cut from, as `splitpoint calibrate` makes
    them; of random weights from random tokens. Returns the runs by length, and facts of the report.
    """
    torch.set_num_threads(workload.threads)
    progress.say("loading weights")
    kernels = _use_kernels(workload, named.shape)
    shape, files = named.shape, list[Path]()
    if named.folder is None:
        shape = _random_shape(shape, workload)
        model = model_of(shape, workload)
    else:
        device, data_type = choose_device(workload.device), DataType(workload.dtype)
        model = load_pooled(named.folder, workload.kv_heads, device, data_type)
        files = [Path(each) for each in workload.text] or held_back_files()
    # One of each method, whose columns are alike.
    by_method = {each.method: each for each in workload.compared if each.method.is_calibrated}
    factors = {
        method: _factors(model, named.folder, each, workload, progress)
        for method, each in by_method.items()
    }
    source = ScreenSource(model.config, factors)
    runs = {
        length: _compare(
            model, source, named.folder, files, replace(workload, prompt=length), progress
        )
        for length in workload.lengths
    }
    return runs, {
        "text": [path.name for path in files],
        "weights": "checkpoint" if files else "random",
        "layers": model.shape.layer_count,
        "kv_heads": model.shape.kv_head_count,
        "query_heads": model.shape.query_head_count,
        "heads_are_averaged": model.shape.kv_head_count < shape.kv_head_count,
        "kv_bytes_per_token": model.shape.kv_bytes_per_token,
        "kernels": kernels,
    }


def _random_shape(shape: ModelShape, workload: OffloadWorkload) -> ModelShape:
    """Return a built-in shape with the workload's layers and KV heads."""
    longest = max(workload.lengths) + workload.new
    shape = replace(
        shape,
        layer_count=workload.layers or shape.layer_count,
        # Random weights have not learned any context.
        context_length=max(longest, shape.context_length),
    )
    if workload.kv_heads is None:
        return shape
    return pooled_shape(replace(shape, kv_head_count=shape.query_head_count), workload.kv_heads)


def _factors(
    model: Decoder,
    folder: Path | None,
    selection: Selection,
    workload: OffloadWorkload,
    progress: Progress,
) -> Artifacts:
    """Return the factors of a selection's method, by the settings of `splitpoint calibrate`.

    MAPLE's second stage, which changes a model, is left out.
    """
    length = min(LENGTH, model.shape.context_length)
    if folder is None:
        count = -(-TOKENS // length)
        passages = random_prompts(model.shape.vocabulary_size, count, length, workload.seed + 1)
    else:
        passages = calibration_passages(folder, None, TOKENS, length, workload.seed)
    made, _ = calibrate(
        model,
        selection.method,
        passages,
        rank=selection.kept_columns(model.shape.head_dim),
        training=Training(rate=RATE, seed=workload.seed),
        track=progress.track,
        say=progress.say,
    )
    return made


def _compare(
    model: Decoder,
    source: ScreenSource,
    folder: Path | None,
    files: Sequence[Path],
    workload: OffloadWorkload,
    progress: Progress,
) -> dict[str, Runs]:
    """Return the runs of each contender with prompts of one length.

    Each round of a checkpoint has prompts of its own.
    """
    if folder is None:
        size = model.shape.vocabulary_size
        prompts = random_prompts(size, workload.batch, workload.prompt, workload.seed)
    else:
        count = workload.batch * workload.repeats
        prompts = beginnings(files, folder, count, workload.prompt)
    make = partial(
        OffloadHost,
        model,
        workload,
        prompts=prompts,
        screens_of=source.screens,
        stores_inputs=any(each.method.keeps_inputs for each in workload.compared),
    )
    with ExitStack() as stack:
        plain = stack.enter_context(closing(make()))
        encoded = {
            name: stack.enter_context(closing(make(encoding=Encoding(name), link=plain.link)))
            for name in workload.kv_encodings
        }
        hosts, drafting, drafts = [plain, *encoded.values()], plain, PLAIN
        if workload.drafts is not DraftMethod.OFF:
            drafts = Speculation(workload.drafts, workload.draft_tokens)
            drafting = stack.enter_context(closing(make(link=plain.link, drafts=workload.drafts)))
            hosts.append(drafting)
        progress.say(f"storing prompts of {workload.prompt:,} tokens")
        for host in hosts:
            host.prefill()
        decodes: dict[str, Callable[..., OffloadSample]] = {
            FULL_LOAD: partial(plain.decode, way=STREAMED)
        }
        approximate = set[str]()
        if workload.speculate is not None:
            decode = partial(drafting.decode, way=STREAMED, speculation=drafts)
            decodes[str(workload.speculate)] = decode
        for selection in workload.compared:
            name, way = str(selection), Way(selection=selection)
            if selection.verify:
                decodes[name] = partial(drafting.decode, way=way, speculation=drafts)
                continue
            approximate.add(name)
            if selection.method is SelectionMethod.H2O:
                kept = stack.enter_context(closing(HeavyHitterHost(model, selection, plain.link)))
                progress.say(f"prompts of {selection}")
                left = {each: kept.prefill(each, workload.new) for each in prompts}
                decodes[name] = partial(_decode_kept, kept, left)
                continue
            decodes[name] = partial(plain.decode, way=way)
            for encoding, host in encoded.items():
                decodes[f"{name}, {encoding}"] = partial(host.decode, way=way)
                approximate.add(f"{name}, {encoding}")
        decodes[RESIDENT] = partial(plain.decode, way=ON_DEVICE)
        turns = {}
        for name in progress.track("warming up", list(decodes)):
            warm_up = min(workload.new, DRAFT_WARM_UP_TOKENS)
            decodes[name](warm_up, prompts=prompts[: workload.batch])
            decode = partial(decodes[name], workload.new)
            turns[name] = _in_batches(decode, prompts, workload.batch)
        runs = progress.in_turns("timed runs", turns, workload.repeats)
        # Steps that build screens and fill rows, or read what they left. Verified drafts have few
        # steps, and each reads everything.
        return {
            name: tuple(replace(run, steps=run.steps[FIRST_STEPS:]) for run in each)
            if name in approximate
            else each
            for name, each in runs.items()
        }


def _in_batches(
    decode: Callable[..., OffloadSample], prompts: Prompts, batch: int
) -> Callable[[], OffloadSample]:
    """Return a contender that decodes the next prompts each time, again and again."""
    batches = cycle(prompts[first : first + batch] for first in range(0, len(prompts), batch))
    return lambda: decode(prompts=next(batches))


def _decode_kept(
    host: HeavyHitterHost,
    left: Mapping[tuple[int, ...], tuple[list[KeptTokens], int]],
    new_tokens: int,
    *,
    prompts: Prompts,
) -> OffloadSample:
    return host.decode(new_tokens, [left[each] for each in prompts], prompts)
