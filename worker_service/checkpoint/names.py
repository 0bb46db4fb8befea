"""Names and shapes of a checkpoint's tensors, by model family."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.checkpoint.decoder import FAMILIES, DecoderConfig, Norm

HEAD_NAME = "lm_head"


@dataclass(frozen=True, slots=True)
class Names:
    """A family's names by role; Llama's by default. Layer names follow `layers.<i>.`.

    A matrix `m` is stored as `m.weight` and, if the config says so, `m.bias`.
    """

    root: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    final_norm: str = "norm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    post_attention_norm: str = ""
    post_mlp_norm: str = ""


_OPT = Names(
    root="model.decoder.",
    positions="embed_positions",
    project_in="project_in",
    project_out="project_out",
    final_norm="final_layer_norm",
    output="self_attn.out_proj",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)
_LLAMA = Names()
_GEMMA = Names(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
NAMES: dict[str, Names] = {
    "opt": _OPT,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}
if forgotten := {*FAMILIES} - {*NAMES}:
    raise RuntimeError(f"families without names of tensors: {', '.join(sorted(forgotten))}")


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor that a checkpoint of this config holds."""
    shape, names = config.shape, NAMES[config.shape.family]
    hidden, inner = shape.hidden_size, shape.intermediate_size
    expected: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, out_features: int, in_features: int, bias: bool) -> None:
        expected[f"{name}.weight"] = (out_features, in_features)
        if bias:
            expected[f"{name}.bias"] = (out_features,)

    def norm(name: str, size: int, kind: Norm) -> None:
        expected[f"{name}.weight"] = (size,)
        if kind is Norm.LAYER:
            expected[f"{name}.bias"] = (size,)

    root = names.root
    matrix(root + names.embedding, shape.vocabulary_size, config.embedding_size, False)
    if config.position_offset is not None:
        rows = shape.context_length + config.position_offset
        matrix(root + names.positions, rows, hidden, False)
    if config.embedding_size != hidden:
        matrix(root + names.project_in, hidden, config.embedding_size, False)
        matrix(root + names.project_out, config.embedding_size, hidden, False)
    for index in range(shape.layer_count):
        layer = f"{root}layers.{index}."
        matrix(layer + names.query, shape.query_width, hidden, config.qkv_bias)
        matrix(layer + names.key, shape.kv_width, hidden, config.qkv_bias)
        matrix(layer + names.value, shape.kv_width, hidden, config.qkv_bias)
        matrix(layer + names.output, hidden, shape.query_width, config.output_bias)
        if config.query_key_norm:
            norm(layer + names.query_norm, shape.head_dim, config.norm)
            norm(layer + names.key_norm, shape.head_dim, config.norm)
        norm(layer + names.attention_norm, hidden, config.norm)
        norm(layer + names.mlp_norm, hidden, config.norm)
        if config.post_norms:
            norm(layer + names.post_attention_norm, hidden, config.norm)
            norm(layer + names.post_mlp_norm, hidden, config.norm)
        if shape.gated_mlp:
            matrix(layer + names.gate, inner, hidden, config.mlp_bias)
        matrix(layer + names.up, inner, hidden, config.mlp_bias)
        matrix(layer + names.down, hidden, inner, config.mlp_bias)
    if config.final_norm:
        norm(root + names.final_norm, hidden, config.norm)
    if not shape.tied_embeddings:
        matrix(HEAD_NAME, shape.vocabulary_size, config.embedding_size, False)
    return expected


def vector_bytes(config: DecoderConfig, item_bytes: int) -> int:
    """Return the bytes of all norms and biases of a model with items of this size.

    Gemma has no biases, and its norms are held in fp32.
    """
    item = 4 if config.norm is Norm.RMS_PLUS_ONE else item_bytes
    return item * sum(size[0] for size in expected_tensors(config).values() if len(size) == 1)


def position_bytes(config: DecoderConfig, item_bytes: int) -> int:
    """Return the bytes of the table of learned positions; 0 if there is none."""
    if config.position_offset is None:
        return 0
    rows = config.shape.context_length + config.position_offset
    return rows * config.shape.hidden_size * item_bytes
