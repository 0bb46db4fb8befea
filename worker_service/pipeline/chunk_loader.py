"""Loads chunks from the arena's mapping into device pages: copied or gathered, then decoded.

An encoded chunk crosses the link as it is stored and lands in a buffer; the device decodes it from
there, on a GPU in a stream of its own: the copy engine would otherwise be idle meanwhile. This
module knows no lanes: its caller runs it in one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from worker_service.device.bounce import Bounce
from worker_service.device.copies import are_pinned, copy_runs, runs
from worker_service.device.pinning import piece_slots
from worker_service.hardware.streams import StreamUse, stream_for
from worker_service.pipeline.gather import Gatherer, Planes
from worker_service.store.arena_tensors import ArenaTensors


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a buffer: `arrived` after it was filled, `decoded` after it was read."""

    arrived: Any
    decoded: Any


class DecodeStream:
    """Decodes the parts of a buffer in turn. For the thread that gives work to the copy stream.

    `cuda` is torch.cuda, or in tests a double of its streams and events.
    """

    def __init__(self, device: torch.device, part_count: int, cuda: Any = torch.cuda) -> None:
        self.part_count = part_count
        self._device = device
        self._cuda = cuda
        self._stream = stream_for(StreamUse.DECODE, device, cuda)
        # Recorded again and again: a wait keeps the record that it saw.
        self._parts = [_Part(cuda.Event(), cuda.Event()) for _ in range(part_count)]
        self._last: Any = None

    def run(self, part: int, fetch: Callable[[], None], decode: Callable[[], None]) -> None:
        """Fetch into a part in the current stream once it is free; decode it in this one."""
        copies, events = self._cuda.current_stream(self._device), self._parts[part]
        copies.wait_event(events.decoded)
        fetch()
        events.arrived.record(copies)
        self._stream.wait_event(events.arrived)
        with self._cuda.stream(self._stream):
            decode()
        events.decoded.record(self._stream)
        self._last = events.decoded

    def join(self) -> None:
        """Let the current stream wait for everything that was decoded."""
        if self._last is not None:
            self._cuda.current_stream(self._device).wait_event(self._last)


# Parts of a buffer: all but the last part's decoding runs beside copies.
PARTS = 4


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
        on_gpu = device.type == "cuda"
        self._part_pages = max(1, page_count // PARTS) if on_gpu else page_count
        self._decoder = None
        if on_gpu and kinds:
            self._decoder = DecodeStream(device, page_count // self._part_pages)
        self._bounce = Bounce(device) if on_gpu else None

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
            self._load_encoded(kind, plane, targets[kind], slots, pages)
        if self._decoder is not None:
            # The lane has this work done when it is decoded.
            self._decoder.join()

    def _load_encoded(
        self,
        kind: str,
        plane: torch.Tensor,
        target: torch.Tensor,
        slots: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        buffer, size = self._buffers["X" if kind == "X" else "V"], self._part_pages
        for index, first in enumerate(range(0, len(slots), size)):
            some, wanted = slots[first : first + size], pages[first : first + size]
            part = 0 if self._decoder is None else index % self._decoder.part_count
            room = buffer[part * size : (part + 1) * size]
            fetch = partial(self._fetch, [(plane, room)], some, range(len(some)))
            decode = partial(self._decode, room, target, wanted)
            if self._decoder is None:
                fetch()
                decode()
            else:
                self._decoder.run(part, fetch, decode)

    def _decode(self, room: torch.Tensor, target: torch.Tensor, pages: Sequence[int]) -> None:
        for start, length in runs(pages, pages):
            page = pages[start]
            self._codec.decode(room[start : start + length], target[page : page + length])

    def _fetch(self, planes: Sequence[Planes], slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy slots of each plane to the pages of its target, in the faster way."""
        if self._gatherer is not None:
            run_count = sum(1 for _ in runs(slots, pages))
            if self._gatherer.is_faster(planes, run_count, slots):
                self._gatherer.gather(planes, slots, pages)
                return
        for plane, target in planes:
            cut = piece_slots(plane[0].nbytes)
            if self._bounce is None or are_pinned(plane, slots, cut):
                copy_runs(plane, target, slots, pages, source_cut=cut)
                continue
            for start, length in runs(slots, pages):
                slot, page = slots[start], pages[start]
                self._bounce.copy(target[page : page + length], plane[slot : slot + length])
