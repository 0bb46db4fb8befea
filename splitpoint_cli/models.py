"""Shapes of models that the command line names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from splitpoint.checkpoint.any_decoder import SPARSE_SHAPES
from splitpoint.checkpoint.config import unsupported, with_context
from splitpoint.checkpoint.decoder import ModelBackend, Support, read_decoder, support_of
from splitpoint.checkpoint.quantized import panels_for
from splitpoint.checkpoint.resolve import NO_SUCH_MODEL, resolve_model
from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.errors import InvalidArgument, NotFound
from splitpoint.extras import is_installed
from splitpoint.options.store import INT8_NEEDS_OWN
from splitpoint.planning.weight_placement import WeightSizes
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape, WeightFormat
from worker_service.checkpoint.names import position_bytes, vector_bytes

# Shapes that commands which plan know by name.
KNOWN_SHAPES = BUILT_IN_SHAPES | SPARSE_SHAPES
# The model of commands that plan, unless one is named or measured.
DEFAULT_SHAPE = "llama-3.1-8b"


def model_shape(
    folder: Path,
    dtype: str,
    backend: str = ModelBackend.AUTO,
    max_model_len: int | None = None,
) -> ModelShape:
    """Return a checkpoint's shape in this element type; "auto" is the stored one.

    Its context is at most `max_model_len`. Raises InvalidArgument if this version does not serve
    the checkpoint.
    """
    return served_shape(folder, parse_dtype(dtype), ModelBackend(backend), max_model_len)


def served_shape(
    folder: Path,
    data_type: DataType | None = None,
    backend: ModelBackend = ModelBackend.AUTO,
    max_model_len: int | None = None,
) -> ModelShape:
    """Return a checkpoint's shape. Raises InvalidArgument if this version does not serve it.

    Where no worker is installed, config.json alone decides.
    """
    support = support_of(folder, data_type, backend)
    if support.decoder is None and support.shape is not None and is_installed("worker"):
        # Takes seconds to import, for checkpoints that transformers' code would compute.
        from worker_service.startup.model_source import source_of

        source = source_of(folder, data_type, backend, max_model_len=max_model_len)
        return source.config.shape
    return with_context(support.required_shape, max_model_len)


def cpu_format(support: Support, weights: WeightFormat) -> str | None:
    """Return what of these weights CPUs alone have kernels for; None: nothing.

    Raises InvalidArgument for int8 weights of a model that cannot have them.
    """
    what = panels_for(weights, support.quantization)
    if weights is WeightFormat.INT8 and support.decoder is None:
        raise InvalidArgument(INT8_NEEDS_OWN, field="weights")
    return what


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

    def weight_sizes(
        self, weights: WeightFormat = WeightFormat.NATIVE, *, is_gpu: bool
    ) -> WeightSizes:
        """Return the bytes of its weights as a worker holds them, without padding.

        Of a checkpoint that our own decoder computes norms, biases and positions are counted, too,
        and the matrices around a table of another width than the residuals' (OPT-350M).
        """
        sizes = WeightSizes.of(self.shape, weights, is_gpu=is_gpu)
        if self.folder is None or not sizes.can_stream:
            return sizes
        decoder, item = read_decoder(self.folder, self.shape.data_type), self.shape.data_type.size
        fixed, hidden = vector_bytes(decoder, item), self.shape.hidden_size
        if decoder.embedding_size != hidden:
            fixed += 2 * hidden * decoder.embedding_size * item

        def of_table(size: int) -> int:
            return size * decoder.embedding_size // hidden

        return dataclasses.replace(
            sizes,
            fixed=fixed,
            table=of_table(sizes.table) + position_bytes(decoder, item),
            head=of_table(sizes.head),
            head_piece=of_table(sizes.head_piece),
        )


def find_shape(model: str, dtype: str = "auto") -> ModelShape:
    """Return the shape of `find_named`."""
    return find_named(model, dtype).shape


def find_named(model: str, dtype: str = "auto") -> NamedModel:
    """Return a built-in shape by name, else a checkpoint on this machine.

    Raises NotFound if `model` is neither, InvalidArgument for a folder that is no checkpoint.
    """
    data_type = parse_dtype(dtype)
    built_in = KNOWN_SHAPES.get(model.lower())
    if built_in is not None:
        if data_type is not None:
            held = built_in.held_weight_bytes
            if held is not None:
                held = held // built_in.data_type.size * data_type.size
            built_in = dataclasses.replace(built_in, data_type=data_type, held_weight_bytes=held)
        return NamedModel(built_in)
    try:
        folder = resolve_model(model, download=False)
    except (NotFound, InvalidArgument) as error:
        if isinstance(error, InvalidArgument) and error.reason != NO_SUCH_MODEL:
            raise
        raise NotFound(
            f"{error.message}, nor one of the built-in shapes: {', '.join(KNOWN_SHAPES)}"
        ) from error
    return NamedModel(served_shape(folder, data_type), folder)


def find_profiled(model: str | None, dtype: str, profile: Profile, name_or_path: str) -> NamedModel:
    """Return the model that a profile's costs are for.

    Args:
        model: as given on the command line, or None for the model that the profile names; the
            default of built-in profiles, which fit any model, is DEFAULT_SHAPE.
        name_or_path: of the profile.

    Raises InvalidArgument if a measured profile names another model, or names none and `model` is
    None; and the errors of `find_named`.
    """
    is_built_in = name_or_path.lower() in BUILT_IN_PROFILES
    if model is None and is_built_in:
        return find_named(DEFAULT_SHAPE, dtype)
    if model is None:
        if not profile.model:
            raise InvalidArgument(
                f"{name_or_path} does not say with which model its costs were measured: "
                "give --model",
                field="model",
            )
        try:
            return find_named(profile.model, dtype)
        except NotFound as error:
            raise NotFound(
                f"the costs in {name_or_path} are those of the model {profile.model}, which is not "
                "on this machine: give its folder by --model"
            ) from error
    found = find_named(model, dtype)
    if not _fits(profile, found.shape):
        raise InvalidArgument(
            f"the costs in {name_or_path} are those of the model {profile.model}, not of "
            f"{found.shape.name}: leave --model out, or give the profile of a worker that serves "
            f"{found.shape.name}",
            field="model",
        )
    return found


def format_note(served: NamedModel, weights: WeightFormat, profile: str) -> str | None:
    """Return what a checkpoint's weights lack on the machine of this profile; None: nothing.

    Profiles with a name are those of GPUs. Raises InvalidArgument as `cpu_format`.
    """
    what = None if served.folder is None else cpu_format(support_of(served.folder), weights)
    if what is None or profile.lower() not in BUILT_IN_PROFILES:
        return None
    return f"{what} is for CPU workers: a GPU worker refuses it"


def costs_for(profile: Profile, shape: ModelShape) -> Profile:
    """Return a profile without what it measured of another model: its step and its host weights.

    Rates of the link and of the device are those of the machine, whatever the model.
    """
    if _fits(profile, shape):
        return profile
    return dataclasses.replace(
        profile,
        step_compute_seconds=0.0,
        host_weight_bytes=0,
        host_kv_weight_bytes=0,
        description=f"{profile.description} (rates measured with {profile.model})".strip(),
    )


def _fits(profile: Profile, shape: ModelShape) -> bool:
    """Return False for costs of another model. A copied folder's name lacks the owner."""
    names = [name.rpartition("/")[2].casefold() for name in (profile.model, shape.name)]
    return not profile.model or names[0] == names[1]


def find_draft(
    model: str, served_folder: Path, served: ModelShape, *, download: bool = True
) -> tuple[Path, ModelShape]:
    """Return the folder of a draft model, and its shape in the served model's element type.

    Raises InvalidArgument (no checkpoint, another vocabulary), and the errors of
    `resolve_model`.
    """
    from splitpoint.checkpoint.vocabulary import check_vocabulary  # loads the tokenizers library

    folder = resolve_model(model, download=download)
    try:
        decoder = read_decoder(folder, served.data_type)
        if panels_for(WeightFormat.NATIVE, decoder.quantization) is not None:
            raise unsupported("a quantised model does not draft", "quantization_config")
    except InvalidArgument as error:
        message = f"the draft model {model}: {error.message}"
        raise InvalidArgument(message, field="draft_model", reason=error.reason) from error
    check_vocabulary(folder, decoder.shape, served_folder, served)
    return folder, decoder.shape
