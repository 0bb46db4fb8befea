"""The runs of `bench offload`, in its forms; contenders take turns.

`run_all` loads in several orders, `run_drafts` drafts, `run_selections` reads by a selection, and
`run_compared` by several, beside H2O from host memory.
Imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, OnHost
from splitpoint.planning.weight_schedule import WeightOrder
from splitpoint.residency.selecting import predict_step
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import DataType, Encoding, ModelShape
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint_cli.bench.calibration import LENGTH, RATE, TOKENS, calibration_passages
from splitpoint_cli.bench.engine import make_model, use_worker_kernels
from splitpoint_cli.bench.harness import CHUNK_TOKENS, Progress, importing_peer
from splitpoint_cli.bench.heavy_hitters import HeavyHitterHost, KeptTokens
from splitpoint_cli.bench.offload_host import ON_DEVICE, STREAMED, OffloadHost, Way
from splitpoint_cli.bench.offload_report import (
    ANEW,
    COARSE,
    ENCODED,
    FULL_LOAD,
    KVPR,
    NO_ROWS,
    PEER,
    PIPELINED,
    PLAIN_STREAMING,
    RESIDENT,
    SELECTED,
    SEQUENTIAL,
    Contender,
    LengthResults,
    LinkChange,
    OffloadResults,
    OffloadSample,
    OffloadWorkload,
    RowSums,
    Runs,
    SweepPoint,
)
from splitpoint_cli.bench.pooled import load_pooled, pooled_shape
from splitpoint_cli.bench.texts import Prompts, beginnings, held_back_files, random_prompts
from splitpoint_cli.models import NamedModel
from worker_service.device.choice import choose_device
from worker_service.distillation.calibrate import calibrate
from worker_service.distillation.training import Training
from worker_service.engine.engine import Engine
from worker_service.model.decoder import Decoder
from worker_service.retrieval.selector import ScreenSource
from worker_service.retrieval.sequence_reads import SequenceReads
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
SELECT_WARM_UP_TOKENS = FIRST_STEPS + 3


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
            bound=grown.bound(bench.split),
            contenders=contenders,
            sweep=sweep,
            change=change,
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
        self._line = planned.line
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

    def changed_link(self, factor: float) -> LinkChange:
        """Run with a link whose rate changes in the middle; restore its rate afterwards.

        The split follows the plan's line, which the engine draws anew as it learns.
        """
        link = self._host.link
        if link is None:
            raise RuntimeError("only an emulated link has a rate to change")
        self._progress.say(f"a link that changes to {factor:g} of its rate")
        before, middle = link.bytes_per_second, self._workload.new // 2

        def change(token_count: int) -> None:
            # The first token is no step.
            if token_count - 1 == middle:
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


# -- drafts -------------------------------------------------------------------------------


def run_drafts(
    folder: Path, shape: ModelShape, workload: OffloadWorkload, progress: Progress
) -> tuple[dict[str, Runs], dict[str, Any]]:
    """Measure plain streaming and drafts, each round with prompts of its own.

    Both decode with the checkpoint's own weights: random ones have no text that could be guessed.
    `shape`: the checkpoint's own, with all its KV heads. Returns the runs, and facts of the report.
    """
    torch.set_num_threads(workload.threads)
    progress.say("loading weights, cutting prompts")
    kernels = _use_kernels(workload, shape)
    model, files = _checkpoint_of(folder, workload)
    batch, method = workload.batch, workload.speculate
    prompts = beginnings(files, folder, batch * workload.repeats, workload.prompt)
    if method is None:
        raise RuntimeError("the workload has no drafts")
    with (
        closing(OffloadHost(model, workload, prompts=prompts)) as plain,
        closing(
            OffloadHost(model, workload, link=plain.link, prompts=prompts, drafts=method)
        ) as drafting,
    ):
        progress.say("storing the prompts")
        for host in (plain, drafting):
            host.prefill()
        speculation = Speculation(method=method, num_speculative_tokens=workload.draft_tokens)
        ways = {
            PLAIN_STREAMING: (plain, STREAMED, PLAIN),
            method.value: (drafting, Way(selection=workload.select), speculation),
            RESIDENT: (plain, ON_DEVICE, PLAIN),
        }
        decodes = {}
        for name, (host, way, chosen) in ways.items():
            progress.say(f"warming up {name}")
            decode = partial(host.decode, way=way, speculation=chosen)
            decode(DRAFT_WARM_UP_TOKENS, prompts=prompts[:batch])
            decodes[name] = _in_batches(partial(decode, workload.new), prompts, batch)
        runs = progress.in_turns("timed runs", decodes, workload.repeats)
        memory, chunk = drafting.memory, drafting.store.layout.chunk_tokens
        window = {
            "window_tokens": memory.window_page_count * chunk,
            "sink_tokens": memory.sink_page_count * chunk,
        }
        facts = _model_facts(model.shape, shape.kv_head_count, files, kernels)
        return {name: tuple(each) for name, each in runs.items()}, {**window, **facts}


def _in_batches(
    decode: Callable[..., OffloadSample], prompts: Prompts, batch: int
) -> Callable[[], OffloadSample]:
    """Return a contender that decodes the next prompts each time."""
    batches = (prompts[first : first + batch] for first in range(0, len(prompts), batch))
    return lambda: decode(prompts=next(batches))


def _checkpoint_of(folder: Path, workload: OffloadWorkload) -> tuple[Decoder, list[Path]]:
    """Return a checkpoint's model, and the files that its prompts are cut from."""
    device, data_type = choose_device(workload.device), DataType(workload.dtype)
    model = load_pooled(folder, workload.kv_heads, device, data_type)
    return model, [Path(each) for each in workload.text] or held_back_files()


def _model_facts(
    shape: ModelShape, kv_head_count: int, files: Sequence[Path], kernels: str
) -> dict[str, Any]:
    """Return what a report says of a model; `kv_head_count`: before any heads were averaged."""
    return {
        "text": [path.name for path in files],
        "weights": "checkpoint" if files else "random",
        "layers": shape.layer_count,
        "kv_heads": shape.kv_head_count,
        "query_heads": shape.query_head_count,
        "heads_are_averaged": shape.kv_head_count < kv_head_count,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "kernels": kernels,
    }


# -- selections ---------------------------------------------------------------------------


def run_selections(
    named: NamedModel, workload: OffloadWorkload, progress: Progress
) -> tuple[list[LengthResults], dict[str, Any]]:
    """Measure each length, with prompts of its own; return facts of the report, too.

    A contender more fetches all chosen rows in each step: it shows how many of them adjacent steps
    share, and what fetching differences saves.
    """
    loaded = _load(named, workload, progress)
    lengths = [
        _measure(
            loaded.model, named.folder, loaded.files, replace(workload, prompt=length), progress
        )
        for length in workload.lengths
    ]
    return lengths, loaded.facts


class _Loaded(NamedTuple):
    """A model, the files that its prompts are cut from, and facts of the report."""

    model: Decoder
    files: list[Path]
    facts: dict[str, Any]


def _load(named: NamedModel, workload: OffloadWorkload, progress: Progress) -> _Loaded:
    """Return a checkpoint's model, or a built-in shape's with random weights."""
    torch.set_num_threads(workload.threads)
    progress.say("loading weights")
    kernels = _use_kernels(workload, named.shape)
    shape, files = named.shape, list[Path]()
    if named.folder is None:
        shape = _random_shape(shape, workload)
        model = model_of(shape, workload)
    else:
        model, files = _checkpoint_of(named.folder, workload)
    return _Loaded(model, files, _model_facts(model.shape, shape.kv_head_count, files, kernels))


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


def _measure(
    model: Decoder,
    folder: Path | None,
    files: Sequence[Path],
    workload: OffloadWorkload,
    progress: Progress,
) -> LengthResults:
    prompts: Prompts | None = None
    if folder is not None:
        prompts = beginnings(files, folder, workload.batch, workload.prompt)
    with ExitStack() as hosts:
        host = hosts.enter_context(closing(OffloadHost(model, workload, prompts=prompts)))
        selecting = Way(selection=workload.select)
        ways = {
            FULL_LOAD: (host, STREAMED),
            SELECTED: (host, selecting),
            ANEW: (host, selecting),
            RESIDENT: (host, ON_DEVICE),
        }
        for name in workload.kv_encodings:
            other = OffloadHost(model, workload, Encoding(name), host.link, host.prompts)
            ways[f"{SELECTED}, {name}"] = hosts.enter_context(closing(other)), selecting
        progress.say(f"storing prompts of {workload.prompt:,} tokens")
        for each in dict.fromkeys(each for each, _ in ways.values()):
            each.prefill()
        decodes = {}
        for name in progress.track("warming up", list(ways)):
            here, way = ways[name]
            decode = partial(_decode, here, way=way, all_anew=name == ANEW)
            decode(SELECT_WARM_UP_TOKENS)
            decodes[name] = partial(decode, workload.new)
        runs = progress.in_turns("timed runs", decodes, workload.repeats)
        chunk = host.store.layout.chunk_tokens
        stored = (workload.prompt + workload.new // 2) // chunk * chunk
        predicted = predict_step(model.shape, host.refitted_profile, workload.select, stored)
        return LengthResults(workload.prompt, runs, predicted)


def _decode(host: OffloadHost, new_tokens: int, *, way: Way, all_anew: bool) -> OffloadSample:
    """Decode all sequences together; count the steps behind the first ones."""
    watched = _Watched(host.engine(way.schedule), all_anew)
    run = host.decode(new_tokens, way, on_step=watched.step_ended)
    steps, rows, expected = run.steps[FIRST_STEPS:], watched.rows, None
    if host.device.type == "cpu":
        loaded = sum(step.loaded_tokens for step in steps)
        expected = rows.link_bytes + loaded * host.store.layout.stored_kv_bytes_per_token_layer
    return replace(run, steps=steps, rows=rows, expected_bytes=expected, overlap=watched.overlap)


class _Watched:
    """The rows of an engine's sequences, from step to step."""

    def __init__(self, engine: Engine, all_anew: bool) -> None:
        """`all_anew`: forget the rows after each step, so that the next one fetches all."""
        self._engine = engine
        self._all_anew = all_anew
        # Sequences that have ended keep their counts.
        self._seen: set[SequenceReads] = set()
        self._before: RowSums | None = None
        self._last = NO_ROWS
        self._chosen: dict[tuple[tuple[str, int, int], int], torch.Tensor] = {}
        self._shared = self._adjacent = 0

    @property
    def rows(self) -> RowSums:
        """What the counted steps did."""
        return NO_ROWS if self._before is None else self._last.plus(self._before, -1)

    @property
    def overlap(self) -> float | None:
        return self._shared / self._adjacent if self._adjacent else None

    def step_ended(self, token_count: int) -> None:
        """Look at the rows; the steps behind the first ones count."""
        running = self._engine.queues.running
        reads = {each.key: each.reads for each in running if each.reads is not None}
        self._seen |= set(reads.values())
        self._last = _sums(self._seen)
        if token_count > FIRST_STEPS and self._before is None:
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
                    attended = head[head >= 0]
                    self._shared += int(torch.isin(attended, other).sum())
                    self._adjacent += attended.numel()
            if chosen.numel():
                self._chosen[key, layer] = chosen.clone()


def _sums(reads: Iterable[SequenceReads]) -> RowSums:
    sums = NO_ROWS
    for each in reads:
        counts = each.counts
        sums = sums.plus(
            RowSums(counts.wanted, counts.fetched, counts.read, counts.visible, counts.link_bytes)
        )
    return sums


# -- several selections -------------------------------------------------------------------


def run_compared(
    named: NamedModel, workload: OffloadWorkload, progress: Progress
) -> tuple[dict[int, dict[str, Runs]], dict[str, Any]]:
    """Measure several selections, H2O among them, each round with prompts of its own.

    Factors are made first, from text that no prompt is cut from, as `splitpoint calibrate` makes
    them; of random weights from random tokens.
    """
    loaded = _load(named, workload, progress)
    # One of each method, whose columns are alike.
    by_method = {each.method: each for each in workload.compared if each.method.is_calibrated}
    factors = {
        method: _factors(loaded.model, named.folder, each, workload, progress)
        for method, each in by_method.items()
    }
    source = ScreenSource(loaded.model.config, factors)
    runs = {
        length: _compare(loaded, source, named.folder, replace(workload, prompt=length), progress)
        for length in workload.lengths
    }
    return runs, loaded.facts


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
    loaded: _Loaded,
    source: ScreenSource,
    folder: Path | None,
    workload: OffloadWorkload,
    progress: Progress,
) -> dict[str, Runs]:
    """Return the runs of each contender with prompts of one length."""
    model, batch = loaded.model, workload.batch
    count = batch * workload.repeats
    if folder is None:
        size = model.shape.vocabulary_size
        prompts = random_prompts(size, count, workload.prompt, workload.seed)
    else:
        prompts = beginnings(loaded.files, folder, count, workload.prompt)
    make = partial(
        OffloadHost,
        model,
        workload,
        prompts=prompts,
        screens_of=source.screens,
        stores_inputs=any(each.method.keeps_inputs for each in workload.compared),
    )
    with ExitStack() as hosts:
        plain = hosts.enter_context(closing(make()))
        drafting = None
        if any(each.verify for each in workload.compared):
            drafting = hosts.enter_context(closing(make(link=plain.link, drafts=DraftMethod.SELF)))
        progress.say(f"storing prompts of {workload.prompt:,} tokens")
        for host in filter(None, (plain, drafting)):
            host.prefill()
        decodes: dict[str, Callable[..., OffloadSample]] = {
            FULL_LOAD: partial(plain.decode, way=STREAMED)
        }
        for selection in workload.compared:
            way = Way(selection=selection)
            if selection.method is SelectionMethod.H2O:
                kept = hosts.enter_context(closing(HeavyHitterHost(model, selection, plain.link)))
                progress.say(f"prompts of {selection}")
                left = {each: kept.prefill(each, workload.new) for each in prompts}
                decodes[str(selection)] = partial(_decode_kept, kept, left)
            elif selection.verify and drafting is not None:
                drafts = Speculation(
                    method=DraftMethod.SELF, num_speculative_tokens=workload.draft_tokens
                )
                decodes[str(selection)] = partial(drafting.decode, way=way, speculation=drafts)
            else:
                decodes[str(selection)] = partial(plain.decode, way=way)
        decodes[RESIDENT] = partial(plain.decode, way=ON_DEVICE)
        turns = {}
        for name in progress.track("warming up", list(decodes)):
            decodes[name](SELECT_WARM_UP_TOKENS, prompts=prompts[:batch])
            turns[name] = _in_batches(partial(decodes[name], workload.new), prompts, batch)
        runs = progress.in_turns("timed runs", turns, workload.repeats)
        approximate = {str(each) for each in workload.compared if not each.verify}
        # Steps that build screens and fill rows, or read what they left. Verified drafts have few
        # steps, and each reads everything.
        return {
            name: tuple(replace(run, steps=run.steps[FIRST_STEPS:]) for run in each)
            if name in approximate
            else each
            for name, each in runs.items()
        }


def _decode_kept(
    host: HeavyHitterHost,
    left: Mapping[tuple[int, ...], tuple[list[KeptTokens], int]],
    new_tokens: int,
    *,
    prompts: Prompts,
) -> OffloadSample:
    return host.decode(new_tokens, [left[each] for each in prompts], prompts)
