"""Write a Llama as a GGUF file for llama.cpp, without its package.

Imported in the peer's own interpreter: nothing but the standard library and numpy. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from splitpoint_cli.bench.decode.peers.checkpoint import Array, Checkpoint, rope_base, widened
from splitpoint_cli.bench.decode.peers.messages import Unsupported

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
# Types of values, and of tensors.
UINT32, FLOAT32, STRING = 4, 6, 8
TENSOR_FLOAT32, TENSOR_BFLOAT16 = 0, 30

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_llama(checkpoint: Checkpoint, path: Path) -> None:
    """Write weights and sizes, without a tokenizer. Raises Unsupported for other families."""
    if checkpoint.config["model_type"] != "llama":
        raise Unsupported(f"no {checkpoint.config['model_type']} is converted for it here")
    tensors = _tensors(checkpoint)
    with path.open("wb") as file:
        values = _values(checkpoint.config)
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(values)))
        for key, value in values.items():
            _write_value(file, key, value)
        offset = 0
        for name, array in tensors:
            kind = TENSOR_BFLOAT16 if array.itemsize == 2 else TENSOR_FLOAT32
            sizes = array.shape[::-1]  # the fastest dimension first
            _write_text(file, name)
            file.write(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            file.write(struct.pack("<IQ", kind, offset))
            offset += _padded(array.nbytes)
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for _, array in tensors:
            file.write(array.tobytes())
            file.write(bytes(_padded(array.nbytes) - array.nbytes))


def _values(config: dict[str, Any]) -> dict[str, int | float | str]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    sizes: dict[str, int | float | str] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": rope_base(config),
        "vocab_size": config["vocab_size"],
    }
    return {
        "general.architecture": "llama",
        "general.alignment": ALIGNMENT,
        **{f"llama.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "no_vocab",
    }


def _tensors(checkpoint: Checkpoint) -> list[tuple[str, Array]]:
    """Return names and arrays: matrices as stored, norms in float32."""
    config = checkpoint.config
    found = [("token_embd.weight", checkpoint.bits("model.embed_tokens.weight"))]
    for layer in range(config["num_hidden_layers"]):
        for name, theirs in _NAMES.items():
            array = checkpoint.bits(f"model.layers.{layer}.{theirs}.weight")
            if name == "attn_q":
                array = _interleaved(array, config["num_attention_heads"])
            elif name == "attn_k":
                array = _interleaved(array, config["num_key_value_heads"])
            found.append((f"blk.{layer}.{name}.weight", array))
    found.append(("output_norm.weight", checkpoint.bits("model.norm.weight")))
    if "lm_head.weight" in checkpoint:
        found.append(("output.weight", checkpoint.bits("lm_head.weight")))
    return [(name, widened(array) if array.ndim == 1 else array) for name, array in found]


def _interleaved(weight: Array, heads: int) -> Array:
    """Return rows in the order of llama.cpp's rotary positions: pairs lie beside each other."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _write_value(file: BinaryIO, key: str, value: int | float | str) -> None:
    _write_text(file, key)
    if isinstance(value, str):
        file.write(struct.pack("<I", STRING))
        _write_text(file, value)
    elif isinstance(value, float):
        file.write(struct.pack("<If", FLOAT32, value))
    else:
        file.write(struct.pack("<II", UINT32, value))


def _write_text(file: BinaryIO, text: str) -> None:
    data = text.encode()
    file.write(struct.pack("<Q", len(data)) + data)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
