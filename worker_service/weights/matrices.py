"""The matrices of a model: names, shapes and pieces, in the order in which a step needs them.

Matrices over the same input whose products are needed together are stacked into one
(W_K on W_V).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.planning.weight_placement import WeightSizes, head_piece_count
from splitpoint.planning.weight_schedule import LAYER_PIECES, WeightPiece
from splitpoint.shapes import WeightFormat
from worker_service.checkpoint.names import (
    HEAD_NAME,
    NAMES,
    expected_tensors,
    position_bytes,
    vector_bytes,
)
from worker_service.checkpoint.tensors import TensorSource
from worker_service.kernels.choice import Layout
from worker_service.weights.packing import held_bytes, layout_of


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """One matrix `[out_features, in_features]` that a linear layer multiplies with.

    Attributes:
        role: its field of DecoderLayer.
        sources: the stored matrices that are stacked: (name without `.weight`, rows).
    """

    role: str
    piece: WeightPiece
    sources: tuple[tuple[str, int], ...]
    in_features: int

    @property
    def out_features(self) -> int:
        return sum(rows for _, rows in self.sources)

    def read(self, source: TensorSource, target: torch.Tensor) -> None:
        """Read the matrix into `[out_features, in_features]`, on any device."""
        first = 0
        for name, rows in self.sources:
            source.read_into(f"{name}.weight", target[first : first + rows])
            first += rows


def layer_matrices(config: DecoderConfig, layer: int) -> tuple[MatrixShape, ...]:
    """Return one layer's matrices, in the order of `LAYER_PIECES`."""
    shape, names = config.shape, NAMES[config.shape.family]
    prefix = f"{names.root}layers.{layer}."
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def matrix(role: str, piece: WeightPiece, width: int, *sources: tuple[str, int]) -> MatrixShape:
        listed = tuple((prefix + name, rows) for name, rows in sources)
        return MatrixShape(role, piece, listed, width)

    kv = ((names.key, shape.kv_width), (names.value, shape.kv_width))
    matrices = [
        matrix("key_value", WeightPiece.KEY_VALUE, hidden, *kv),
        matrix("query", WeightPiece.QUERY, hidden, (names.query, shape.query_width)),
        matrix("output", WeightPiece.OUTPUT, shape.query_width, (names.output, hidden)),
    ]
    if shape.gated_mlp:
        matrices.append(matrix("gate", WeightPiece.MLP, hidden, (names.gate, inner)))
    matrices.append(matrix("up", WeightPiece.MLP, hidden, (names.up, inner)))
    matrices.append(matrix("down", WeightPiece.MLP, inner, (names.down, hidden)))
    return tuple(matrices)


def head_rows(config: DecoderConfig) -> tuple[range, ...]:
    """Return the rows of the head's pieces: equally many each, so that all fit one slot.

    The last piece may overlap the one before; computing a row twice changes nothing.
    """
    vocabulary = config.shape.vocabulary_size
    size = vocabulary * config.embedding_size * config.shape.data_type.size
    rows = -(-vocabulary // min(vocabulary, head_piece_count(size)))
    starts = [min(start, vocabulary - rows) for start in range(0, vocabulary, rows)]
    return tuple(range(start, start + rows) for start in starts)


def product_shapes(config: DecoderConfig) -> set[tuple[int, int]]:
    """Return `(out_features, in_features)` of all matrices that rows are multiplied with."""
    width, hidden = config.embedding_size, config.shape.hidden_size
    shapes = {(each.out_features, each.in_features) for each in layer_matrices(config, 0)}
    shapes |= {(config.shape.vocabulary_size, width), (len(head_rows(config)[0]), width)}
    return shapes if width == hidden else shapes | {(hidden, width), (width, hidden)}


def weight_sizes(
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightFormat = WeightFormat.NATIVE,
) -> WeightSizes:
    """Return the bytes of each part in the layout of this device, type and format."""
    shape, names = config.shape, NAMES[config.shape.family]
    how = config.quantization

    def held(rows: int, width: int, sources: Sequence[str]) -> int:
        # Of what is stacked, all or nothing is held as codes.
        is_coded = how is not None and all(map(how.covers, sources)) and len(sources) > 0
        return held_bytes(rows, width, device, dtype, weights, how if is_coded else None)

    def held_matrix(matrix: MatrixShape) -> int:
        return held(matrix.out_features, matrix.in_features, [name for name, _ in matrix.sources])

    pieces = dict.fromkeys(LAYER_PIECES, 0)
    for matrix in layer_matrices(config, 0):
        pieces[matrix.piece] += held_matrix(matrix)
    table, fixed = position_bytes(config, dtype.itemsize), vector_bytes(config, dtype.itemsize)
    projections = [f"{names.root}{each}.weight" for each in (names.project_in, names.project_out)]
    for name, size in expected_tensors(config).items():
        if name == f"{names.root}{names.embedding}.weight":
            table += prod(size) * dtype.itemsize
        elif name in projections:
            fixed += held_bytes(size[0], size[1], device, dtype)
    pieces_of_head = head_rows(config)
    # A tied head is made of the embeddings, which are stored plainly.
    head = [] if shape.tied_embeddings else [HEAD_NAME]
    sizes = WeightSizes(
        layer_count=shape.layer_count,
        pieces=pieces,
        fixed=fixed,
        table=table,
        head=held(shape.vocabulary_size, config.embedding_size, head),
        head_piece=held(len(pieces_of_head[0]), config.embedding_size, head),
        head_pieces=len(pieces_of_head),
        head_is_table=shape.tied_embeddings and layout_of(device, dtype) is Layout.PLAIN,
    )
    if how is None or not how.holds_codes:
        return sizes
    # Codes do not stream, and layers may differ in what is ignored.
    layers = [map(held_matrix, layer_matrices(config, each)) for each in range(shape.layer_count)]
    more = sum(map(sum, layers)) - shape.layer_count * sizes.layer
    return WeightSizes.held(shape.layer_count, sizes.total + more)
