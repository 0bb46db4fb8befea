"""Drafts by a small model of the same vocabulary, with a cache of its own.

A draft model's folder is checked against the served model, and its memory is planned, before it is
loaded. It follows the tokens of the sequences it drafts for and nothing else: where their K and V
are, and whether they stream, does not matter to it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import DecoderConfig, read_decoder
from splitpoint.checkpoint.resolve import eos_token_ids
from splitpoint.checkpoint.vocabulary import check_vocabulary
from splitpoint.progress import Ticker
from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of
from splitpoint.speculation import DraftMethod
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.memory import MemoryPlan, draft_memory
from worker_service.drafts.drafter import TargetKey
from worker_service.engine.sampling import NonFiniteLogits, Sampling, SamplingRow, choose_with_flags
from worker_service.engine.sequence import Sequence
from worker_service.lanes.lanes import Lanes
from worker_service.model.decoder import Decoder
from worker_service.speculation.draft_pass import DraftedTokens, DraftPasses, Piece
from worker_service.speculation.growing_draft import GrowingDraft, count_drafts, drafting_sampling
from worker_service.weights.matrices import weight_sizes


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model that fits the served one, not loaded yet.

    Attributes:
        folder: a checkpoint; `eos_token_ids` are the served model's.
        memory: its own; `memory.budget_bytes` must be left free for it.
    """

    folder: Path
    config: DecoderConfig
    layout: ArenaLayout
    memory: MemoryPlan
    device: torch.device
    max_batched_tokens: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def plan(
        cls,
        folder: Path,
        served_folder: Path,
        served: ModelShape,
        device: torch.device,
        *,
        chunk_tokens: int,
        budget_bytes: int,
        max_batch_size: int,
        max_batched_tokens: int,
    ) -> DraftModel:
        """Check the folder and divide its memory, a part of the worker's budget.

        Raises InvalidArgument (bad folder, another vocabulary) and ResourceExhausted (memory).
        """
        config = read_decoder(folder, served.data_type)
        shape = config.shape
        check_vocabulary(folder, shape, served_folder, served)
        memory = draft_memory(
            shape,
            served,
            weight_bytes=weight_sizes(config, device, TORCH_TYPES[shape.data_type]).total,
            chunk_tokens=chunk_tokens,
            budget_bytes=budget_bytes,
            max_batch_size=max_batch_size,
            max_batched_tokens=max_batched_tokens,
        )
        return cls(
            folder,
            config,
            ArenaLayout.of(shape, chunk_tokens=chunk_tokens, has_activations=False),
            memory,
            device,
            max_batched_tokens,
            eos_token_ids(served_folder),
        )

    def load(self, tickers: Rows[Ticker] = (), lanes: Lanes | None = None) -> ModelDrafter:
        """Read the weights, allocate the cache, and warm up; `lanes` count the time of drafts."""
        dtype = TORCH_TYPES[self.config.shape.data_type]
        drafter = ModelDrafter(
            Decoder.load(self.folder, self.device, dtype, tickers=tickers),
            DeviceCache(self.layout, self.memory, self.device),
            max_batched_tokens=self.max_batched_tokens,
            eos_token_ids=self.eos_token_ids,
            lanes=lanes,
        )
        drafter.warm_up()
        return drafter


# Another token is drafted while all before it are right with at least this probability, by
# the draft model's own opinion. A pass of it costs about a third of a step of the bundled model.
LEAST_CHANCE = 0.4


@dataclass(slots=True, eq=False)
class _Kept(DraftedTokens):
    """A sequence in the draft model's cache.

    Attributes:
        sampling: how its drafts are chosen.
        known: leading tokens that are the sequence's own.
    """

    sampling: Sampling = field(default_factory=Sampling)
    prompt_length: int = 0
    known: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class _Draft(GrowingDraft):
    """A draft, and what is kept of its sequence; `chance` is that all of it is right."""

    kept: _Kept
    chance: float = 1.0

    @property
    def is_ready(self) -> bool:
        """True if all tokens of the sequence are computed, and a draft can follow."""
        return self.kept.computed == len(self.kept.tokens)


class ModelDrafter:
    """Drafts tokens by a second, smaller model. See `Drafter`.

    A sequence has pages in its cache from its first draft on. Where none is free, the sequence
    that was not drafted for the longest loses its own; if all are drafted for now, the last
    ones get no draft. A lost sequence is computed again from its tokens.
    """

    method = DraftMethod.MODEL

    def __init__(
        self,
        model: Decoder,
        cache: DeviceCache,
        *,
        max_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        least_chance: float = LEAST_CHANCE,
        lanes: Lanes | None = None,
    ) -> None:
        """`max_batched_tokens`: tokens of sequences that one call computes at most.

        `lanes` count the compute time of drafts; they run none of it.
        """
        self.model = model
        self.cache = cache
        self._passes = DraftPasses(model, cache)
        self._most_tokens = max_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._least_chance = least_chance
        self._lanes = lanes
        self._chunk = cache.layout.chunk_tokens
        # The longest unused first.
        self._kept: OrderedDict[TargetKey, _Kept] = OrderedDict()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run passes of the usual sizes: libraries compile kernels at their first use."""
        pages = self.cache.pages
        for count in (8, 4, 2, 1):
            needed = chunks_of(count, self._chunk)
            if needed <= pages.free_count:
                drafted = DraftedTokens(
                    [0] * count, pages=[pages.allocate() for _ in range(needed)]
                )
                self._passes.run([Piece(drafted, count)])
                for page in drafted.pages:
                    pages.free(page)

    @torch.inference_mode()
    def propose(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        """Draft for all sequences together. See `Drafter.propose`.

        A sequence whose tokens are not all computed yet, since its prompt is long, gets no
        draft in this call.
        """
        started = time.perf_counter()
        drafts, pieces = self._begin([pair for pair in wanted if pair[1] > 0])
        growing: list[_Draft] = []
        if pieces:
            logits = self._passes.run(pieces)
            growing = [draft for draft in drafts.values() if draft.is_ready]
            if len(growing) < len(pieces):
                ready = [draft.is_ready for draft in drafts.values()]
                logits = logits[torch.tensor(ready, device=logits.device)]
        while growing:
            growing = self._extend(growing, logits)
            if growing:
                logits = self._passes.run([Piece(draft.kept, 1) for draft in growing])
        if self._lanes is not None and pieces:
            count_drafts(self._lanes, started, drafts.values())
        found = (drafts.get(target.key) for target, _ in wanted)
        return [[] if draft is None else draft.tokens for draft in found]

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        """Free the pages of a sequence."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            for page in kept.pages:
                self.cache.pages.free(page)

    # -- following the sequences --------------------------------------------------------

    def _begin(
        self, wanted: Rows[tuple[Sequence, int]]
    ) -> tuple[dict[TargetKey, _Draft], list[Piece]]:
        """Return empty drafts, and what must be computed first, in the same order."""
        present = {target.key for target, _ in wanted}
        drafts: dict[TargetKey, _Draft] = {}
        pieces: list[Piece] = []
        left = self._most_tokens
        for target, count in wanted:
            kept = self._follow(target)
            most = min(count, self.model.shape.context_length - len(kept.tokens) + 1)
            piece = Piece(kept, min(len(kept.tokens) - kept.computed, left))
            is_whole = piece.positions.stop == len(kept.tokens)
            end = piece.positions.stop + (most - 1 if is_whole else 0)
            if most <= 0 or not self._has_pages(kept, end, present):
                self.forget(target.key, has_ended=False)
            elif piece.count:
                left -= piece.count
                drafts[target.key] = _Draft(kept.sampling, most, kept=kept)
                pieces.append(piece)
        return drafts, pieces

    def _follow(self, target: Sequence) -> _Kept:
        """Return what is kept of a sequence, rewound to what is right and with all its tokens."""
        kept = self._kept.get(target.key)
        if kept is None:
            kept = self._kept[target.key] = _Kept(
                sampling=drafting_sampling(target), prompt_length=target.prompt_length
            )
        self._kept.move_to_end(target.key)
        tokens = target.tokens
        # The newest token is computed in any case: its logits are wanted.
        end = min(kept.computed, len(tokens) - 1)
        same = min(kept.known, end)
        while same < end and kept.tokens[same] == tokens[same]:
            same += 1
        kept.computed = same
        kept.tokens[same:] = tokens[same:]
        kept.known = len(tokens)
        return kept

    def _has_pages(self, kept: _Kept, token_count: int, present: set[TargetKey]) -> bool:
        """Allocate pages for this many tokens; False if only sequences in use could give some."""
        pages = self.cache.pages
        for _ in range(len(kept.pages), chunks_of(token_count, self._chunk)):
            while not pages.free_count:
                unused = next((key for key in self._kept if key not in present), None)
                if unused is None:
                    return False
                self.forget(unused, has_ended=False)
            kept.pages.append(pages.allocate())
        return True

    # -- drafting -----------------------------------------------------------------------

    def _extend(self, drafts: list[_Draft], logits: torch.Tensor) -> list[_Draft]:
        """Add one token to each draft; return those that go on.

        Tokens are chosen as the request's own will be: greedily, or by its seed and position.
        """
        rows = [
            SamplingRow(
                draft.sampling,
                draft.kept.tokens,
                draft.kept.prompt_length,
                self._eos_token_ids,
            )
            for draft in drafts
        ]
        # That they are finite is seen in the choices.
        flags = torch.ones(len(rows), dtype=torch.bool, device=logits.device)
        _, choices = choose_with_flags(logits, flags, rows)
        ids = [0 if isinstance(each, NonFiniteLogits) else each.token_id for each in choices]
        chosen = logits.gather(1, torch.tensor(ids, device=logits.device).unsqueeze(1)).squeeze(1)
        chances = (chosen - logits.logsumexp(dim=-1)).exp().tolist()
        growing = []
        for draft, choice, chance in zip(drafts, choices, chances, strict=True):
            if isinstance(choice, NonFiniteLogits):
                self._clear(draft.kept)
                continue
            draft.append(choice.token_id, self._eos_token_ids)
            draft.kept.tokens.append(choice.token_id)
            draft.chance *= chance
            if draft.wants_more and draft.chance >= self._least_chance:
                growing.append(draft)
        return growing

    def _clear(self, kept: _Kept) -> None:
        """Compute a sequence anew: masked rows must be finite, for any later owner of its pages."""
        for plane in (*self.cache.keys, *self.cache.values):
            plane[kept.pages] = 0
        kept.computed = kept.known = 0
        kept.tokens.clear()
