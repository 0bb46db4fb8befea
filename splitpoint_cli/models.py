"""Shapes of models that the command line names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from splitpoint.checkpoint.resolve import NO_SUCH_MODEL, resolve_model
from splitpoint.checkpoint.support import read_shape
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


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that a command names: its shape, and its folder if it is a checkpoint."""

    shape: ModelShape
    folder: Path | None = None


def find_shape(model: str, dtype: str = "auto") -> ModelShape:
    """Return the shape of `find_named`."""
    return find_named(model, dtype).shape


def find_named(model: str, dtype: str = "auto") -> NamedModel:
    """Return a built-in shape by name, else a checkpoint on this machine.

    Raises NotFound if `model` is neither, InvalidArgument for a folder that is no checkpoint.
    """
    data_type = parse_dtype(dtype)
    built_in = BUILT_IN_SHAPES.get(model.lower())
    if built_in is not None:
        if data_type is not None:
            built_in = dataclasses.replace(built_in, data_type=data_type)
        return NamedModel(built_in)
    try:
        folder = resolve_model(model, download=False)
    except (NotFound, InvalidArgument) as error:
        if isinstance(error, InvalidArgument) and error.reason != NO_SUCH_MODEL:
            raise
        raise NotFound(
            f"{error.message}, nor one of the built-in shapes: {', '.join(BUILT_IN_SHAPES)}"
        ) from error
    return NamedModel(read_shape(folder, data_type=data_type), folder)


def find_draft(
    model: str, served_folder: Path, served: ModelShape, *, download: bool = True
) -> tuple[Path, ModelShape]:
    """Return the folder of a draft model, and its shape in the served model's element type.

    Raises InvalidArgument (no checkpoint, another vocabulary), and the errors of
    `resolve_model`.
    """
    from splitpoint.checkpoint.vocabulary import check_vocabulary  # loads the tokenizers library

    folder = resolve_model(model, download=download)
    shape = read_shape(folder, data_type=served.data_type)
    check_vocabulary(folder, shape, served_folder, served)
    return folder, shape
