"""What a checkpoint's `config.json` says about the decoder, as plain data.

Every key that changes the computation is either represented here or refused by
name: a setting this code does not know must never be ignored. It knows nothing
of tensors, devices or weight files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from splitpoint.checkpoints import model_name
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType, ModelShape, read_config

OPT_POSITION_OFFSET = 2  # OPT's position table begins with two unused rows
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_RMS_EPSILON = 1e-6
_OPT_LAYER_NORM_EPSILON = 1e-5
_SILU_NAMES = ("silu", "swish")


class Norm(Enum):
    """Kind of every norm of a model."""

    LAYER = "layer"
    RMS = "rms"


class Activation(Enum):
    """Nonlinearity of the MLP; the value is oneDNN's name for it."""

    RELU = "relu"
    SILU = "swish"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `inv_freq = theta^(-2i/d)`, then scaled.

    `linear` divides all frequencies by `factor`. `llama3` divides the low ones
    by `factor`, keeps the high ones, and interpolates between the wavelengths
    `original_context / low_frequency_factor` and `.../ high_frequency_factor`.
    `dynamic` scales only beyond the context length, which no sequence here can
    exceed: it is read as `default`.
    """

    theta: float
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer.

    Attributes:
        shape: dimensions and data type.
        norm_epsilon: added to the variance in every norm.
        norm_before: norms stand before attention and MLP; False puts them after
            the residual sums (OPT-350M), so the layer input is not normalised.
        qkv_bias, output_bias, mlp_bias: which linear layers have biases.
        query_key_norm: RMS norm of every query and key head (Qwen3).
        final_norm: a norm stands before the output head.
        embedding_size: width of the embedding table; when it differs from
            hidden_size, `project_in` and `project_out` lie between (OPT-350M).
        position_offset: row of the learned position table that position 0
            uses; None: there is no table.
        rope: rotary positions; None: there are none.
        windows: per layer, how many tokens a query sees, itself included;
            None: all.
    """

    shape: ModelShape
    norm: Norm
    norm_epsilon: float
    norm_before: bool
    activation: Activation
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    final_norm: bool
    embedding_size: int
    position_offset: int | None
    rope: Rope | None
    windows: tuple[int | None, ...]

    @classmethod
    def read(cls, folder: Path, data_type: DataType | None = None) -> DecoderConfig:
        """From a checkpoint folder. Raises InvalidArgument."""
        return cls.parse(read_config(folder), name=model_name(folder), data_type=data_type)

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], *, name: str = "", data_type: DataType | None = None
    ) -> DecoderConfig:
        """From a Hugging Face `config.json`.

        `data_type` None: the checkpoint's own. Raises InvalidArgument with the
        key's name for an architecture or a setting that is not supported.
        """
        shape = ModelShape.from_config(dict(config), name=name, data_type=data_type)
        _refuse(config, "quantization_config", allowed=(None,))
        _refuse(config, "is_encoder_decoder", allowed=(None, False))
        if shape.family == "opt":
            return _opt(config, shape)
        return _rotary_family(config, shape)

    @classmethod
    def of_shape(cls, shape: ModelShape) -> DecoderConfig:
        """The usual settings of the shape's family: for random weights and measurements."""
        parsed = cls.parse(plain_config(shape), data_type=shape.data_type)
        return replace(parsed, shape=shape)


def plain_config(shape: ModelShape) -> dict[str, Any]:
    """A `config.json` with these dimensions and the family's usual settings."""
    config: dict[str, Any] = {
        "model_type": shape.family,
        "num_hidden_layers": shape.layer_count,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.query_head_count,
        "vocab_size": shape.vocabulary_size,
        "max_position_embeddings": shape.context_length,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    if shape.family == "opt":
        return {**config, "ffn_dim": shape.intermediate_size}
    return {
        **config,
        "num_key_value_heads": shape.kv_head_count,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
    }


def _opt(config: Mapping[str, Any], shape: ModelShape) -> DecoderConfig:
    _refuse(config, "activation_function", allowed=(None, "relu"))
    _refuse(config, "layer_norm_elementwise_affine", allowed=(None, True))
    _require_plain_heads(config, shape)
    norm_before = _boolean(config, "do_layer_norm_before", True)
    bias = _boolean(config, "enable_bias", True)
    embedding_size = config.get("word_embed_proj_dim")
    return DecoderConfig(
        shape=shape,
        norm=Norm.LAYER,
        norm_epsilon=_OPT_LAYER_NORM_EPSILON,
        norm_before=norm_before,
        activation=Activation.RELU,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        query_key_norm=False,
        final_norm=norm_before and not _boolean(config, "_remove_final_layer_norm", False),
        embedding_size=(
            shape.hidden_size
            if embedding_size is None
            else _positive_integer(embedding_size, "word_embed_proj_dim")
        ),
        position_offset=OPT_POSITION_OFFSET,
        rope=None,
        windows=(None,) * shape.layer_count,
    )


def _rotary_family(config: Mapping[str, Any], shape: ModelShape) -> DecoderConfig:
    """Llama, Mistral, Qwen2, Qwen3: one architecture with small differences."""
    family = shape.family
    _refuse(config, "hidden_act", allowed=(None, *_SILU_NAMES))
    if family != "llama" and "num_key_value_heads" not in config:
        # transformers has another default for each family: do not guess.
        raise _unsupported(
            f"config.json of a {family} model has no num_key_value_heads", "num_key_value_heads"
        )
    if family == "qwen3" and config.get("head_dim") is None:
        raise _unsupported("config.json of a qwen3 model has no head_dim", "head_dim")
    if shape.head_dim % 2:
        raise _unsupported(f"head_dim {shape.head_dim} is odd: it cannot be rotated", "head_dim")
    if family in ("llama", "qwen3"):
        attention_bias = _boolean(config, "attention_bias", False)
    else:
        _refuse(config, "attention_bias", allowed=(None, False))
        attention_bias = False
    if family != "llama":
        _refuse(config, "mlp_bias", allowed=(None, False))
    return DecoderConfig(
        shape=shape,
        norm=Norm.RMS,
        norm_epsilon=_positive(config.get("rms_norm_eps", _DEFAULT_RMS_EPSILON), "rms_norm_eps"),
        norm_before=True,
        activation=Activation.SILU,
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=_boolean(config, "mlp_bias", False),
        query_key_norm=family == "qwen3",
        final_norm=True,
        embedding_size=shape.hidden_size,
        position_offset=None,
        rope=_rope(config, shape),
        windows=_windows(config, shape),
    )


def _rope(config: Mapping[str, Any], shape: ModelShape) -> Rope:
    """Newer configs hold one `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise _unsupported(f"{key} must be an object, not {given!r}", key)
    parameters = dict(given)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise _unsupported(f"{key} that differ between layers are not supported", key)
    kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta")
    theta = _positive(_DEFAULT_ROPE_THETA if theta is None else theta, f"{key}.rope_theta")
    for holder, path in ((parameters, f"{key}."), (config, "")):
        _refuse(holder, "partial_rotary_factor", allowed=(None, 1, 1.0), path=path)
    parameters.pop("partial_rotary_factor", None)

    wanted: tuple[str, ...]
    if kind == "default":
        wanted = ()
    elif kind in ("linear", "dynamic"):
        wanted = ("factor",)
    elif kind == "llama3":
        wanted = ("factor", "low_freq_factor", "high_freq_factor")
    else:
        raise _unsupported(
            f"{key}.rope_type {kind!r} is not supported (default, linear, dynamic, llama3)",
            f"{key}.rope_type",
        )
    numbers: dict[str, float] = {}
    for wanted_key in wanted:
        if wanted_key not in parameters:
            raise _unsupported(f"{key} of type {kind} has no {wanted_key}", f"{key}.{wanted_key}")
        numbers[wanted_key] = _positive(parameters.pop(wanted_key), f"{key}.{wanted_key}")
    original = parameters.pop("original_max_position_embeddings", None)
    for unknown, value in parameters.items():
        if value is not None:
            raise _unsupported(f"{key}.{unknown} is not supported", f"{key}.{unknown}")
    if kind in ("default", "dynamic"):
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", numbers["factor"])
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise _unsupported(
            f"{key}.high_freq_factor must exceed low_freq_factor", f"{key}.high_freq_factor"
        )
    return Rope(
        theta,
        "llama3",
        numbers["factor"],
        numbers["low_freq_factor"],
        numbers["high_freq_factor"],
        shape.context_length
        if original is None
        else _positive_integer(original, f"{key}.original_max_position_embeddings"),
    )


def _windows(config: Mapping[str, Any], shape: ModelShape) -> tuple[int | None, ...]:
    """Sliding windows. Mistral: one for all layers. Qwen: for chosen layers, if switched on."""
    layers = shape.layer_count
    window = config.get("sliding_window")
    if shape.family == "llama":
        _refuse(config, "sliding_window", allowed=(None,))
        _refuse(config, "layer_types", allowed=(None, ["full_attention"] * layers))
        return (None,) * layers
    if shape.family == "mistral":
        kind = "full_attention" if window is None else "sliding_attention"
        _refuse(config, "layer_types", allowed=(None, [kind] * layers))
        size = None if window is None else _positive_integer(window, "sliding_window")
        return (size,) * layers
    if not _boolean(config, "use_sliding_window", False):
        window = None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(layers)
        ]
    if not isinstance(types, list) or len(types) != layers:
        raise _unsupported(f"layer_types must name {layers} layers", "layer_types")
    windows: list[int | None] = []
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise _unsupported(f"layer_types: {kind!r} is not supported", "layer_types")
        if kind == "full_attention":
            windows.append(None)
        elif window is None:
            raise _unsupported("layer_types ask for a sliding_window, none is set", "layer_types")
        else:
            windows.append(_positive_integer(window, "sliding_window"))
    return tuple(windows)


def _require_plain_heads(config: Mapping[str, Any], shape: ModelShape) -> None:
    _refuse(config, "num_key_value_heads", allowed=(None, shape.query_head_count))
    if shape.query_width != shape.hidden_size:
        raise _unsupported(
            f"hidden_size {shape.hidden_size} is not num_attention_heads "
            f"{shape.query_head_count} times head_dim {shape.head_dim}",
            "num_attention_heads",
        )


def _refuse(
    config: Mapping[str, Any], key: str, *, allowed: tuple[Any, ...], path: str = ""
) -> None:
    value = config.get(key)
    if value not in allowed:
        raise _unsupported(f"{path}{key} = {value!r} is not supported", f"{path}{key}")


def _boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _unsupported(f"{key} must be true or false, not {value!r}", key)
    return value


def _positive(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _unsupported(f"{key} must be a positive number, not {value!r}", key)
    return float(value)


def _positive_integer(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unsupported(f"{key} must be a positive integer, not {value!r}", key)
    return value


def _unsupported(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(message, field=field, reason="UNSUPPORTED_MODEL")
