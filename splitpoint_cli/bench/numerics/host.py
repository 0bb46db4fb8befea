"""One model and one store, and the engines of `bench numerics` that use them.

Each engine is a worker of its own: it has its own device memory, in which every page holds
large values before a variant begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from splitpoint.errors import Internal
from splitpoint.planning.plan import RestoreMethod
from splitpoint.shapes import ArenaLayout, chunks_of
from splitpoint.speculation import PLAIN, STEP_DRAFT_TOKENS, DraftMethod, Speculation
from splitpoint_cli.bench.numerics.report import Answer, Logprobs, NumericsWorkload, Work
from splitpoint_cli.bench.numerics.variants import BATCH, REFERENCE, Cached, Variant
from splitpoint_cli.bench.shared.engine_memory import exact_memory
from splitpoint_cli.bench.shared.engine_runs import admission_of, outputs_until_idle
from splitpoint_cli.bench.shared.local_store import LocalStore
from splitpoint_cli.bench.texts import Prompts
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import STAGING_PAGES, draft_window_pages
from worker_service.drafts.drafter import Drafter
from worker_service.drafts.suffix import SuffixDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sequence import Admission
from worker_service.engine.sequence import Sequence as EngineSequence
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.select import lanes_of
from worker_service.model.decoder import Decoder
from worker_service.speculation.self_draft import SelfDrafter

# What free pages and spare rows hold; they must change nothing.
POISON = 1e4
# The most likely tokens whose log-probabilities are compared, too.
REPORTED = 4
# Groups of sequences whose chunks the store holds: the reference's, those of the variant under
# way and of one before it.
STORED_GROUPS = 3
# Of a sequence of few pages self drafts keep few on the device: something must be streamed.
MOST_WINDOW_PAGES = 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an engine is made for.

    `is_serial`: both ends of a restore meet where the request says, not where time tells them.
    """

    budget: int
    drafts: DraftMethod
    shares_prefixes: bool
    is_serial: bool


class NumericsHost:
    """Computes answers by variants. Close it.

    Attributes:
        has_activations: True: X is stored, for every model, so that it can be rebuilt from.
    """

    def __init__(self, model: Decoder, workload: NumericsWorkload) -> None:
        self.has_activations = True
        self._model, self._workload = model, workload
        self._layout = ArenaLayout.of(
            model.shape, chunk_tokens=workload.page_tokens, has_activations=self.has_activations
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
        _poison(engine.cache)
        answers: dict[int, Answer] = {}
        for together in [[index] for index in indices] if variant.is_alone else [indices]:
            if variant.cached is Cached.ON_DEVICE:
                self._answer(engine, variant, prompts, together, reference, Work())
            answers |= self._answer(engine, variant, prompts, together, reference, work)
        return answers

    # -- below ---------------------------------------------------------------------------

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
                _count(output, work)
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
        """Return the worker of a variant; its device memory holds POISON wherever it is free."""
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
        is_self = kind.drafts is DraftMethod.SELF
        window = min(MOST_WINDOW_PAGES, draft_window_pages(model.shape, layout.chunk_tokens))
        memory = exact_memory(
            model.shape,
            layout,
            weight_bytes=model.weight_bytes,
            batch=BATCH,
            # A page more of each sequence than its tokens fill.
            tokens=self._tokens + layout.chunk_tokens,
            staging_pages=STAGING_PAGES,
            draft_tokens=0 if kind.drafts is DraftMethod.OFF else STEP_DRAFT_TOKENS,
            window_pages=window if is_self else 0,
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


def _poison(cache: DeviceCache) -> None:
    for plane in (*cache.keys, *cache.values, *cache.inputs):
        plane.fill_(POISON)


def _count(output: StepOutput, work: Work) -> None:
    for event in output.restores:
        work.loaded += event.loaded_tokens
        work.rebuilt += event.rebuilt_tokens
        work.recomputed += event.recomputed_tokens
        work.on_device += event.device_tokens
    for draft in output.drafts:
        work.drafted += draft.drafted
        work.accepted += draft.accepted
    if output.step is not None and output.step.streamed is not None:
        work.streamed_loaded += output.step.streamed.loaded
        work.streamed_rebuilt += output.step.streamed.rebuilt
