"""A draft model's folder: is it for the served model, how much memory, and loading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.checkpoint.resolve import eos_token_ids
from splitpoint.checkpoint.support import read_decoder
from splitpoint.checkpoint.vocabulary import check_vocabulary
from splitpoint.progress import Ticker
from splitpoint.shapes import ArenaLayout, ModelShape
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.draft_memory import draft_memory
from worker_service.device.memory import MemoryPlan
from worker_service.lanes.lanes import Lanes
from worker_service.model.decoder import Decoder
from worker_service.speculation.model_draft import ModelDrafter
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

    def load(self, tickers: Sequence[Ticker] = (), lanes: Lanes | None = None) -> ModelDrafter:
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
