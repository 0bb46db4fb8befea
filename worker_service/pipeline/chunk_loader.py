"""Chunks from the arena's mapping into device pages: copied, or gathered, and decoded.

What is encoded crosses the link as it is stored and lands in a room of its own; the
device makes elements of it. Knows nothing of lanes: whoever calls does so in the
one lane whose turn it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from worker_service.device.copies import copy_runs, runs
from worker_service.pipeline.gather import Gatherer, Planes
from worker_service.store.arena_tensors import ArenaTensors


class ChunkLoader:
    """The way in from one arena to one device, for one lane at a time.

    `page_count`: chunks that an encoded tensor's room holds; more come in turns.
    `gatherer`: fetches scattered slots where that is faster than a copy for each run.
    """

    def __init__(
        self,
        tensors: ArenaTensors,
        device: torch.device,
        page_count: int,
        gatherer: Gatherer | None = None,
    ) -> None:
        self._tensors = tensors
        self._gatherer = gatherer
        self._codec = codec = tensors.codec
        # K and V have one shape and take turns.
        kinds = () if codec.is_native else tensors.layout.tensors[1:]
        self._rooms = {kind: codec.room(kind, page_count, device) for kind in kinds}
        self._page_count = page_count

    def load(
        self,
        layer: int,
        targets: Mapping[str, torch.Tensor],
        slots: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        """Page `pages[i]` of each target becomes slot `slots[i]` of its tensor in a layer.

        `targets`: native pages of "K", "V" or "X", `[pages, n_kv, chunk_tokens, d]` or
        `[pages, chunk_tokens, h]`.
        """
        if self._codec.is_native:
            planes = [
                (self._tensors.plane(layer, kind), target) for kind, target in targets.items()
            ]
            self._fetch(planes, slots, pages)
            return
        for kind, target in targets.items():
            self._decode(kind, layer, target, slots, pages)

    def _decode(
        self,
        kind: str,
        layer: int,
        target: torch.Tensor,
        slots: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        plane = self._tensors.plane(layer, kind)
        room = self._rooms["X" if kind == "X" else "V"]
        for first in range(0, len(slots), self._page_count):
            some = slots[first : first + self._page_count]
            self._fetch([(plane, room)], some, range(len(some)))
            wanted = pages[first : first + self._page_count]
            for start, length in runs(wanted, wanted):
                page = wanted[start]
                self._codec.decode(room[start : start + length], target[page : page + length])

    def _fetch(self, planes: Sequence[Planes], slots: Sequence[int], pages: Sequence[int]) -> None:
        """Slots of each plane into the pages of its target, the faster way."""
        if self._gatherer is not None:
            run_count = sum(1 for _ in runs(slots, pages))
            if self._gatherer.is_faster(planes, run_count, len(slots)):
                self._gatherer.gather(planes, slots, pages)
                return
        for plane, target in planes:
            copy_runs(plane, target, slots, pages)
