"""Builds what `--speculative-config` asks for: which drafters a worker has, and their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from splitpoint.checkpoint.config import model_name
from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.options.speculation import SpeculativeConfig
from splitpoint.progress import Ticker
from splitpoint.shapes import ArenaLayout, ModelShape
from splitpoint.speculation import PLAIN, STEP_DRAFT_TOKENS, DraftMethod, Speculation
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import draft_window_pages
from worker_service.drafts.drafter import Drafter
from worker_service.drafts.suffix import SuffixDrafter
from worker_service.engine.sequence import Sequence as EngineSequence
from worker_service.lanes.lanes import Lanes
from worker_service.model.model import Model
from worker_service.speculation.model_draft import DraftModel
from worker_service.speculation.self_draft import SelfDrafter

Drafters = dict[DraftMethod, Drafter[EngineSequence]]


@dataclass(frozen=True, slots=True)
class WorkerSpeculation:
    """The speculation of a loaded worker.

    Attributes:
        defaults: what requests get that leave theirs open.
        methods: what it can draft by.
        draft_model: name of the draft model; empty if there is none.
    """

    defaults: Speculation = PLAIN
    methods: tuple[DraftMethod, ...] = ()
    draft_model: str = ""


NO_DRAFTS = WorkerSpeculation()


def head_dims(config: SpeculativeConfig | None, shape: ModelShape) -> list[int]:
    """Return those of the served model and of the draft model, if there is one.

    Raises InvalidArgument (the draft model's folder).
    """
    if config is None or config.model is None:
        return [shape.head_dim]
    draft = read_decoder(Path(config.model), shape.data_type)
    return [shape.head_dim, draft.shape.head_dim]


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """What a worker will draft by, before anything is loaded.

    Attributes:
        config: None if the worker drafts nothing.
        drafts_itself: streamed requests keep a window on the device for self drafts.
        model: the draft model; None if there is none.
    """

    config: SpeculativeConfig | None = None
    drafts_itself: bool = False
    model: DraftModel | None = None

    @classmethod
    def plan(
        cls,
        config: SpeculativeConfig | None,
        served_folder: Path,
        shape: ModelShape,
        layout: ArenaLayout,
        device: torch.device,
        *,
        budget_bytes: int,
        max_batch_size: int,
        max_batched_tokens: int,
        has_store: bool,
    ) -> DraftSetup:
        """Decide, and check the draft model's folder. Self drafts need a store, as streaming does,
        and a default that uses them: their window takes memory of every streamed request.

        Raises InvalidArgument (draft model), ResourceExhausted (memory).
        """
        if config is None:
            return cls()
        uses_self = config.defaults.method in (DraftMethod.AUTO, DraftMethod.SELF)
        model = None
        if config.model is not None:
            model = DraftModel.plan(
                Path(config.model),
                served_folder,
                shape,
                device,
                chunk_tokens=layout.chunk_tokens,
                budget_bytes=budget_bytes,
                max_batch_size=max_batch_size,
                max_batched_tokens=max_batched_tokens,
            )
        return cls(config, uses_self and has_store, model)

    @property
    def model_bytes(self) -> int:
        """Bytes of device memory that the draft model needs for itself."""
        return 0 if self.model is None else self.model.memory.budget_bytes

    @property
    def draft_tokens(self) -> int:
        """Drafted tokens that one step verifies at most; 0 without drafts."""
        return 0 if self.config is None else STEP_DRAFT_TOKENS

    def window_pages(self, shape: ModelShape, layout: ArenaLayout) -> int:
        """Pages that a streamed request keeps for self drafts; 0 without them."""
        return draft_window_pages(shape, layout.chunk_tokens) if self.drafts_itself else 0

    def load(
        self,
        served: Model,
        cache: DeviceCache,
        lanes: Lanes,
        *,
        eos_token_ids: tuple[int, ...],
        tickers: Sequence[Ticker],
    ) -> Drafters:
        """Return the drafters; a draft model is read now."""
        if self.config is None:
            return {}
        drafters: Drafters = {DraftMethod.SUFFIX: SuffixDrafter()}
        if self.drafts_itself:
            drafters[DraftMethod.SELF] = SelfDrafter(
                served, cache, lanes, eos_token_ids=eos_token_ids
            )
        if self.model is not None:
            drafters[DraftMethod.MODEL] = self.model.load(tickers, lanes)
        return drafters

    def described(self, drafters: Mapping[DraftMethod, object]) -> WorkerSpeculation:
        """Return what the worker tells of itself."""
        if self.config is None:
            return NO_DRAFTS
        name = "" if self.model is None else model_name(self.model.folder)
        return WorkerSpeculation(self.config.defaults, tuple(drafters), name)
