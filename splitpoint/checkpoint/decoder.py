"""A checkpoint's `config.json` as plain data about the decoder.

Each key that changes the computation is either represented here or refused by name: an
unknown setting must never be ignored. This module knows no files, tensors or devices.

The verdict on a checkpoint says what a worker computes of it, or why this version refuses it. Every
command and service that takes a checkpoint asks here, so that what one approves no other refuses.
It is the verdict of config.json alone; it needs no weights, no device and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from splitpoint.checkpoint.any_decoder import MOST, any_shape, stored_type
from splitpoint.checkpoint.config import (
    UNSUPPORTED_MODEL,
    boolean,
    model_name,
    positive,
    positive_integer,
    read_config,
    refuse,
    shown,
    text_part,
    unsupported,
)
from splitpoint.checkpoint.quantized import Quantization, read_quantization
from splitpoint.checkpoint.rope_config import Rope, read_layered_ropes, read_rope
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType, ModelShape

OPT_POSITION_OFFSET = 2  # OPT's position table begins with two unused rows
_DEFAULT_RMS_EPSILON = 1e-6
_OPT_LAYER_NORM_EPSILON = 1e-5
_SILU_NAMES = ("silu", "swish")
_GELU_NAME = "gelu_pytorch_tanh"
_GEMMA_FAMILIES = ("gemma2", "gemma3_text")
# The window of a Gemma 3 with random weights.
_GEMMA3_WINDOW = 1024
# Keys that configs of Gemma 3 leave out, with the defaults of transformers' class.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


class Norm(Enum):
    """Kind of every norm of a model."""

    LAYER = "layer"
    RMS = "rms"
    RMS_PLUS_ONE = "rms + 1"  # scaled by 1 + weight, in fp32


class Activation(Enum):
    """Nonlinearity of the MLP; the value is oneDNN's name for it."""

    RELU = "relu"
    SILU = "swish"
    GELU_TANH = "gelu"  # by tanh


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of a decoder-only transformer, by our own decoder or by transformers' code.

    Attributes:
        shape: dimensions and data type.
        windows: per layer the tokens that a query sees, itself included; None: all.
        score_scale: factor of attention scores.
        score_cap: a score s becomes `cap * tanh(s / cap)` (Gemma 2); None: no cap.
        quantization: how its linear layers are stored; None: as `shape.data_type`.
    """

    shape: ModelShape
    windows: tuple[int | None, ...]
    score_scale: float
    score_cap: float | None = None
    quantization: Quantization | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(AttentionConfig):
    """One decoder-only transformer that our own decoder computes.

    Attributes:
        norm_epsilon: added to the variance in every norm.
        norm_before: norms stand before attention and MLP; False puts them after
            the residual sums (OPT-350M), so the layer input is not normalised.
        qkv_bias, output_bias, mlp_bias: which linear layers have biases.
        query_key_norm: RMS norm of every query and key head (Qwen3, Gemma 3).
        final_norm: a norm stands before the output head.
        embedding_size: width of the embedding table; if it differs from hidden_size,
            `project_in` and `project_out` lie between (OPT-350M).
        position_offset: row of the learned position table that position 0 uses; None:
            there is no table.
        rope: rotary positions; None: there are none.
        local_rope: rotary positions of the layers with a window, if they differ (Gemma 3).
        post_norms: norms also stand behind attention and MLP, before the residual sums
            (Gemma).
        embedding_scale: factor of embeddings, which is rounded to the model's type first
            (Gemma).
        logit_cap: as `score_cap`, of logits.
    """

    norm: Norm
    norm_epsilon: float
    activation: Activation
    embedding_size: int
    norm_before: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    final_norm: bool = True
    position_offset: int | None = None
    rope: Rope | None = None
    local_rope: Rope | None = None
    post_norms: bool = False
    embedding_scale: float | None = None
    logit_cap: float | None = None

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], *, name: str = "", data_type: DataType | None = None
    ) -> DecoderConfig:
        """Parse a Hugging Face `config.json`.

        `data_type` None means the checkpoint's own. Raises InvalidArgument with the key's
        name for an architecture or a setting that is not supported.
        """
        config = text_config(config)
        shape = shape_from_config(config, name=name, data_type=data_type)
        quantization = read_quantization(config)
        refuse(config, "is_encoder_decoder", allowed=(None, False))
        if quantization is not None:
            shape = replace(shape, held_weight_bytes=quantization.held_bytes(shape))
        return replace(FAMILIES[shape.family](config, shape), quantization=quantization)

    @classmethod
    def of_shape(cls, shape: ModelShape) -> DecoderConfig:
        """Return the usual settings of a family, for random weights and measurements."""
        parsed = cls.parse(plain_config(shape), data_type=shape.data_type)
        return replace(parsed, shape=shape)


def plain_config(shape: ModelShape) -> dict[str, Any]:
    """Return a `config.json` with these dimensions and the family's usual settings."""
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
    config |= {
        "num_key_value_heads": shape.kv_head_count,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
    }
    if shape.family in _GEMMA_FAMILIES:
        config["query_pre_attn_scalar"] = shape.head_dim
    if shape.family == "gemma3_text":
        config["sliding_window"] = _GEMMA3_WINDOW
    return config


def _opt(config: Mapping[str, Any], shape: ModelShape) -> DecoderConfig:
    refuse(config, "activation_function", allowed=(None, "relu"))
    refuse(config, "layer_norm_elementwise_affine", allowed=(None, True))
    _require_plain_heads(config, shape)
    norm_before = boolean(config, "do_layer_norm_before", True)
    bias = boolean(config, "enable_bias", True)
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
        final_norm=norm_before and not boolean(config, "_remove_final_layer_norm", False),
        embedding_size=(
            shape.hidden_size
            if embedding_size is None
            else positive_integer(embedding_size, "word_embed_proj_dim")
        ),
        position_offset=OPT_POSITION_OFFSET,
        windows=(None,) * shape.layer_count,
        score_scale=shape.head_dim**-0.5,
    )


def _rotary_family(config: Mapping[str, Any], shape: ModelShape) -> DecoderConfig:
    """Read Llama, Mistral, Qwen2 and Qwen3: one architecture with small differences."""
    family = shape.family
    refuse(config, "hidden_act", allowed=(None, *_SILU_NAMES))
    if family != "llama" and "num_key_value_heads" not in config:
        # transformers has another default for each family.
        raise unsupported(
            f"config.json of a {family} model has no num_key_value_heads", "num_key_value_heads"
        )
    if family == "qwen3" and config.get("head_dim") is None:
        raise unsupported("config.json of a qwen3 model has no head_dim", "head_dim")
    if shape.head_dim % 2:
        raise unsupported(f"head_dim {shape.head_dim} is odd: it cannot be rotated", "head_dim")
    if family in ("llama", "qwen3"):
        attention_bias = boolean(config, "attention_bias", False)
    else:
        refuse(config, "attention_bias", allowed=(None, False))
        attention_bias = False
    if family != "llama":
        refuse(config, "mlp_bias", allowed=(None, False))
    return DecoderConfig(
        shape=shape,
        norm=Norm.RMS,
        norm_epsilon=positive(config.get("rms_norm_eps", _DEFAULT_RMS_EPSILON), "rms_norm_eps"),
        activation=Activation.SILU,
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=boolean(config, "mlp_bias", False),
        query_key_norm=family == "qwen3",
        embedding_size=shape.hidden_size,
        rope=read_rope(config, shape),
        windows=_windows(config, shape),
        score_scale=shape.head_dim**-0.5,
    )


def _gemma(config: Mapping[str, Any], shape: ModelShape) -> DecoderConfig:
    """Read Gemma 2 and the text part of Gemma 3."""
    is_second = shape.family == "gemma2"
    for key in ("hidden_activation", "hidden_act"):
        refuse(config, key, allowed=(None, _GELU_NAME))
    refuse(config, "attention_bias", allowed=(None, False))
    refuse(config, "use_bidirectional_attention", allowed=(None, False))
    if shape.head_dim % 2:
        raise unsupported(f"head_dim {shape.head_dim} is odd: it cannot be rotated", "head_dim")
    ropes = (read_rope(config, shape), None) if is_second else read_layered_ropes(config, shape)
    # Missing keys have the defaults of transformers' classes.
    width = config.get("query_pre_attn_scalar", 256)
    return DecoderConfig(
        shape=shape,
        norm=Norm.RMS_PLUS_ONE,
        norm_epsilon=positive(config.get("rms_norm_eps", _DEFAULT_RMS_EPSILON), "rms_norm_eps"),
        activation=Activation.GELU_TANH,
        query_key_norm=not is_second,
        embedding_size=shape.hidden_size,
        rope=ropes[0],
        windows=_alternating_windows(config, shape),
        score_scale=positive(width, "query_pre_attn_scalar") ** -0.5,
        local_rope=ropes[1],
        post_norms=True,
        embedding_scale=shape.hidden_size**0.5,
        score_cap=_cap(config, "attn_logit_softcapping", 50.0 if is_second else None),
        logit_cap=_cap(config, "final_logit_softcapping", 30.0 if is_second else None),
    )


def _cap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = config.get(key, default)
    return None if value is None else positive(value, key)


def _alternating_windows(config: Mapping[str, Any], shape: ModelShape) -> tuple[int | None, ...]:
    """Read the windows of a Gemma: the last of every two (Gemma 3: six) layers has none."""
    layers = shape.layer_count
    window = config.get("sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        usual = 2 if shape.family == "gemma2" else 6
        key = "sliding_window_pattern"
        every = usual if config.get(key) is None else positive_integer(config[key], key)
        types = [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        ]
    return _windows_of(types, window, layers)


def _windows(config: Mapping[str, Any], shape: ModelShape) -> tuple[int | None, ...]:
    """Read sliding windows: Mistral's of all layers, Qwen's of chosen ones if switched on."""
    layers = shape.layer_count
    window = config.get("sliding_window")
    if shape.family == "llama":
        refuse(config, "sliding_window", allowed=(None,))
        refuse(config, "layer_types", allowed=(None, ["full_attention"] * layers))
        return (None,) * layers
    if shape.family == "mistral":
        kind = "full_attention" if window is None else "sliding_attention"
        refuse(config, "layer_types", allowed=(None, [kind] * layers))
        size = None if window is None else positive_integer(window, "sliding_window")
        return (size,) * layers
    if not boolean(config, "use_sliding_window", False):
        window = None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        if type(first) is not int:
            raise unsupported(
                f"max_window_layers must be an integer, not {shown(first)}", "max_window_layers"
            )
        types = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(layers)
        ]
    return _windows_of(types, window, layers)


def _windows_of(types: object, window: object, layers: int) -> tuple[int | None, ...]:
    if not isinstance(types, list) or len(types) != layers:
        raise unsupported(f"layer_types must name {layers} layers", "layer_types")
    windows: list[int | None] = []
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise unsupported(f"layer_types: {shown(kind)} is not supported", "layer_types")
        if kind == "full_attention":
            windows.append(None)
        elif window is None:
            raise unsupported("layer_types ask for a sliding_window, none is set", "layer_types")
        else:
            windows.append(positive_integer(window, "sliding_window"))
    return tuple(windows)


def _require_plain_heads(config: Mapping[str, Any], shape: ModelShape) -> None:
    refuse(config, "num_key_value_heads", allowed=(None, shape.query_head_count))
    if shape.query_width != shape.hidden_size:
        raise unsupported(
            f"hidden_size {shape.hidden_size} is not num_attention_heads "
            f"{shape.query_head_count} times head_dim {shape.head_dim}",
            "num_attention_heads",
        )


# What reads the config of each family that is served. A new one needs its reader here, and its row
# in worker_service/checkpoint/names.py.
FAMILIES: dict[str, Callable[[Mapping[str, Any], ModelShape], DecoderConfig]] = {
    "opt": _opt,
    "llama": _rotary_family,
    "mistral": _rotary_family,
    "qwen2": _rotary_family,
    "qwen3": _rotary_family,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a `config.json` about the text decoder, with defaults of Gemma 3.

    Only a Gemma 3 that also reads images has a `text_config`; other configs are returned
    unchanged.
    """
    family = config.get("model_type")
    if family == "gemma3":
        if not isinstance(config.get("text_config"), dict):
            raise InvalidArgument("config.json has no text_config", field="text_config")
        config = {**text_part(config), "model_type": "gemma3_text"}
    elif family != "gemma3_text":
        return dict(config)
    return {**_GEMMA3_DEFAULTS, **config}


def shape_from_config(
    config: Mapping[str, Any], *, name: str = "", data_type: DataType | None = None
) -> ModelShape:
    """Return the shape that a `config.json` describes.

    Raises InvalidArgument for an architecture outside FAMILIES, a missing key, or a value
    out of bounds.
    """
    config = text_config(config)
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise InvalidArgument(
            f"our own decoder has no model_type {shown(family)} (it has {', '.join(FAMILIES)})",
            field="model_type",
            reason=UNSUPPORTED_MODEL,
        )
    try:
        hidden = _integer(config, "hidden_size")
        query_heads = _integer(config, "num_attention_heads")
        is_opt = family == "opt"
        return ModelShape(
            name=name or str(config.get("_name_or_path") or family),
            family=family,
            layer_count=_integer(config, "num_hidden_layers"),
            hidden_size=hidden,
            query_head_count=query_heads,
            kv_head_count=_integer(config, "num_key_value_heads", query_heads),
            head_dim=_integer(config, "head_dim", hidden // query_heads),
            intermediate_size=_integer(config, "ffn_dim" if is_opt else "intermediate_size"),
            vocabulary_size=_integer(config, "vocab_size"),
            context_length=_integer(config, "max_position_embeddings"),
            data_type=data_type or stored_type(config),
            gated_mlp=not is_opt,
            tied_embeddings=bool(
                config.get("tie_word_embeddings", is_opt or family in _GEMMA_FAMILIES)
            ),
        )
    except KeyError as error:
        raise InvalidArgument(f"config.json has no {error.args[0]}", field="config") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"config.json: {error}", field="config") from error


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number within its bounds; the default if it is absent, null or 0."""
    value = config[key] if default is None else config.get(key) or default
    if type(value) is not int or not 1 <= value <= MOST[key]:
        shown = repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
        raise InvalidArgument(
            f"config.json: {key} must be a whole number from 1 to {MOST[key]:,}, not {shown:.40}",
            field="config",
        )
    return value


class ModelBackend(StrEnum):
    """Whose code computes a model; the value is its name on command lines."""

    # Our own decoder where it has the family, else transformers' code.
    AUTO = "auto"
    OWN = "own"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Support:
    """Whether this version serves a checkpoint, as far as config.json says.

    Attributes:
        shape: of the model; None if it is refused.
        decoder: what our own decoder computes; None if transformers' code would have to.
        quantization: see AttentionConfig.
        refusal: why it is refused, None if it is not; `field` is the key of config.json that
            decides, and `reason` is UNSUPPORTED_MODEL for a sound checkpoint that needs what this
            version lacks.
    """

    shape: ModelShape | None = None
    decoder: DecoderConfig | None = None
    quantization: Quantization | None = None
    refusal: InvalidArgument | None = None

    @property
    def required_shape(self) -> ModelShape:
        """The shape. Raises the refusal."""
        if self.shape is None:
            assert self.refusal is not None
            raise self.refusal
        return self.shape


def support_of(
    folder: Path,
    data_type: DataType | None = None,
    backend: ModelBackend = ModelBackend.AUTO,
) -> Support:
    """Return the verdict on a checkpoint folder. `data_type` None: as stored.

    A worker still has to see whether transformers' code computes what our own decoder refuses.
    """
    try:
        config, name = read_config(folder), model_name(folder)
        if backend is not ModelBackend.TRANSFORMERS:
            try:
                decoder = DecoderConfig.parse(config, name=name, data_type=data_type)
                return Support(decoder.shape, decoder, decoder.quantization)
            except InvalidArgument as error:
                if backend is ModelBackend.OWN or error.reason != UNSUPPORTED_MODEL:
                    raise
        quantization = read_quantization(text_part(config))
        shape = any_shape(config, name=name, data_type=data_type)
        held = None if quantization is None else quantization.held_bytes(shape)
        # By transformers' code a device holds them all.
        shape = replace(shape, held_weight_bytes=held or shape.weight_bytes)
        return Support(shape, quantization=quantization)
    except InvalidArgument as error:
        return Support(refusal=error)


def read_decoder(folder: Path, data_type: DataType | None = None) -> DecoderConfig:
    """Return what our own decoder computes. Raises InvalidArgument if it refuses a checkpoint."""
    support = support_of(folder, data_type, ModelBackend.OWN)
    if support.decoder is None:
        assert support.refusal is not None
        raise support.refusal
    return support.decoder


def read_shape(folder: Path, data_type: DataType | None = None) -> ModelShape:
    """Return the shape of a checkpoint. Raises InvalidArgument if config.json refuses it."""
    return support_of(folder, data_type).required_shape
