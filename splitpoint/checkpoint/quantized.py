"""How the matrices of a quantised checkpoint are stored, by its `quantization_config`.

Four kinds are read: codes of 4 bits with a scale and a zero for each group of inputs (GPTQ, AWQ,
and pack-quantized of compressed-tensors), int8 with a scale for each output (its int-quantized),
MXFP4 of experts (gpt-oss), and FP8. All other formats are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from splitpoint.checkpoint.config import shown, unsupported
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import ModelShape, WeightFormat

_FIELD = "quantization_config"
_HEAD = "lm_head"
_EXPERTS = ".experts."
# Bytes of a scale and a zero, as they are held.
GROUP_BYTES = 5
# MXFP4: inputs that share a scale, and its bytes (OCP Microscaling Formats 1.0, 5.3.3).
MXFP4_GROUP = 32
MXFP4_GROUP_BYTES = 1
# Codes of int4 in a word; a group has a multiple of them.
INT4_IN_WORD = 8
_FP8_METHODS = ("fp8", "fbgemm_fp8")
_MOST_IGNORED = 10_000


class Stored(Enum):
    """A way to store matrices; the value is its name for people."""

    GPTQ = "GPTQ int4"
    GPTQ_V2 = "GPTQ v2 int4"
    AWQ = "AWQ int4"
    PACKED = "compressed-tensors int4"
    INT8 = "compressed-tensors int8"
    FP8 = "FP8"
    MXFP4 = "MXFP4"


_COMPRESSED = {
    "pack-quantized int4": Stored.PACKED,
    "int-quantized int8": Stored.INT8,
    "float-quantized float8": Stored.FP8,
    "naive-quantized float8": Stored.FP8,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How matrices are stored.

    Attributes:
        group: inputs that share a scale; 0: all of a matrix.
        block: outputs and inputs that share a scale of FP8; None: a tensor, or each output.
        ignored: modules that are stored as usual, by name, a part of it, or `re:` and a pattern.
    """

    stored: Stored
    group: int = 0
    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()

    @property
    def holds_codes(self) -> bool:
        """True if a worker computes with the codes; False: it dequantises them as it loads."""
        return self.stored is not Stored.FP8

    @property
    def text(self) -> str:
        """The format, and in which one it is held."""
        group = f" in groups of {self.group}" if self.group else ""
        return f"{self.stored.value}{group}{'' if self.holds_codes else ', held dequantised'}"

    def covers(self, module: str) -> bool:
        """Return whether the matrix of this name is stored in the format, and held so."""
        if self.stored is Stored.MXFP4 and _EXPERTS not in module:
            return False
        return self.holds_codes and not self.ignores(module)

    def ignores(self, module: str) -> bool:
        """Return whether the configuration says that the matrix of this name is stored as usual."""
        return any(_is_ignored(module, each) for each in self.ignored)

    @property
    def element_bytes(self) -> float:
        """Bytes of an element that is held as a code, without padding and scales of whole rows."""
        size = 1.0 if self.stored is Stored.INT8 else 0.5
        beside = MXFP4_GROUP_BYTES if self.stored is Stored.MXFP4 else GROUP_BYTES
        return size + (beside / self.group if self.group else 0)

    def held_bytes(self, shape: ModelShape) -> int | None:
        """Return the bytes of all weights, without padding; None: as the shape's type says."""
        if not self.holds_codes or self.stored is Stored.MXFP4:
            return None
        size = self.element_bytes
        own = shape.query_parameters + shape.hidden_size * shape.kv_width
        layers = shape.layer_count * (2 * own + shape.mlp_parameters)
        head = 0 if shape.tied_embeddings else shape.embedding_bytes
        if head and self.covers(_HEAD):
            head = int(shape.vocabulary_size * shape.hidden_size * size)
        return int(layers * size) + shape.embedding_bytes + head


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how a checkpoint is quantised; None: it is not.

    Raises InvalidArgument for a format or a setting that is not read.
    """
    given = config.get(_FIELD)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method == "gptq":
        return _gptq(given)
    if method == "awq":
        return _awq(given)
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "mxfp4":
        ignored = _names(method, given, "modules_to_not_convert")
        return Quantization(Stored.MXFP4, MXFP4_GROUP, ignored=ignored)
    if method in _FP8_METHODS:
        _require(method, given, "fmt", None, "e4m3", "float8_e4m3fn")
        block = given.get("weight_block_size")
        return Quantization(Stored.FP8, block=None if block is None else _block(block))
    what = " (bitsandbytes runs on GPUs only)" if method == "bitsandbytes" else ""
    raise unsupported(f"{_FIELD}: weights quantized by {shown(method)} are not read{what}", _FIELD)


def panels_for(weights: WeightFormat, quantization: Quantization | None) -> str | None:
    """Return what it is that CPUs alone have kernels for, of these weights; None: nothing.

    Raises InvalidArgument if codes are to be quantised again.
    """
    codes = quantization.text if quantization is not None and quantization.holds_codes else None
    if weights is WeightFormat.NATIVE:
        return codes
    if codes is not None:
        raise InvalidArgument(f"--weights int8: the checkpoint is {codes} already", field="weights")
    return "--weights int8"


def _gptq(given: Mapping[str, Any]) -> Quantization:
    for key, allowed in (
        ("bits", (4,)),
        ("desc_act", (None, False)),
        ("dynamic", (None, {})),
        ("modules_in_block_to_quantize", (None,)),
        ("pack_dtype", (None, "int32")),
        ("checkpoint_format", (None, "gptq", "gptq_v2")),
    ):
        _require("gptq", given, key, *allowed)
    stored = Stored.GPTQ_V2 if given.get("checkpoint_format") == "gptq_v2" else Stored.GPTQ
    ignored = () if given.get(_HEAD) is True else (_HEAD,)
    return Quantization(stored, _group("gptq", given), ignored=ignored)


def _awq(given: Mapping[str, Any]) -> Quantization:
    bits = "bits" if "bits" in given else "w_bit"
    _require("awq", given, bits, 4)
    if str(given.get("version", "gemm")).lower() != "gemm":
        raise _refusal("awq", given, "version")
    key = "group_size" if "group_size" in given else "q_group_size"
    ignored = (_HEAD, *_names("awq", given, "modules_to_not_convert"))
    return Quantization(Stored.AWQ, _group("awq", given, key), ignored=ignored)


def _compressed(given: Mapping[str, Any]) -> Quantization:
    method = "compressed-tensors"
    # Transforms would have to rotate activations, too.
    _require(method, given, "transform_config", None, {})
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refusal(method, given, "sparsity_config")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refusal(method, given, "config_groups")
    (only,) = groups.values()
    weights = only.get("weights") if isinstance(only, Mapping) else None
    if not isinstance(weights, Mapping) or only.get("targets") != ["Linear"]:
        raise _refusal(method, given, "config_groups")
    form = f"{given.get('format')} {weights.get('type')}{weights.get('num_bits')}"
    stored = _COMPRESSED.get(form)
    ignored = _names(method, given, "ignore")
    if stored is None:
        raise unsupported(f"{_FIELD}: {method} {shown(form)} is not read", _FIELD)
    if stored is Stored.FP8:
        _require(method, weights, "strategy", "tensor", "channel", "block")
        in_blocks = weights["strategy"] == "block"
        block = _block(weights.get("block_structure")) if in_blocks else None
        return Quantization(stored, block=block, ignored=ignored)
    _require(method, weights, "actorder", None, False, "weight", "static")
    if stored is Stored.INT8:
        _require(method, weights, "strategy", "channel", "tensor")
        _require(method, weights, "symmetric", True)
        return Quantization(stored, ignored=ignored)
    _require(method, weights, "strategy", "group", "channel")
    is_grouped = weights["strategy"] == "group"
    return Quantization(stored, _group(method, weights) if is_grouped else 0, ignored=ignored)


def _group(method: str, given: Mapping[str, Any], key: str = "group_size") -> int:
    value = given.get(key)
    if value == -1:
        return 0
    if type(value) is not int or not 0 < value <= 1 << 20 or value % INT4_IN_WORD:
        raise _refusal(method, given, key)
    return value


def _block(value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise unsupported(f"{_FIELD}: FP8 in blocks of {shown(value)}", _FIELD)


def _names(method: str, given: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = given.get(key) or []
    if not isinstance(names, list) or len(names) > _MOST_IGNORED:
        raise _refusal(method, given, key)
    return tuple(each for each in names if isinstance(each, str))


def _is_ignored(module: str, name: str) -> bool:
    module = _in_decoder(module)
    if not name.startswith("re:"):
        return _in_decoder(name) in module
    # A pattern matches a beginning. Only `.*`, `\.`, `^` and `$` are in use; full regular
    # expressions of a checkpoint could take arbitrarily long.
    pattern = name.removeprefix("re:").removeprefix("^").replace("\\.", ".").replace(".*", "*")
    pattern = _in_decoder(pattern.removesuffix("$")) + ("" if name.endswith("$") else "*")
    return fnmatchcase(module, pattern)


def _in_decoder(name: str) -> str:
    """Return a name below the text decoder, which wrappers name differently."""
    return name.replace("language_model.", "").removeprefix("model.")


def _require(method: str, given: Mapping[str, Any], key: str, *allowed: object) -> None:
    if given.get(key) not in allowed:
        raise _refusal(method, given, key)


def _refusal(method: str, given: Mapping[str, Any], key: str) -> Exception:
    value = shown(given.get(key))
    return unsupported(f"{_FIELD}: {method} with {key} = {value} is not read", _FIELD)
