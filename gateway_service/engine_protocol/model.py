"""What a router asks about the model: its tokenizer's files, its ends, its sizes. Pure."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from splitpoint.v1 import scheduler_pb2, types_pb2

_PIECE_BYTES = 1 << 20
_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "opt": "OPTForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DATA_TYPES = {
    types_pb2.DATA_TYPE_FLOAT32: "torch.float32",
    types_pb2.DATA_TYPE_BFLOAT16: "torch.bfloat16",
    types_pb2.DATA_TYPE_FLOAT16: "torch.float16",
}

Files = Mapping[str, bytes]


def tokenizer_chunks(files: Files) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield the files as a zip in pieces; the last one has the zip's SHA-256.

    Equal files make equal bytes, by which a router knows a tokenizer that it has.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            # Without the time at which it was made.
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    data = packed.getvalue()
    for start in range(0, len(data), _PIECE_BYTES):
        is_last = start + _PIECE_BYTES >= len(data)
        yield common_pb2.GetTokenizerChunk(
            data=data[start : start + _PIECE_BYTES],
            sha256=hashlib.sha256(data).hexdigest() if is_last else "",
        )


def model_info(model: scheduler_pb2.Model, files: Files) -> vllm_engine_pb2.GetModelInfoResponse:
    """Return the answer to GetModelInfo. `files`: those of the tokenizer; empty: it has none."""
    shape = model.shape
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=model.name,
        is_generation=True,
        max_context_length=model.context_length,
        vocab_size=shape.vocabulary_size,
        served_model_name=model.name,
        model_type=shape.family,
        architectures=[_FAMILIES[shape.family]] if shape.family in _FAMILIES else [],
        eos_token_ids=_end_tokens(files),
        # vLLM, too, has 0 for a token that the tokenizer lacks.
        pad_token_id=_token_of("pad_token", files) or 0,
        bos_token_id=_token_of("bos_token", files) or 0,
        # A prompt leaves room for a token at least.
        max_req_input_len=model.context_length - 1,
    )


def data_type_name(shape: types_pb2.ModelShape) -> str:
    """Return the name of the element type as vLLM writes it; empty if it has none."""
    return _DATA_TYPES.get(shape.data_type, "")


def _end_tokens(files: Files) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        found = _json(files, name).get("eos_token_id")
        if isinstance(found, int):
            return [found]
        if isinstance(found, list) and found:
            return [each for each in found if isinstance(each, int)]
    end = _token_of("eos_token", files)
    return [] if end is None else [end]


def _token_of(name: str, files: Files) -> int | None:
    """Return the id of one of the tokenizer's special tokens; None if it has none of this name."""
    text = _json(files, "tokenizer_config.json").get(name)
    if isinstance(text, dict):
        text = text.get("content")
    for added in _json(files, "tokenizer.json").get("added_tokens", []):
        if text is not None and added.get("content") == text:
            return int(added["id"])
    return None


def _json(files: Files, name: str) -> dict[str, Any]:
    found = json.loads(files[name]) if name in files else {}
    return found if isinstance(found, dict) else {}
