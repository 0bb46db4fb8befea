"""Pictures: the optional matplotlib, without a display and without global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splitpoint.errors import InvalidArgument
from splitpoint.extras import need
from splitpoint_cli.files import check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150


def check_picture(path: Path) -> None:
    """Before work that ends in a picture: that it can be drawn and has a place.

    Raises MissingExtra when matplotlib is missing, InvalidArgument for the path.
    """
    new_figure(1, 1)
    if path.suffix.lower() != ".png":
        raise InvalidArgument(f"{path}: pictures are PNG files", field="png")
    check_output(path, "png")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches. Raises MissingExtra without matplotlib."""
    need("a picture", "plots")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png")
