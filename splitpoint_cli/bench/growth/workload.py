"""The workload of `bench growth`; needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from splitpoint.costs.page_choice import MOST_PAGE, Rows
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.bench.shared.options import built_in_shape, check_data_type

# Smaller pages have no use: the store has a record of each chunk.
LEAST_PAGE = 8


@dataclass(frozen=True, slots=True)
class Point:
    """`new` tokens are generated for each of `batch` sequences."""

    batch: int
    new: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.new}"


@dataclass(frozen=True, slots=True)
class GrowthWorkload:
    """Attention of `layers` layers of a shape at each point, after `prompt` rows a sequence."""

    shape: str
    dtype: str
    layers: int
    prompt: int
    points: tuple[Point, ...]
    threads: int
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        shape = built_in_shape(self.shape)
        check_data_type(self.dtype)
        if self.layers > shape.layer_count:
            raise InvalidArgument(f"{shape.name} has {shape.layer_count} layers", field="layers")

    @property
    def model_shape(self) -> ModelShape:
        """The shape with the workload's type and layers; contexts may be longer than its own,
        since positions cost attention nothing."""
        return replace(
            BUILT_IN_SHAPES[self.shape],
            data_type=DataType(self.dtype),
            layer_count=self.layers,
            context_length=self.prompt + max(point.new for point in self.points),
        )

    def rows(self, point: Point) -> Rows:
        return Rows(self.prompt, point.new)

    def page_sizes(self, point: Point) -> tuple[int, ...]:
        """Return the page sizes measured at a point: powers of two up to its new tokens and to the
        largest that `--page-tokens auto` chooses."""
        return tuple(size for size in self.rows(point).bucket_sizes if _is_page(size))


def _is_page(size: int) -> bool:
    return LEAST_PAGE <= size <= MOST_PAGE and size & (size - 1) == 0


def read_points(text: str) -> tuple[Point, ...]:
    """Return the points of a text such as "8x64,8x256". Raises InvalidArgument."""
    points = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*([1-9]\d{0,3})x([1-9]\d{0,4})\s*", word)
        if found is None or int(found[2]) < 2 * LEAST_PAGE:
            raise InvalidArgument(
                f"{word!r} is no point: 8x256 means 256 new tokens of each of 8 sequences, "
                f"and at least {2 * LEAST_PAGE} tokens",
                field="points",
            )
        points.append(Point(int(found[1]), int(found[2])))
    if len({*points}) < len(points):
        raise InvalidArgument("a point is named twice", field="points")
    return tuple(points)
