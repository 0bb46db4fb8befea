"""Loads chunks from the arena's mapping into device pages: copied or gathered, then decoded.

An encoded chunk crosses the link as it is stored and lands in a buffer; the device
decodes it from there. This module knows no lanes: its caller runs it in one lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from worker_service.device.copies import copy_runs, runs
from worker_service.pipeline.gather import Gatherer, Planes
from worker_service.store.arena_tensors import ArenaTensors


class ChunkLoader:
    """Loads chunks from one arena to one device, for one lane at a time."""

    def __init__(
        self,
        tensors: ArenaTensors,
        device: torch.device,
        page_count: int,
        gatherer: Gatherer | None = None,
    ) -> None:
        """`page_count`: encoded chunks that a buffer holds; larger loads take several rounds.

        `gatherer` fetches scattered slots if that is faster than one copy for each run.
        """
        self._tensors = tensors
        self._gatherer = gatherer
        self._codec = codec = tensors.codec
        # K and V have the same shape and share a buffer.
        kinds = () if codec.is_native else tensors.layout.tensors[1:]
        self._buffers = {kind: codec.room(kind, page_count, device) for kind in kinds}
        self._page_count = page_count

    def load(
        self,
        layer: int,
        targets: Mapping[str, torch.Tensor],
        slots: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        """Copy slot `slots[i]` of each tensor in a layer to page `pages[i]` of its target.

        `targets`: native pages of "K", "V" or "X", `[pages, n_kv, chunk_tokens, d]` or
        `[pages, chunk_tokens, h]`.
        """
        planes = [(kind, self._tensors.plane(layer, kind)) for kind in targets]
        if self._codec.is_native:
            self._fetch([(plane, targets[kind]) for kind, plane in planes], slots, pages)
            return
        for kind, plane in planes:
            self._decode(kind, plane, targets[kind], slots, pages)

    def _decode(
        self,
        kind: str,
        plane: torch.Tensor,
        target: torch.Tensor,
        slots: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        buffer = self._buffers["X" if kind == "X" else "V"]
        for first in range(0, len(slots), self._page_count):
            some = slots[first : first + self._page_count]
            self._fetch([(plane, buffer)], some, range(len(some)))
            wanted = pages[first : first + self._page_count]
            for start, length in runs(wanted, wanted):
                page = wanted[start]
                self._codec.decode(buffer[start : start + length], target[page : page + length])

    def _fetch(self, planes: Sequence[Planes], slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy slots of each plane to the pages of its target, in the faster way."""
        if self._gatherer is not None:
            run_count = sum(1 for _ in runs(slots, pages))
            if self._gatherer.is_faster(planes, run_count, len(slots)):
                self._gatherer.gather(planes, slots, pages)
                return
        for plane, target in planes:
            copy_runs(plane, target, slots, pages)
