"""The output head whose matrix streams from the host, some rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.kernels.choice import Layout
from worker_service.model.linear import Linear
from worker_service.weights.stream import LentMatrix, WeightStream


class StreamedHead:
    """Computes the product of a Linear from pieces `[rows, in]` of its matrix."""

    def __init__(
        self, stream: WeightStream, role: str, pieces: Sequence[range], layout: Layout
    ) -> None:
        """`pieces[i]`: the rows of the stream's unit i; together they are all rows."""
        self._stream = stream
        self._pieces = [
            (rows, Linear(LentMatrix(stream, index, role, WeightPiece.HEAD, len(rows), layout)))
            for index, rows in enumerate(pieces)
        ]
        self._out_features = pieces[-1].stop

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `[M, in]` to `[M, out]`; without rows nothing streams."""
        product = rows.new_empty((len(rows), self._out_features))
        if not len(rows):
            return product
        for index, (piece, linear) in enumerate(self._pieces):
            with self._stream.reading(index):
                product[:, piece.start : piece.stop] = linear(rows)
        return product
