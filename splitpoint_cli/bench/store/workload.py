"""The workload of `bench store`, and the layouts of its two arenas."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.arena.format import Geometry
from splitpoint.config import format_size
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import ArenaLayout, DataType

# Eight heads of 64 in bfloat16: 64 KiB per slot and plane, 1 MiB per chunk.
DATA_LAYOUT = ArenaLayout(
    chunk_tokens=64,
    layer_count=8,
    kv_head_count=8,
    head_dim=64,
    hidden_size=512,
    data_type=DataType.BFLOAT16,
    has_activations=False,
    model_fingerprint=b"bench store: data",
)
# 4 KiB of payload a chunk: what remains is metadata.
SMALL_LAYOUT = ArenaLayout(
    chunk_tokens=16,
    layer_count=1,
    kv_head_count=1,
    head_dim=64,
    hidden_size=64,
    data_type=DataType.BFLOAT16,
    has_activations=False,
    model_fingerprint=b"bench store: metadata",
)
SALT = b"bench"
SMALL_MEMORY_BYTES = 64 << 20
# Three batches are under way at once, and the small arena holds a few times that.
MOST_BATCH = 1024


@dataclass(frozen=True, slots=True)
class StoreWorkload:
    """Sizes and counts of one run.

    Attributes:
        memory_bytes: of the arena whose payload is read.
        run_slots: contiguous slots that are copied at once.
        repeats: timed passes of each contender; they alternate.
        in_flight: control calls at once.
        calls: control calls in all, of four kinds.
        batch: chunks in one Reserve, Seal and Release.
        chunks: chunks in all that are sealed in batches.
    """

    memory_bytes: int
    run_slots: int
    repeats: int
    in_flight: int
    calls: int
    batch: int
    chunks: int
    seed: int

    def __post_init__(self) -> None:
        least = Geometry(DATA_LAYOUT, self.run_slots).size_bytes
        if self.memory_bytes < least:
            raise InvalidArgument(
                f"runs of {self.run_slots} slots need {format_size(least)}", field="memory"
            )
        if self.batch > MOST_BATCH:
            raise InvalidArgument(f"a batch has at most {MOST_BATCH} chunks", field="batch")
