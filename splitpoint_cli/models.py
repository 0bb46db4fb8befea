"""Shapes of models that the command line names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from splitpoint.checkpoint.config import read_shape
from splitpoint.checkpoint.resolve import NO_SUCH_MODEL, resolve_model
from splitpoint.errors import InvalidArgument, NotFound
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape


def model_shape(folder: Path, dtype: str) -> ModelShape:
    """Return a checkpoint's shape in this element type; "auto" is the stored one."""
    return read_shape(folder, data_type=parse_dtype(dtype))


def parse_dtype(text: str) -> DataType | None:
    """Return an element type by name; None for "auto". Raises InvalidArgument."""
    if text == "auto":
        return None
    try:
        return DataType(text)
    except ValueError:
        names = ", ".join(kind.value for kind in DataType)
        raise InvalidArgument(
            f"dtype {text!r} is not one of auto, {names}", field="dtype"
        ) from None


def find_shape(model: str, dtype: str = "auto") -> ModelShape:
    """Return a built-in shape by name, else the shape of a checkpoint on this machine.

    Raises NotFound if `model` is neither, InvalidArgument for a folder that is no checkpoint.
    """
    data_type = parse_dtype(dtype)
    built_in = BUILT_IN_SHAPES.get(model.lower())
    if built_in is not None:
        return built_in if data_type is None else dataclasses.replace(built_in, data_type=data_type)
    try:
        folder = resolve_model(model, download=False)
    except (NotFound, InvalidArgument) as error:
        if isinstance(error, InvalidArgument) and error.reason != NO_SUCH_MODEL:
            raise
        raise NotFound(
            f"{error.message}, nor one of the built-in shapes: {', '.join(BUILT_IN_SHAPES)}"
        ) from error
    return read_shape(folder, data_type=data_type)
