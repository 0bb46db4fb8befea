"""Check that one prompt has one answer, whatever else runs and is cached.

Each greedy answer and its log-probabilities are compared, bit for bit, with those of the same
prompt computed alone and with nothing cached: cold, cached, streamed, batched, with drafts, and
continued by another worker. Prompts are passages of Python's library. Then decoding is timed beside
the fast kernels. All of it takes about 25 minutes on 2 cores; the time grows with --prompts in
groups of 16, with --prompt and --new.

    python -m benchmarks.numerics [--model DIR] [--dtype TYPE] [--prompts N] [--device DEVICE]
        [--cost-shape SHAPE|none] [--json] [--output FILE]

If a variant fails, those before it are reported, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import finish, parser_of
from splitpoint.checkpoint.decoder import DecoderConfig, read_decoder, read_shape
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.options.cpu_kernels import AUTO, check_cpu_kernels
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout, DataType, Encoding, Numerics, chunks_of
from splitpoint.speculation import PLAIN, STEP_DRAFT_TOKENS, DraftMethod, Speculation
from splitpoint_cli.bench.decode_report import Run
from splitpoint_cli.bench.decode_report import Workload as DecodeWorkload
from splitpoint_cli.bench.ending import ended_by_signals
from splitpoint_cli.bench.engine import (
    admission_of,
    exact_memory,
    outputs_until_idle,
    use_worker_kernels,
)
from splitpoint_cli.bench.harness import MAX_BATCHED_TOKENS, Progress, built_in_shape, thread_count
from splitpoint_cli.bench.local_store import LocalStore
from splitpoint_cli.bench.our_worker import OurWorker
from splitpoint_cli.bench.texts import Prompts, beginnings, held_back_files, random_prompts
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.choice import choose_device
from worker_service.device.memory import draft_window_pages
from worker_service.drafts.drafter import Drafter
from worker_service.drafts.suffix import SuffixDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sequence import Admission
from worker_service.engine.sequence import Sequence as EngineSequence
from worker_service.kernels.choice import adds_in_one_order, in_use, use, use_one_order
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.select import lanes_of
from worker_service.model.decoder import Decoder
from worker_service.model.span_attention import kernels_of
from worker_service.numerics.self_check import dependence
from worker_service.numerics.verdict import WorkerNumerics, decide, obstacle
from worker_service.speculation.self_draft import SelfDrafter

# Sequences at once where a prompt is not alone, and prompt tokens of a step in small pieces.
BATCH = 16
SMALL_BUDGET = 64
DRAFT_TOKENS = (1, 4, 8)
LEAST_PROMPT = 8
# Pages of the longest prompt, so that each way of restoring and streaming has some to take.
LEAST_PAGES = 6
# What free pages and spare rows hold; they must change nothing.
POISON = 1e4
# The most likely tokens whose log-probabilities are compared, too.
REPORTED = 4
# Groups of sequences whose chunks the store holds: the reference's, those of the variant under
# way and of one before it.
STORED_GROUPS = 3
# Self drafts keep few pages of a short sequence on the device: something must be streamed.
MOST_WINDOW_PAGES = 1
# Of the runs that are timed.
COST_BATCHES, COST_PROMPT, COST_NEW = (1, 8), 512, 32
NO_COST = "none"


# -- what an answer may not depend on ---------------------------------------------------


class Split(Enum):
    """The split l: cached tokens `[0, l)` are rebuilt from X, the others loaded."""

    NONE = "0"
    ONE = "1"
    MIDDLE = "middle"
    ALL = "all"

    def tokens(self, cached: int) -> int:
        """Return l for a prefix of `cached` tokens."""
        return {Split.NONE: 0, Split.ONE: 1, Split.MIDDLE: cached // 2, Split.ALL: cached}[self]


class Cached(Enum):
    """Where the prefix is when a request comes: nowhere, in the store, or on the device."""

    NOTHING = "nothing"
    STORED = "stored"
    ON_DEVICE = "on the device"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute an answer. The defaults are the reference's.

    Attributes:
        budget: prompt tokens that a step computes at most.
        is_alone: False: 15 other prompts are computed meanwhile.
        method: TOKENS computes the prefix from both ends; any other follows the split.
        front_share: share of a streamed sequence's prompt that stays on the device.
        schedule: ROW: X of that front stays instead of K and V.
        draft_tokens: most drafts of a step; 0: none.
        delivered_share: share of the answer that another worker delivered before it ended.
    """

    name: str
    cached: Cached = Cached.NOTHING
    residency: Residency = Residency.RESIDENT
    budget: int = MAX_BATCHED_TOKENS
    is_alone: bool = True
    split: Split = Split.NONE
    method: RestoreMethod = RestoreMethod.LOAD
    front_share: float = 0.0
    schedule: Schedule = Schedule.PIPELINED
    drafts: DraftMethod = DraftMethod.OFF
    draft_tokens: int = 0
    delivered_share: float = 0.0

    @property
    def is_streamed(self) -> bool:
        return self.residency is Residency.STREAMED

    @property
    def is_warm(self) -> bool:
        """True if the prefix comes from the store."""
        return self.cached is Cached.STORED


REFERENCE = Variant("cold, alone")


def variants() -> tuple[Variant, ...]:
    """Return all variants but the reference, those that read its chunks first."""
    return (*_warm(), *_cold())


def _warm() -> Iterator[Variant]:
    warm = partial(replace, REFERENCE, cached=Cached.STORED)
    for split in Split:
        yield warm(name=f"warm, l = {split.value}", split=split)
    # Small pieces, so that both ends get some.
    yield warm(name="warm, from both ends", method=RestoreMethod.TOKENS, budget=SMALL_BUDGET)
    yield warm(name="warm, with 15 others", is_alone=False)
    yield warm(
        name="warm, l = middle, with 15 others",
        is_alone=False,
        split=Split.MIDDLE,
        budget=SMALL_BUDGET,
    )
    yield warm(name="continued by another worker, warm", delivered_share=0.5)
    streamed = partial(warm, residency=Residency.STREAMED)
    for split in Split:
        yield streamed(name=f"streamed, l = {split.value}", split=split)
    yield streamed(name="streamed, front on the device", front_share=0.5)
    name = "streamed, X of the front on the device"
    yield streamed(name=name, front_share=0.5, schedule=Schedule.ROW)
    yield streamed(name="streamed, with 15 others", is_alone=False)
    for count in DRAFT_TOKENS:
        name = f"streamed, self drafts, k = {count}"
        yield streamed(name=name, drafts=DraftMethod.SELF, draft_tokens=count)


def _cold() -> Iterator[Variant]:
    cold = partial(replace, REFERENCE)
    yield cold(name="prefix on the device", cached=Cached.ON_DEVICE)
    yield cold(name=f"prefill budget {SMALL_BUDGET}", budget=SMALL_BUDGET)
    for budget in (SMALL_BUDGET, MAX_BATCHED_TOKENS):
        yield cold(name=f"with 15 others, budget {budget}", budget=budget, is_alone=False)
    yield cold(name="continued by another worker, cold", delivered_share=0.5)
    streamed = partial(cold, residency=Residency.STREAMED)
    yield streamed(name="streamed, cold")
    name = f"streamed, cold, with 15 others, budget {SMALL_BUDGET}"
    yield streamed(name=name, is_alone=False, budget=SMALL_BUDGET)
    suffix = partial(cold, drafts=DraftMethod.SUFFIX)
    for count in DRAFT_TOKENS:
        yield suffix(name=f"suffix drafts, k = {count}", draft_tokens=count)
    yield suffix(name="suffix drafts, k = 4, with 15 others", draft_tokens=4, is_alone=False)


# -- what is compared -------------------------------------------------------------------

# A reported token: its log-probability, and the most likely tokens with theirs.
Logprobs = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens with their log-probabilities; `first` were delivered by another worker."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position of an answer that differs from the reference.

    `wanted` and `found` are the tokens there, `logprob` and `found_logprob` theirs.
    """

    prompt: int
    prompt_tokens: int
    position: int
    wanted: int
    found: int
    logprob: float
    found_logprob: float


@dataclass(slots=True)
class Work:
    """What a variant made the engine do: evidence that it took the way that it names."""

    loaded: int = 0
    rebuilt: int = 0
    recomputed: int = 0
    on_device: int = 0
    streamed_loaded: int = 0
    streamed_rebuilt: int = 0
    drafted: int = 0
    accepted: int = 0

    def count(self, output: StepOutput) -> None:
        for event in output.restores:
            self.loaded += event.loaded_tokens
            self.rebuilt += event.rebuilt_tokens
            self.recomputed += event.recomputed_tokens
            self.on_device += event.device_tokens
        for draft in output.drafts:
            self.drafted += draft.drafted
            self.accepted += draft.accepted
        if output.step is not None and output.step.streamed is not None:
            self.streamed_loaded += output.step.streamed.loaded
            self.streamed_rebuilt += output.step.streamed.rebuilt


@dataclass(slots=True)
class VariantResult:
    """All answers of one variant beside the reference's.

    Attributes:
        differences: the first one of each answer that differs.
        largest_logprob_difference: up to the first token that differs, of all answers.
    """

    variant: Variant
    answers: int = 0
    equal_answers: int = 0
    equal_logprobs: int = 0
    largest_logprob_difference: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    def compare(self, prompt: int, prompt_tokens: int, found: Answer, wanted: Answer) -> None:
        """Count one answer."""
        tokens, logprobs = wanted.tokens[found.first :], wanted.logprobs[found.first :]
        self.answers += 1
        self.equal_answers += found.tokens == tokens
        self.equal_logprobs += found.logprobs == logprobs
        if (found.tokens, found.logprobs) == (tokens, logprobs):
            return
        steps = [*zip(tokens, found.tokens, logprobs, found.logprobs, strict=False)]
        place = next(
            (n for n, step in enumerate(steps) if step[0] != step[1] or step[2] != step[3]),
            len(steps) - 1,
        )
        token, other, (logprob, _), (found_logprob, _) = steps[place]
        position = found.first + place
        self.differences.append(
            Difference(prompt, prompt_tokens, position, token, other, logprob, found_logprob)
        )
        for token, other, (logprob, _), (found_logprob, _) in steps:
            if token != other:
                break
            self.largest_logprob_difference = max(
                self.largest_logprob_difference, abs(logprob - found_logprob)
            )

    def check_work(self) -> None:
        """Raise Internal if the variant's way was not taken."""
        variant, work = self.variant, self.work
        needed = {
            "recomputed": variant.method is RestoreMethod.TOKENS,
            "loaded": variant.is_warm
            and not variant.is_streamed
            and variant.split is not Split.ALL,
            "rebuilt": variant.split is not Split.NONE and not variant.is_streamed,
            "streamed_loaded": variant.is_streamed and variant.split is not Split.ALL,
            "streamed_rebuilt": variant.is_streamed and variant.split is not Split.NONE,
            "on_device": variant.cached is Cached.ON_DEVICE,
            "drafted": bool(variant.draft_tokens),
        }
        missing = [name for name, must in needed.items() if must and not getattr(work, name)]
        if missing:
            raise Internal(f"{variant.name}: nothing was {', '.join(missing)}")

    def report(self) -> dict[str, Any]:
        first = min(self.differences, key=lambda each: each.prompt, default=None)
        return {
            "name": self.variant.name,
            "answers": self.answers,
            "equal_answers": self.equal_answers,
            "equal_logprobs": self.equal_logprobs,
            "largest_logprob_difference": self.largest_logprob_difference,
            "first_difference": None if first is None else asdict(first),
            "work": {name: count for name, count in asdict(self.work).items() if count},
        }


# -- engines ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """Greedy answers of `new` tokens to `prompts` prompts of 8 to `prompt` tokens.

    Attributes:
        model: the checkpoint folder.
        kernels: `--cpu-kernels` of the worker whose answers are compared.
        fast_kernels: those of the worker whose speed is compared.
        cost_shape: a built-in shape with random weights for the cost; empty: it is not measured.
    """

    model: str
    dtype: str
    prompts: int
    prompt: int
    new: int
    page_tokens: int
    kernels: str
    fast_kernels: str
    cost_shape: str
    repeats: int
    device: str
    threads: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an engine is made for.

    `is_serial`: both ends of a restore meet where the request says, not where time tells them.
    """

    budget: int
    drafts: DraftMethod
    shares_prefixes: bool
    is_serial: bool


class Host:
    """Computes answers by variants, with one model, one store, and an engine of each kind.

    Each engine is a worker of its own: it has its own device memory, in which every page holds
    large values before a variant begins. Close it.
    """

    def __init__(self, model: Decoder, workload: Workload) -> None:
        self._model, self._workload = model, workload
        # X is stored, for every model, so that it can be rebuilt from.
        self._layout = ArenaLayout.of(
            model.shape, chunk_tokens=workload.page_tokens, has_activations=True
        )
        self._tokens = workload.prompt + workload.new
        slots = STORED_GROUPS * BATCH * (1 + chunks_of(self._tokens, workload.page_tokens))
        self._store = LocalStore(self._layout, slots, model.device)
        self._engines: dict[_Kind, Engine] = {}
        self._run_count = 0

    def close(self) -> None:
        for engine in self._engines.values():
            engine.lanes.close()
        self._store.close()

    def run(
        self,
        variant: Variant,
        prompts: Prompts,
        indices: Sequence[int],
        reference: Mapping[int, Answer],
        work: Work,
    ) -> dict[int, Answer]:
        """Return the answers to some prompts by index; count in `work` what was done.

        `reference`: answers that were there before; variants whose answer another worker began
        go on from them.
        """
        engine = self._engine(variant)
        for plane in (*engine.cache.keys, *engine.cache.values, *engine.cache.inputs):
            plane.fill_(POISON)
        answers: dict[int, Answer] = {}
        for together in [[index] for index in indices] if variant.is_alone else [indices]:
            if variant.cached is Cached.ON_DEVICE:
                self._answer(engine, variant, prompts, together, reference, Work())
            answers |= self._answer(engine, variant, prompts, together, reference, work)
        return answers

    def _answer(
        self,
        engine: Engine,
        variant: Variant,
        prompts: Prompts,
        indices: Sequence[int],
        reference: Mapping[int, Answer],
        work: Work,
    ) -> dict[int, Answer]:
        """Compute some prompts; each step admits another one of them."""
        self._run_count += 1
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[Logprobs]] = {}
        admissions = {
            index: self._admission(variant, prompts[index], index, reference.get(index))
            for index in indices
        }
        waiting = list(admissions.values())
        while waiting:
            self._admit(engine, variant, waiting.pop(0))
            for output in outputs_until_idle(engine, self._store, in_turn=True):
                for event in output.tokens:
                    name, choice = event.key[0], event.choice
                    if choice.logprob is None:
                        raise Internal("a token came without its log-probability")
                    tokens.setdefault(name, []).append(choice.token_id)
                    logprobs.setdefault(name, []).append((choice.logprob, choice.top_logprobs))
                work.count(output)
                if waiting and output.ran:
                    self._admit(engine, variant, waiting.pop(0))
        return {
            index: Answer(
                tuple(tokens[each.request_id]),
                tuple(logprobs[each.request_id]),
                len(each.delivered),
            )
            for index, each in admissions.items()
        }

    def _admission(
        self, variant: Variant, prompt: Sequence[int], index: int, reference: Answer | None
    ) -> Admission:
        new = self._workload.new
        delivered: tuple[int, ...] = ()
        if variant.delivered_share and reference is not None:
            delivered = reference.tokens[: int(new * variant.delivered_share)]
        cached = len(prompt) + len(delivered) - 1
        plain = admission_of(
            f"{self._run_count}.{index}",
            prompt,
            new,
            residency=variant.residency,
            # Streamed: what is cached grows.
            split_tokens=variant.split.tokens(cached + (new if variant.is_streamed else 0)),
            speculation=_speculation(variant),
        )
        chunk = self._layout.chunk_tokens
        return replace(
            plain,
            delivered=delivered,
            sampling=replace(plain.sampling, logprobs=REPORTED),
            method=variant.method,
            recomputed_tokens=cached // 2 if variant.method is RestoreMethod.TOKENS else 0,
            resident_tokens=int(len(prompt) * variant.front_share) // chunk * chunk,
            schedule=variant.schedule,
            # Only the variants that read the reference's chunks find any. Drafts from answers
            # of other variants would all be right.
            salt=REFERENCE.name.encode() if variant.is_warm else variant.name.encode(),
        )

    def _admit(self, engine: Engine, variant: Variant, admission: Admission) -> None:
        ids = admission.tokens
        match = self._store.match(admission.key, ids, admission.salt)
        chunk = self._layout.chunk_tokens
        if variant.is_warm and match.cached_tokens < (len(ids) - 1) // chunk * chunk:
            raise Internal(f"{variant.name}: the store holds {match.cached_tokens} of {len(ids)}")
        engine.admit(admission, match)

    def _engine(self, variant: Variant) -> Engine:
        kind = _Kind(
            variant.budget,
            variant.drafts,
            shares_prefixes=variant.cached is Cached.ON_DEVICE,
            is_serial=variant.method is RestoreMethod.TOKENS,
        )
        if kind not in self._engines:
            self._engines[kind] = self._make_engine(kind)
        self._model.use_lanes(self._engines[kind].lanes)
        return self._engines[kind]

    def _make_engine(self, kind: _Kind) -> Engine:
        model, layout = self._model, self._layout
        window = min(MOST_WINDOW_PAGES, draft_window_pages(model.shape, layout.chunk_tokens))
        memory = exact_memory(
            model.shape,
            layout,
            weight_bytes=model.weight_bytes,
            batch=BATCH,
            # A page more of each sequence than its tokens fill.
            tokens=self._tokens + layout.chunk_tokens,
            draft_tokens=0 if kind.drafts is DraftMethod.OFF else STEP_DRAFT_TOKENS,
            window_pages=window if kind.drafts is DraftMethod.SELF else 0,
        )
        cache = DeviceCache(layout, memory, model.device)
        lanes = lanes_of(model.device, overlapped=not kind.is_serial)
        return Engine(
            model,
            cache,
            max_batch_size=BATCH,
            max_batched_tokens=kind.budget,
            lanes=lanes,
            shares_prefixes=kind.shares_prefixes,
            drafters=_drafters(kind.drafts, model, cache, lanes),
        )


def _drafters(
    method: DraftMethod, model: Decoder, cache: DeviceCache, lanes: Lanes
) -> dict[DraftMethod, Drafter[EngineSequence]]:
    match method:
        case DraftMethod.SELF:
            return {method: SelfDrafter(model, cache, lanes)}
        case DraftMethod.SUFFIX:
            return {method: SuffixDrafter()}
        case _:
            return {}


def _speculation(variant: Variant) -> Speculation:
    if not variant.draft_tokens:
        return PLAIN
    # One token that occurred before is enough: the text needs drafts, right or wrong.
    return Speculation(variant.drafts, variant.draft_tokens, prompt_lookup_min=1)


# -- the comparison ---------------------------------------------------------------------


def draw_prompts(workload: Workload, folder: Path, vocabulary_size: int) -> Prompts:
    """Return prompts of LEAST_PROMPT to `workload.prompt` tokens: at least BATCH, so that each one
    has 15 others. Passages of a text, or random tokens for a checkpoint without a tokenizer."""
    count = max(workload.prompts, BATCH)
    if Tokenizer.load(folder) is None:
        whole = random_prompts(vocabulary_size, count, workload.prompt, workload.seed)
    else:
        whole = beginnings(held_back_files(), folder, count, workload.prompt)
    draw = random.Random(workload.seed)
    lengths = (draw.randint(LEAST_PROMPT, workload.prompt) for _ in whole)
    return tuple(each[:length] for each, length in zip(whole, lengths, strict=True))


class Unfinished(Internal):
    """A variant failed, or did not take its way; `results` are those that were compared before."""

    def __init__(self, why: str, results: list[VariantResult]) -> None:
        super().__init__(why)
        self.results = [each for each in results if each.answers]


def compare_all(
    host: Host, prompts: Prompts, count: int, progress: Progress
) -> list[VariantResult]:
    """Return the results of all variants for the first `count` prompts.

    The prompts go in groups through all variants, so that the store needs room for one group.
    Raises Unfinished.
    """
    results = [VariantResult(each) for each in variants()]
    reference = VariantResult(REFERENCE)
    groups = [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]
    work = [(group, each) for group in groups for each in (reference, *results)]
    wanted: dict[int, Answer] = {}
    try:
        for group, result in progress.track("groups by variants", work):
            # A smaller group is filled up with other prompts; their answers are not compared.
            filled = [index % len(prompts) for index in range(group.start, group.start + BATCH)]
            is_filled = result is reference or not result.variant.is_alone
            indices = filled if is_filled else group
            found = host.run(result.variant, prompts, indices, wanted, result.work)
            if result is reference:
                wanted = found
            for index in group:
                result.compare(index, len(prompts[index]), found[index], wanted[index])
        for result in results:
            result.check_work()
    except Internal as error:
        raise Unfinished(error.message, results) from error
    return results


def numerics_of(model: Decoder, page_tokens: int) -> WorkerNumerics:
    """Return what a worker of this model says of its numerics at its start."""
    against = obstacle(
        Numerics.INVARIANT,
        is_gpu=model.device.type == "cuda",
        encoding=Encoding.NATIVE,
        kernels=in_use(),
        has_triton=kernels_of(model.device) is not None,
    )
    return decide(AUTO, obstacle=against, check=partial(dependence, model, page_tokens))


# -- the cost ---------------------------------------------------------------------------


def measure_costs(
    workload: Workload, device: torch.device, progress: Progress
) -> tuple[str, list[dict[str, Any]]]:
    """Return the fast kernels, and the cost of the compared worker's in each batch.

    Weights keep the layout of the kernels that they were loaded for; attention takes the kernels
    that are in use. No costs if the compared worker has the fast kernels.
    """
    before, was_in_one_order = in_use(), adds_in_one_order()
    data_type = DataType(workload.dtype)
    shape = replace(BUILT_IN_SHAPES[workload.cost_shape], data_type=data_type)
    contenders = []
    for wish, numerics in (
        (workload.kernels, Numerics.INVARIANT),
        (workload.fast_kernels, Numerics.FAST),
    ):
        name = use_worker_kernels(device, data_type, [shape.head_dim], wish=wish, numerics=numerics)
        progress.say(f"{shape.name}: random weights, {name or 'the usual kernels of a GPU'}")
        config = DecoderConfig.of_shape(shape)
        model = Decoder.random(config, workload.seed, device, TORCH_TYPES[data_type])
        contenders.append((name, model, in_use(), adds_in_one_order()))
    costs: list[dict[str, Any]] = []
    for batch in COST_BATCHES if contenders[0][0] != contenders[1][0] else ():
        decode = DecodeWorkload(
            shape=workload.cost_shape,
            dtype=workload.dtype,
            batch=batch,
            prompt=COST_PROMPT,
            new=COST_NEW,
            repeats=workload.repeats,
            device=workload.device,
            threads=workload.threads,
            seed=workload.seed,
        )
        prompts = random_prompts(shape.vocabulary_size, batch, COST_PROMPT, workload.seed)
        workers = [OurWorker(model, decode) for _, model, _, _ in contenders]

        def run(number: int, new: int, workers: Any = workers, prompts: Any = prompts) -> Run:
            _, _, choice, in_one_order = contenders[number]
            use(choice)
            use_one_order(in_one_order)
            result: Run = workers[number].run(prompts, new)
            return result

        for number in (0, 1):
            run(number, 2)  # warm up
        runs: tuple[list[Run], list[Run]] = ([], [])
        for number in progress.rounds(f"cost of batch {batch}", (0, 1), workload.repeats):
            runs[number].append(run(number, COST_NEW))
        costs.append(cost_of(batch, *runs))
    use(before)
    use_one_order(was_in_one_order)
    return contenders[1][0], costs


def cost_of(batch: int, ours: Sequence[Run], fast: Sequence[Run]) -> dict[str, Any]:
    """Return the medians of both workers' runs, and their ratios."""
    firsts = [statistics.median(run.first_token_seconds for run in runs) for runs in (ours, fast)]
    steps = [
        statistics.median((r.seconds - r.first_token_seconds) / (COST_NEW - 1) for r in runs)
        for runs in (ours, fast)
    ]
    return {
        "batch": batch,
        "prompt": COST_PROMPT,
        "new": COST_NEW,
        "step_seconds": steps[0],
        "fast_step_seconds": steps[1],
        "step_ratio": round(steps[0] / steps[1], 3),
        "first_token_seconds": firsts[0],
        "fast_first_token_seconds": firsts[1],
        "first_token_ratio": round(firsts[0] / firsts[1], 3),
    }


# -- the program ------------------------------------------------------------------------


def measure(workload: Workload, progress: Progress) -> dict[str, Any]:
    """Compare all variants with the reference, then measure the cost.

    What ended the comparison early, if anything, is the result's `error`.
    """
    device, folder = choose_device(workload.device), Path(workload.model)
    if device.type == "cpu":
        torch.set_num_threads(workload.threads)
    data_type = DataType(workload.dtype)
    shape = read_decoder(folder, data_type).shape
    kernels = use_worker_kernels(
        device,
        data_type,
        [shape.head_dim],
        wish=workload.kernels,
        numerics=Numerics.INVARIANT,
    )
    progress.say(f"{shape.name} in {workload.dtype}: loading weights, cutting prompts")
    prompts = draw_prompts(workload, folder, shape.vocabulary_size)
    model = Decoder.load(folder, device, TORCH_TYPES[data_type])
    numerics = numerics_of(model, workload.page_tokens)
    error, fast_kernels = "", ""
    costs: list[dict[str, Any]] = []
    with closing(Host(model, workload)) as host:
        try:
            results = compare_all(host, prompts, workload.prompts, progress)
        except Unfinished as unfinished:
            results, error = unfinished.results, unfinished.message
    if workload.cost_shape and not error:
        fast_kernels, costs = measure_costs(workload, device, progress)
    return {
        "benchmark": "numerics",
        **asdict(workload),
        "shape": shape.name,
        "kernels": kernels,
        "numerics": numerics.numerics.value,
        "numerics_reason": numerics.reason,
        "fast_kernels": fast_kernels,
        "reference": REFERENCE.name,
        "error": error,
        "equal": not error and not any(each.differences for each in results),
        "variants": [each.report() for each in results],
        "costs": costs,
    }


def show(result: Mapping[str, Any]) -> None:
    for each in result["variants"]:
        count, first = each["answers"], each["first_difference"]
        place = "" if first is None else f", first at {first['prompt']}:{first['position']}"
        print(
            f"{each['name']:<52} answers {each['equal_answers']}/{count}, log-probabilities "
            f"{each['equal_logprobs']}/{count}{place}"
        )
    print(f"a worker says {result['numerics']}: {result['numerics_reason']}")
    print("all are equal, bit for bit" if result["equal"] else "NOT EQUAL", result["error"])
    for cost in result["costs"]:
        print(
            f"batch {cost['batch']} of {result['cost_shape']}: step {cost['step_ratio']} x fast, "
            f"first token {cost['first_token_ratio']} x fast ({result['fast_kernels']})"
        )


def workload_of(words: Sequence[str] | None) -> tuple[argparse.Namespace, Workload]:
    """Return what the command line asks for. Raises SplitpointError."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", metavar="DIR|NAME", help="checkpoint; absent: the bundled model")
    add("--dtype", default="bfloat16", choices=[each.value for each in DataType])
    add("--prompts", type=int, default=20, help="whose answers are compared")
    add("--prompt", type=int, default=512, help="tokens of the longest prompt")
    add("--new", type=int, default=64, help="new tokens of each")
    add("--page-tokens", type=int, default=64, help="tokens of a page and chunk")
    add("--cpu-kernels", dest="kernels", default=AUTO, help="of the compared, invariant worker")
    add("--fast-kernels", default=AUTO, help="kernels that its cost is a ratio to")
    add("--cost-shape", default="opt-125m", help=f"a built-in shape for the cost, or {NO_COST}")
    add("--repeats", type=int, default=5, help="timed runs for the cost")
    add("--device", default="cpu", metavar="cpu|cuda|cuda:N")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    for kernels in (arguments.kernels, arguments.fast_kernels):
        check_cpu_kernels(kernels)
    arguments.cost_shape = arguments.cost_shape.lower().replace(NO_COST, "")
    if arguments.cost_shape:
        built_in_shape(arguments.cost_shape)
    folder = resolve_model(arguments.model, download=False)
    arguments.model, arguments.threads = str(folder), thread_count(arguments.threads)
    prompt, new, page_tokens = arguments.prompt, arguments.new, arguments.page_tokens
    if prompt < LEAST_PAGES * page_tokens:
        raise InvalidArgument(
            f"a prompt of {prompt} tokens is too short for restores at every split: at least "
            f"{LEAST_PAGES} pages of {page_tokens} tokens, or smaller --page-tokens",
            field="prompt",
        )
    shape = read_shape(folder, DataType(arguments.dtype))
    if prompt + new > shape.context_length:
        raise InvalidArgument(
            f"{prompt} prompt and {new} new tokens are more than the context of {shape.name}, "
            f"{shape.context_length}",
            field="prompt",
        )
    return arguments, Workload(
        **{each.name: getattr(arguments, each.name) for each in fields(Workload)}
    )


def main(words: Sequence[str] | None = None) -> int:
    arguments, workload = workload_of(words)
    with ended_by_signals():
        result = measure(workload, Progress())
        finish(arguments, result, show)
    return 1 if result["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
