"""The workload of `bench restore`; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.errors import InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.bench.shared.options import built_in_shape, check_data_type

CHUNK_TOKENS = 64
# As a worker has it: prompt tokens a step.
MAX_BATCHED_TOKENS = 512
# Rebuilt K and V may differ from the stored ones by this share of the largest of them:
# the same products, added up in another order.
TOLERANCES = {DataType.FLOAT32: 1e-5, DataType.BFLOAT16: 2e-2, DataType.FLOAT16: 2e-3}


@dataclass(frozen=True, slots=True)
class RestoreWorkload:
    """`batch` prefixes of `prompt` cached tokens, restored one after the other.

    Attributes:
        link_rate: bytes per second of an emulated link; None: the device's own.
        balance: emulate a link on which loading everything takes as long as recomputing
            everything from token ids; that is measured first.
        tile: tokens of X on the link at once; 0: as the planner says.
        layers: of the shape, that many; 0: all.
        sweep_points: splits that are measured besides 0; 0: only those near the best.
    """

    shape: str
    dtype: str
    prompt: int
    batch: int
    device: str
    threads: int
    repeats: int
    seed: int
    link_rate: int | None = None
    tile: int = 0
    layers: int = 0
    sweep_points: int = 0
    balance: bool = False

    def __post_init__(self) -> None:
        if self.balance and self.link_rate is not None:
            raise InvalidArgument("give a link rate or balance it, not both", field="balance")
        shape = built_in_shape(self.shape)
        check_data_type(self.dtype)
        if not CHUNK_TOKENS <= self.prompt <= shape.context_length:
            raise InvalidArgument(
                f"{shape.name} takes {CHUNK_TOKENS} to {shape.context_length} tokens",
                field="prompt",
            )
        if self.tile % CHUNK_TOKENS:
            raise InvalidArgument(f"a tile is a multiple of {CHUNK_TOKENS} tokens", field="tile")
        if self.layers > shape.layer_count:
            raise InvalidArgument(f"{shape.name} has {shape.layer_count} layers", field="layers")

    @property
    def data_type(self) -> DataType:
        return DataType(self.dtype)

    @property
    def model_shape(self) -> ModelShape:
        shape = BUILT_IN_SHAPES[self.shape]
        layers = self.layers or shape.layer_count
        return replace(shape, data_type=self.data_type, layer_count=layers)
