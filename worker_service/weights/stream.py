"""Streams weights from the host into two slots, in turn, ahead of their use.

A pass reads units (layers, or pieces of the head) in order. While one is read, the next
one is on the weights lane, piece by piece; a slot is filled again only after the compute
that read it. A product waits only for its matrix's piece, so W_O and the MLP may still be
on the link while keys are rebuilt. One thread makes all calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from splitpoint.planning.schedule import Lane
from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.device.copies import copy
from worker_service.kernels.choice import Layout
from worker_service.lanes.lanes import DoneEvent, Event, Lanes
from worker_service.lanes.work import Work
from worker_service.weights.host import HostUnit, Slot

Portions = Sequence[Sequence[WeightPiece]]


@dataclass(slots=True)
class _Filled:
    """A slot, the unit that was sent to it last, and the events of its arrival."""

    slot: Slot
    position: int | None = None
    arrived: dict[WeightPiece, Event] = field(default_factory=dict)
    # DoneEvent when all compute that read the slot is done; None if there was none.
    read: Event | None = None


class WeightStream:
    """Units on the host that take turns in the slots.

    Attributes:
        keys: of the units, in the order in which a pass reads them.
        lanes: must be set before the first pass.
        portions: pieces that are sent together, in link order; may change between passes.
    """

    def __init__(
        self, units: Mapping[int, HostUnit], slots: Sequence[Slot], portions: Portions
    ) -> None:
        """`units`: in order."""
        self.keys = tuple(units)
        self.lanes: Lanes | None = None
        self.portions = portions
        self._units = tuple(units.values())
        self._positions = {key: position for position, key in enumerate(self.keys)}
        self._slots = [_Filled(slot) for slot in slots]
        self._reading: _Filled | None = None

    def __contains__(self, key: int) -> bool:
        return key in self._positions

    @property
    def slot_count(self) -> int:
        return len(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots."""
        return sum(filled.slot.size_bytes for filled in self._slots)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Host memory of the units, each mapping once."""
        by_address = {unit.memory.data_ptr(): unit.memory for unit in self._units}
        return list(by_address.values())

    def bytes_of(self, piece: WeightPiece | None = None) -> int:
        """Return the bytes of one piece of all units, or of all pieces."""
        return sum(
            part.numel()
            for unit in self._units
            for which, parts in unit.parts.items()
            if piece in (None, which)
            for part in parts
        )

    # -- a pass ---------------------------------------------------------------------

    def look_ahead(self) -> None:
        """Send the first units of a pass, unless they are in slots already."""
        self._fill(0)

    @contextmanager
    def reading(self, key: int) -> Iterator[None]:
        """Keep this unit in its slot while compute that reads it is issued."""
        position = self._positions[key]
        self._fill(position)
        with self._lent(self._holding(position)):
            yield
        self._fill(position + 1)

    def wait_for(self, key: int, piece: WeightPiece) -> None:
        """Let compute that is issued from now on begin once the piece arrived."""
        self._require_lanes().wait_event(self._read(key).arrived[piece])

    def matrix(self, key: int, role: str, piece: WeightPiece) -> torch.Tensor:
        """Return a matrix of the unit that is read, for the compute that is issued next."""
        self.wait_for(key, piece)
        return self._read(key).slot.matrices[role].weight

    def _read(self, key: int) -> _Filled:
        filled = self._reading
        if filled is None or filled.position != self._positions[key]:
            raise RuntimeError(f"weights {key} are read out of turn")
        return filled

    # -- single pieces, for task lists with explicit dependencies --------------------

    def piece_work(self, key: int, piece: WeightPiece, slot: int) -> Work:
        """Return work that copies one piece of a unit into a slot.

        Nothing else may be under way, and all work that `reading` began must be done.
        """
        filled = self._slots[slot]
        filled.position, filled.arrived, filled.read = None, {}, None
        return self._work(filled, self._positions[key], [piece])

    @contextmanager
    def lent(self, key: int, piece: WeightPiece, slot: int) -> Iterator[None]:
        """Use a piece that arrived in a slot while compute that reads it is issued."""
        filled = self._slots[slot]
        filled.position, filled.arrived = self._positions[key], {piece: DoneEvent()}
        try:
            with self._lent(filled):
                yield
        finally:
            filled.position, filled.arrived = None, {}

    @contextmanager
    def _lent(self, filled: _Filled) -> Iterator[None]:
        self._reading = filled
        try:
            yield
        finally:
            self._reading = None
            filled.read = self._require_lanes().record_event()

    # -- filling ---------------------------------------------------------------------

    def _fill(self, first: int) -> None:
        """Send as many units from `first` on as there are slots; the next pass follows."""
        wanted = [(first + ahead) % len(self._units) for ahead in range(len(self._slots))]
        held = {filled.position for filled in self._slots}
        for position in wanted:
            if position in held:
                continue
            filled = next(each for each in self._slots if each.position not in wanted)
            filled.position, filled.arrived = position, {}
            for pieces in self.portions:
                event = self._send(filled, position, pieces)
                filled.arrived.update(dict.fromkeys(pieces, event))
            filled.read = None

    def _send(self, filled: _Filled, position: int, pieces: Sequence[WeightPiece]) -> Event:
        after = [] if filled.read is None else [filled.read]
        work = self._work(filled, position, pieces)
        return self._require_lanes().run(Lane.WEIGHTS_IN, work, after)

    def _work(self, filled: _Filled, position: int, pieces: Sequence[WeightPiece]) -> Work:
        sources, targets = self._units[position].parts, filled.slot.parts
        pairs = [
            pair for piece in pieces for pair in zip(targets[piece], sources[piece], strict=True)
        ]

        def call() -> None:
            for target, source in pairs:
                copy(target, source)

        size = sum(target.numel() for target, _ in pairs)
        name = pieces[0].value if len(pieces) == 1 else "weights"
        is_layer = WeightPiece.HEAD not in pieces
        layer = self.keys[position] if is_layer else None
        return Work(name, call, size, size, layer)

    def _holding(self, position: int) -> _Filled:
        return next(each for each in self._slots if each.position == position)

    def _require_lanes(self) -> Lanes:
        if self.lanes is None:
            raise RuntimeError("weights on the host need lanes to come over")
        return self.lanes


@dataclass(frozen=True, slots=True)
class LentMatrix:
    """A matrix of a unit on the host; see `linear.Weight`."""

    stream: WeightStream
    key: int
    role: str
    piece: WeightPiece
    out_features: int
    layout: Layout
    group: int = 0

    @property
    def weight(self) -> torch.Tensor:
        return self.stream.matrix(self.key, self.role, self.piece)
