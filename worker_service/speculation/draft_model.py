"""A draft model's folder: is it for the served model, how much memory, and loading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from splitpoint.checkpoint.resolve import eos_token_ids
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument
from splitpoint.progress import Ticker
from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of
from worker_service.checkpoint.config import DecoderConfig
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.memory import MemoryPlan, divide
from worker_service.lanes.lanes import Lanes
from worker_service.model.decoder import Decoder
from worker_service.speculation.model_draft import ModelDrafter
from worker_service.weights.matrices import weight_sizes

# The draft model's cache takes at most this share of the worker's memory.
CACHE_SHARE = 0.1


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

        Its cache holds the longest sequences of a whole batch, or what CACHE_SHARE of the
        budget allows. Raises InvalidArgument (bad folder, another vocabulary) and
        ResourceExhausted (memory).
        """
        config = DecoderConfig.read(folder, served.data_type)
        check_vocabulary(folder, config.shape, served_folder, served)
        shape = config.shape
        layout = ArenaLayout.of(shape, chunk_tokens=chunk_tokens, has_activations=False)
        most = divide(
            shape,
            layout,
            budget_bytes=budget_bytes,
            weight_bytes=weight_sizes(config, device, TORCH_TYPES[shape.data_type]).total,
            max_batch_size=max_batch_size,
            max_batched_tokens=max_batched_tokens,
            staging_pages=1,
            has_store=False,
        )
        longest = min(shape.context_length, served.context_length)
        wanted = max_batch_size * chunks_of(longest, chunk_tokens)
        allowed = max(1, int(CACHE_SHARE * budget_bytes) // most.page_bytes)
        pages = min(wanted, allowed, most.page_count)
        size = most.weight_bytes + most.workspace_bytes + pages * most.page_bytes
        return cls(
            folder,
            config,
            layout,
            replace(most, budget_bytes=size, page_count=pages),
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


def check_vocabulary(
    folder: Path, shape: ModelShape, served_folder: Path, served: ModelShape
) -> None:
    """Raise InvalidArgument unless equal ids mean equal tokens in both models."""
    if shape.vocabulary_size != served.vocabulary_size:
        raise _refused(
            folder,
            f"its vocabulary has {shape.vocabulary_size:,} tokens, that of the served model "
            f"{served.vocabulary_size:,}",
        )
    theirs = Tokenizer.load(served_folder)
    if theirs is None:
        return
    ours = Tokenizer.load(folder)
    if ours is None:
        raise _refused(folder, "it has no tokenizer to compare with the served model's")
    if (spelled := ours.spellings()) != (wanted := theirs.spellings()):
        differing = min(wanted.items() ^ spelled.items(), key=lambda item: item[0])
        index = differing[0]
        raise _refused(
            folder,
            f"its tokenizer is another one: token {index} is {spelled.get(index)!r}, that of the "
            f"served model {wanted.get(index)!r}",
        )


def _refused(folder: Path, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{folder} cannot draft: {reason}", field="draft-model")
