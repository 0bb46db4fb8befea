"""Fetches a layer's rows while the layer before it computes, for some rows of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.lanes.lanes import Event
from worker_service.model.model import CarryOut, Model, at_once
from worker_service.model.rope import Rotary
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.screen import Guess


@dataclass(frozen=True, slots=True)
class RowReader:
    """A row of a forward pass that attends rows of stored tokens.

    Attributes:
        row: its place in the pass; position: of its token.
        on_device: see `SequenceReads.begin`; empty if it is not dynamic.
    """

    row: int
    position: int
    reads: SequenceReads
    on_device: torch.Tensor


class RowsAhead:
    """The rows that one forward pass reads by selections.

    A layer's tokens are chosen by the residual that enters the layer before it. What no earlier
    residual foretells is chosen when its layer begins: the first one's tokens, and those of every
    layer where weights are on the host.
    """

    def __init__(
        self,
        model: Model,
        readers: Sequence[RowReader],
        rows: torch.Tensor,
        positions: torch.Tensor,
        carry_out: CarryOut = at_once,
    ) -> None:
        """`rows`, `positions`: those of the readers, int64 on the device once the pass begins."""
        self._model = model
        self._readers = readers
        self._rows = rows
        self._positions = positions
        self._carry_out = carry_out
        self._rotary: Rotary | None = None
        self._arriving: dict[int, list[Event]] = {}

    def enter(self, index: int, hidden: torch.Tensor) -> None:
        """Begin to fetch, given the residual `[N, h]` that enters a layer; see `Enter`."""
        if not self._readers:
            return
        if index == 0:
            self._rotary = self._model.rotary(self._positions)
        if index == 0 or not self._model.is_resident:
            self._begin(index, hidden)
        if self._model.is_resident and index + 1 < len(self._model.layers):
            self._begin(index + 1, hidden)

    def arriving(self, index: int) -> list[Event]:
        """Return the events before which the layer's rows must not be attended."""
        return self._arriving.pop(index, [])

    def _begin(self, index: int, hidden: torch.Tensor) -> None:
        readers = [
            (place, each) for place, each in enumerate(self._readers) if each.reads.selects(index)
        ]
        if not readers:
            return
        guess = self._carry_out("guess", index, partial(self._guess, index, hidden))
        self._arriving[index] = [
            each.reads.begin(
                index,
                Guess(
                    guess.inputs[place : place + 1],
                    guess.queries[place : place + 1],
                    each.position,
                ),
                self._carry_out,
                each.on_device,
            )
            for place, each in readers
        ]

    def _guess(self, index: int, hidden: torch.Tensor) -> Guess:
        """Return what all readers ask of a layer, one row each."""
        layer = self._model.layers[index]
        layer.await_weights(WeightPiece.QUERY)
        return Guess(*layer.ask(hidden.index_select(0, self._rows), self._rotary), 0)
