"""A decoder-only transformer as plain tensors, configured by data.

Its callers decide where keys and values live, which requests the rows belong to, and what happens
to the logits. The output head's matrix may stream from the host, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional

from splitpoint.checkpoint.decoder import DecoderConfig, Norm, read_decoder
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, WEIGHT_SLOTS, OnHost
from splitpoint.planning.weight_schedule import WeightOrder, WeightPiece
from splitpoint.progress import Ticker
from splitpoint.shapes import WeightFormat
from worker_service.checkpoint.names import HEAD_NAME, NAMES, expected_tensors
from worker_service.checkpoint.quantized import stacked
from worker_service.checkpoint.tensors import Checkpoint, RandomTensors, TensorSource
from worker_service.device.cache import TORCH_TYPES
from worker_service.kernels.choice import Layout
from worker_service.lanes.lanes import Lanes
from worker_service.model.forward import through_layers
from worker_service.model.layer import DecoderLayer, NormWeights
from worker_service.model.linear import Linear, Weight
from worker_service.model.model import Attend, CarryOut, Enter, WriteLast, at_once
from worker_service.model.rope import Rotary, RotaryTable
from worker_service.weights.host import HostUnit, Slot, read_tensor, read_unit, units_of_rows
from worker_service.weights.matrices import MatrixShape, head_rows, layer_matrices
from worker_service.weights.packing import Matrix, check_format, layout_of
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


_DATA_TYPES = {dtype: data_type for data_type, dtype in TORCH_TYPES.items()}


class Decoder:
    """Embedding, layers and output head.

    A step is `hidden = run(ids, positions, attend)`, then `logits(hidden[rows])`.

    Attributes:
        config, shape: of the model; `shape.data_type` is `dtype`.
        weights: the format of the matrices of layers and head.
        layers: in order. If a layer's weights are on the host, only its norms and window
            may be used outside of `visit`.
        layer_weights: streams the layers' weights from the host; None: all are on the
            device.
        weight_bytes: bytes of all weights on the device, slots included. A CPU holds tied
            embeddings twice: as the table and as the head's packed matrix.
    """

    code = "our decoder"

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        on_host: OnHost = NOTHING_ON_HOST,
        weights: WeightFormat = WeightFormat.NATIVE,
    ) -> None:
        """See `load`."""
        check_format(weights, device, dtype)
        self.config = config
        self.shape = config.shape
        self.device = device
        self.dtype = dtype
        self.weights = weights
        self.weight_bytes = 0
        self._source = source
        names = NAMES[config.shape.family]
        root = names.root
        read_table = self._host_table if on_host.table else self._tensor
        self._embedding = read_table(f"{root}{names.embedding}.weight")
        self._positions = (
            None
            if config.position_offset is None
            else read_table(f"{root}{names.positions}.weight")
        )
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        if config.embedding_size != config.shape.hidden_size:
            self._project_in = Linear(self._matrix([root + names.project_in]))
            self._project_out = Linear(self._matrix([root + names.project_out]))
        self._rotary, self._local_rotary = (
            None if rope is None else RotaryTable(rope, config.shape.head_dim, device, dtype)
            for rope in (config.rope, config.local_rope)
        )
        scale = config.embedding_scale
        # Rounded as in the training of the checkpoints.
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self.layer_weights = self._stream_layers(on_host.layers) if on_host.layers else None
        self.layers = [self._layer(index) for index in range(config.shape.layer_count)]
        self._final_norm = self._norm(root + names.final_norm) if config.final_norm else None
        self._head_weights: WeightStream | None = None
        self._head: Linear | StreamedHead
        if on_host.head:
            self._head_weights, self._head = self._stream_head()
        else:
            self._head = self._make_head()
        del self._source

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        on_host: OnHost = NOTHING_ON_HOST,
        tickers: Sequence[Ticker] = (),
        weights: WeightFormat = WeightFormat.NATIVE,
        *,
        context_length: int | None = None,
    ) -> Decoder:
        """Load a checkpoint folder; dtype None means the checkpoint's own.

        `context_length`: tokens of its `shape`, at most the checkpoint's; None: as many.
        `on_host` names the weights that stay on the host; `tickers` receive the bytes
        read. Raises InvalidArgument for an unsupported config or bad weight files, and
        FailedPrecondition if this device has no kernel for the format.
        """
        data_type = None if dtype is None else _DATA_TYPES[dtype]
        config = read_decoder(folder, data_type)
        dtype = TORCH_TYPES[config.shape.data_type]
        # Tables of positions are read whole.
        shape = replace(config.shape, context_length=context_length or config.shape.context_length)
        with Checkpoint(folder, config, device, dtype, tickers) as source:
            config = replace(config, shape=shape)
            return cls(config, source, device, dtype, on_host, weights)

    @classmethod
    def random(
        cls,
        config: DecoderConfig,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        on_host: OnHost = NOTHING_ON_HOST,
        weights: WeightFormat = WeightFormat.NATIVE,
    ) -> Decoder:
        """Make a model with random weights, for measurements and tests."""
        shape = replace(config.shape, data_type=_DATA_TYPES[dtype])
        config = replace(config, shape=shape)
        source = RandomTensors(config, seed, device, dtype)
        return cls(config, source, device, dtype, on_host, weights)

    # -- weights on the host --------------------------------------------------------

    def use_lanes(self, lanes: Lanes) -> None:
        """Set the lanes that stream weights, before the first pass."""
        for stream in self._streams:
            stream.lanes = lanes

    def look_ahead(self) -> None:
        """Begin to stream the first weights of the next pass, if any are on the host."""
        for stream in self._streams:
            stream.look_ahead()

    def visit(self) -> Generator[DecoderLayer]:
        """Yield the layers in order; each may be used until the next one is requested."""
        self.look_ahead()
        for index, layer in enumerate(self.layers):
            stream = self._stream_of(index)
            if stream is not None:
                with stream.reading(index):
                    yield layer
            else:
                yield layer

    @property
    def host_memory(self) -> list[torch.Tensor]:
        """The mappings of weights on the host; empty if all are on the device."""
        return [memory for stream in self._streams for memory in stream.memory]

    def host_weight_bytes(self, piece: WeightPiece | None = None) -> int:
        """Return the bytes that cross the link in each step, of one piece or of all."""
        return sum(stream.bytes_of(piece) for stream in self._streams)

    @property
    def is_resident(self) -> bool:
        """True if no matrix streams from the host."""
        return not self._streams

    def _stream_of(self, layer: int) -> WeightStream | None:
        """Return the stream of this layer's weights; None if they are on the device."""
        stream = self.layer_weights
        return stream if stream is not None and layer in stream else None

    @property
    def _streams(self) -> list[WeightStream]:
        streams = (self.layer_weights, self._head_weights)
        return [stream for stream in streams if stream is not None]

    # -- computing ----------------------------------------------------------------

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        carry_out: CarryOut = at_once,
        enter: Enter | None = None,
    ) -> torch.Tensor:
        """See Model."""
        hidden, rotary = self.embed(token_ids, positions), self.rotary(positions)
        return through_layers(self.visit(), hidden, rotary, attend, carry_out, enter)

    def fill(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        write_last: WriteLast,
    ) -> None:
        """See Model."""
        hidden, rotary = self.embed(token_ids, positions), self.rotary(positions)
        layers = self.visit()
        hidden = through_layers(islice(layers, len(self.layers) - 1), hidden, rotary, attend)
        for last in layers:
            write_last(*last.project_kv(last.attention_input(hidden), rotary))

    def first_inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self.layers[0].attention_input(self.embed(token_ids, positions))

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map ids and positions, int64 `[N]`, to the first hidden `[N, h]`."""
        hidden = _rows(self._embedding, token_ids)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            offset = self.config.position_offset or 0
            hidden = hidden + _rows(self._positions, positions + offset)
        return hidden

    def rotary(self, positions: torch.Tensor) -> Rotary | None:
        """Return the angles of int64 `[N]` positions; None if the model has no RoPE."""
        if self._rotary is None:
            return None
        rotary = self._rotary.at(positions)
        if self._local_rotary is None:
            return rotary
        return replace(rotary, local=self._local_rotary.at(positions))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the last hidden `[M, h]` to fp32 logits `[M, vocabulary]`."""
        return self.head(self.final(hidden))

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the last hidden `[M, h]` to what the head reads, `[M, embedding size]`."""
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return hidden

    def head(self, final: torch.Tensor) -> torch.Tensor:
        """Map what `final` returned to fp32 logits `[M, vocabulary]`."""
        logits = self._head(final).to(torch.float32)
        cap = self.config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    # -- building -----------------------------------------------------------------

    def _layer(self, index: int) -> DecoderLayer:
        config, shape, names = self.config, self.shape, NAMES[self.shape.family]
        prefix = f"{names.root}layers.{index}."
        stream = self._stream_of(index)
        biased = {
            "query": config.qkv_bias,
            "key_value": config.qkv_bias,
            "output": config.output_bias,
            **dict.fromkeys(("gate", "up", "down"), config.mlp_bias),
        }
        linears = {
            matrix.role: Linear(
                self._layer_weight(index, matrix),
                self._bias(matrix) if biased[matrix.role] else None,
            )
            for matrix in layer_matrices(config, index)
        }
        layer = DecoderLayer(
            head_dim=shape.head_dim,
            scale=config.score_scale,
            cap=config.score_cap,
            window=config.windows[index],
            norm_before=config.norm_before,
            activation=config.activation,
            query=linears["query"],
            key_value=linears["key_value"],
            output=linears["output"],
            gate=linears.get("gate"),
            up=linears["up"],
            down=linears["down"],
            attention_norm=self._norm(prefix + names.attention_norm),
            mlp_norm=self._norm(prefix + names.mlp_norm),
            query_norm=self._head_norm(prefix + names.query_norm),
            key_norm=self._head_norm(prefix + names.key_norm),
            post_attention_norm=self._post_norm(prefix + names.post_attention_norm),
            post_mlp_norm=self._post_norm(prefix + names.post_mlp_norm),
            arrival=None if stream is None else partial(stream.wait_for, index),
        )
        return layer.in_two_calls(self.dtype)

    def _layer_weight(self, index: int, shape: MatrixShape) -> Weight:
        stream = self._stream_of(index)
        if stream is None:
            return self._held(shape)
        layout = layout_of(self.device, self.dtype)
        return LentMatrix(stream, index, shape.role, shape.piece, shape.out_features, layout)

    def _bias(self, shape: MatrixShape) -> torch.Tensor:
        parts = [self._tensor(f"{name}.bias") for name, _ in shape.sources]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _stream_layers(self, host_layers: Sequence[int]) -> WeightStream:
        shapes = layer_matrices(self.config, host_layers[0])
        units = {
            index: read_unit(
                self._source,
                layer_matrices(self.config, index),
                self.device,
                self.dtype,
                self.weights,
            )
            for index in host_layers
        }
        return self._stream(units, shapes, WeightOrder.FINE.portions)

    def _stream_head(self) -> tuple[WeightStream, StreamedHead]:
        pieces = head_rows(self.config)
        tied = self.shape.tied_embeddings
        if self.weights is WeightFormat.INT8:
            units = dict(
                enumerate(units_of_rows(self._exact_head(), pieces, self.device, self.dtype))
            )
        else:
            weight = self._embedding if tied else self._host_table(f"{HEAD_NAME}.weight")
            units = dict(enumerate(units_of_rows(weight, pieces, self.device)))
        width = self.config.embedding_size
        shape = MatrixShape("head", WeightPiece.HEAD, ((HEAD_NAME, len(pieces[0])),), width)
        stream = self._stream(units, [shape], ((WeightPiece.HEAD,),))
        layout = layout_of(self.device, self.dtype)
        return stream, StreamedHead(stream, shape.role, pieces, layout)

    def _stream(
        self,
        units: Mapping[int, HostUnit],
        shapes: Sequence[MatrixShape],
        portions: Sequence[Sequence[WeightPiece]],
    ) -> WeightStream:
        count = min(WEIGHT_SLOTS, len(units))
        slots = [Slot.empty(shapes, self.device, self.dtype, self.weights) for _ in range(count)]
        stream = WeightStream(units, slots, portions)
        self.weight_bytes += stream.slot_bytes
        return stream

    def _make_head(self) -> Linear:
        if self.weights is WeightFormat.INT8:
            return Linear(self._quantized(self._exact_head()))
        if not self.shape.tied_embeddings:
            return Linear(self._matrix([HEAD_NAME]))
        matrix = Matrix(self._embedding)
        if matrix.layout is not Layout.PLAIN:
            self.weight_bytes += matrix.size_bytes
        return Linear(matrix)

    def _held(self, shape: MatrixShape) -> Matrix:
        """Return a layer's matrix on the device, in the format of the weights."""
        if self.weights is WeightFormat.NATIVE:
            return self._matrix([name for name, _ in shape.sources])
        exact = torch.empty((shape.out_features, shape.in_features), dtype=torch.float32)
        shape.read(self._source, exact)
        return self._quantized(exact)

    def _exact_head(self) -> torch.Tensor:
        """Return the head in full precision, `[vocabulary, in]`."""
        name = HEAD_NAME
        if self.shape.tied_embeddings:
            names = NAMES[self.shape.family]
            name = names.root + names.embedding
        exact = torch.empty(
            (self.shape.vocabulary_size, self.config.embedding_size), dtype=torch.float32
        )
        self._source.read_into(f"{name}.weight", exact)
        return exact

    def _quantized(self, exact: torch.Tensor) -> Matrix:
        matrix = Matrix(exact, int8_for=self.dtype)
        self.weight_bytes += matrix.size_bytes
        return matrix

    def _matrix(self, names: Sequence[str]) -> Matrix:
        """Stack stored matrices over the same input into one on the device."""
        source = self._source
        read = source.matrix if isinstance(source, Checkpoint) else source.get
        stored = stacked([read(f"{name}.weight") for name in names], self.dtype)
        matrix = Matrix.of(stored, self.dtype)
        self.weight_bytes += matrix.size_bytes
        return matrix

    def _norm(self, name: str) -> NormWeights:
        weight = self._tensor(f"{name}.weight")
        bias = self._tensor(f"{name}.bias") if self.config.norm is Norm.LAYER else None
        if self.config.norm is Norm.RMS_PLUS_ONE:
            self.weight_bytes -= weight.nbytes
            weight = weight.to(torch.float32) + 1
            self.weight_bytes += weight.nbytes
        return NormWeights(self.config.norm, weight, bias, self.config.norm_epsilon)

    def _post_norm(self, name: str) -> NormWeights | None:
        return self._norm(name) if self.config.post_norms else None

    def _head_norm(self, name: str) -> NormWeights | None:
        return self._norm(name) if self.config.query_key_norm else None

    def _host_table(self, name: str) -> torch.Tensor:
        size = expected_tensors(self.config)[name]
        return read_tensor(self._source, name, size, self.dtype)

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.get(name)
        self.weight_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `table[index]` on the device of `index`; only these rows leave a host table."""
    if table.device == index.device:
        return functional.embedding(index, table)
    return functional.embedding(index.to(table.device), table).to(index.device)
