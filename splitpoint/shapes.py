"""Dimensions of a model, and every byte and FLOP formula that follows from them.

The only home of size arithmetic, for store, workers, planner and admission. 1 MAC = 2 FLOP.

Symbols in docstrings: h hidden size, n_q / n_kv query / KV heads, d head dim,
d_kv = n_kv * d, p bytes per element, L layers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, replace
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any

from splitpoint.errors import InvalidArgument

PAGE_ALIGNMENT = 4096  # planes start at memory-page borders
# Words of 4 bytes of a page key, which stand in a page's row of the token plane.
PAGE_KEY_WORDS = 8
PAGE_BYTES_LIMIT = 1 << 30


class DataType(Enum):
    """Element type; the value is its name in checkpoints and on command lines."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def size(self) -> int:
        """Bytes per element (p)."""
        return 4 if self is DataType.FLOAT32 else 2


class WeightFormat(Enum):
    """How matrices of layers and head are held; the value is its name on command lines.

    NATIVE keeps the element type. INT8 keeps a signed byte for each element and an fp32 scale
    for each row of `[out, in]`: approximate, so its cache is never mixed with a native one's.
    """

    NATIVE = "native"
    INT8 = "int8"

    @property
    def is_lossy(self) -> bool:
        return self is not WeightFormat.NATIVE

    def matrix_bytes(self, rows: int, width: int, data_type: DataType) -> int:
        """Return the bytes of a matrix, without padding."""
        if self is WeightFormat.NATIVE:
            return rows * width * data_type.size
        return rows * (width + DataType.FLOAT32.size)


class Encoding(Enum):
    """The format in which a store keeps K, V and X; the value is its name on command lines.

    A row is one token of one head (K, V: d elements) or one token (X: h elements). It is
    encoded by itself, in groups of consecutive elements with their own parameters; the last
    group of a row may be shorter. NATIVE keeps the elements unchanged. INT8 keeps a signed
    byte per element and a scale per group; INT4 half a byte per element, a scale and a
    minimum per group. See docs/arena-format.md.
    """

    NATIVE = "native"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_lossy(self) -> bool:
        return self is not Encoding.NATIVE

    @property
    def group_elements(self) -> int:
        """Elements of a group. Raises ValueError for NATIVE, which has no groups."""
        if self is Encoding.NATIVE:
            raise ValueError("native rows have no groups")
        return 128 if self is Encoding.INT8 else 64

    def parameter_bytes(self, width: int) -> int:
        """Return the bytes of the float16 parameters at the front of a row of `width` elements."""
        if self is Encoding.NATIVE:
            return 0
        each = 2 if self is Encoding.INT8 else 4
        return each * -(-width // self.group_elements)

    def row_bytes(self, width: int, data_type: DataType) -> int:
        """Return the stored bytes of a row of `width` elements, parameters included.

        Encoded rows have an even size, so that float16 parameters are aligned.
        """
        if self is Encoding.NATIVE:
            return width * data_type.size
        elements = width if self is Encoding.INT8 else -(-width // 2)
        return align(self.parameter_bytes(width) + elements, 2)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only transformer.

    Attributes:
        held_weight_bytes: bytes of all weights where a device must hold them all: of a model by
            transformers' code, whose experts no dimension here tells, or of a quantised
            checkpoint; None: the dimensions say.
        active_parameters: elements of the layers' matrices that one token is multiplied with, if
            it is sent to a part of the experts only, or if attention is latent; None: the
            dimensions say.
        latent_width: elements per token and layer that latent attention needs cached; None: it is
            not latent. K and V of every head, which this version caches, follow from them.
    """

    name: str
    family: str
    layer_count: int
    hidden_size: int
    query_head_count: int
    kv_head_count: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    context_length: int
    data_type: DataType = DataType.BFLOAT16
    gated_mlp: bool = True
    tied_embeddings: bool = False
    held_weight_bytes: int | None = None
    active_parameters: int | None = None
    latent_width: int | None = None

    def __post_init__(self) -> None:
        for field in (
            "layer_count",
            "hidden_size",
            "query_head_count",
            "kv_head_count",
            "head_dim",
            "intermediate_size",
            "vocabulary_size",
            "context_length",
        ):
            if getattr(self, field) < 1:
                raise InvalidArgument(f"{field} must be at least 1", field=field)
        if self.query_head_count % self.kv_head_count:
            raise InvalidArgument(
                f"{self.query_head_count} query heads cannot share {self.kv_head_count} KV heads",
                field="kv_head_count",
            )

    # -- widths ---------------------------------------------------------------

    @property
    def kv_width(self) -> int:
        """d_kv = n_kv * d."""
        return self.kv_head_count * self.head_dim

    @property
    def query_width(self) -> int:
        """n_q * d."""
        return self.query_head_count * self.head_dim

    @property
    def rho(self) -> float:
        """h / (2 d_kv): activation bytes over key-value bytes.

        At 1 or more, sending activations over the link can never pay.
        """
        return self.hidden_size / (2 * self.kv_width)

    # -- bytes ----------------------------------------------------------------

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """K and V of one token in one layer: 2 * d_kv * p."""
        return 2 * self.kv_width * self.data_type.size

    @property
    def activation_bytes_per_token_layer(self) -> int:
        """X of one token in one layer: h * p."""
        return self.hidden_size * self.data_type.size

    def stored_kv_bytes_per_token_layer(self, encoding: Encoding) -> int:
        """Return the bytes of K and V of one token in one layer, as stored and loaded."""
        return 2 * self.kv_head_count * encoding.row_bytes(self.head_dim, self.data_type)

    def stored_activation_bytes_per_token_layer(self, encoding: Encoding) -> int:
        """Return the bytes of X of one token in one layer, as stored and sent."""
        return encoding.row_bytes(self.hidden_size, self.data_type)

    @property
    def kv_bytes_per_token(self) -> int:
        """B_kv = 2 * L * d_kv * p."""
        return self.layer_count * self.kv_bytes_per_token_layer

    def stored_kv_bytes_per_token(self, encoding: Encoding) -> int:
        """Return B_kv as stored in this encoding."""
        return self.layer_count * self.stored_kv_bytes_per_token_layer(encoding)

    @property
    def least_kv_bytes_per_token(self) -> int:
        """B_kv of the architecture: `L * (r + d_rope) * p` of latent attention, else as cached.

        The bottleneck paper's Eq. 2 prints a product, where only the sum gives its 70 KB.
        """
        if self.latent_width is None:
            return self.kv_bytes_per_token
        return self.layer_count * self.latent_width * self.data_type.size

    @property
    def activation_bytes_per_token(self) -> int:
        return self.layer_count * self.activation_bytes_per_token_layer

    def page_bytes(self, chunk_tokens: int) -> int:
        """Return the bytes of K and V of one chunk over all layers: a page of device memory."""
        return chunk_tokens * self.kv_bytes_per_token

    @property
    def activations_per_page(self) -> int:
        """Chunks whose X fits a page of device memory: one in the place of K, one in that of V.

        0 unless X is as large as either, as with multi-head attention.
        """
        return 2 if self.hidden_size == self.kv_width else 0

    @property
    def activations_can_pay(self) -> bool:
        """True if storing X can shorten a restore (rho < 1)."""
        return self.rho < 1

    # -- work -----------------------------------------------------------------

    @property
    def parameter_count(self) -> int:
        """Matrix weights only: norms and biases are below 0.1 %."""
        return self.layer_parameters + self.embedding_parameters

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of all layers."""
        layer = 2 * (self.query_parameters + self.hidden_size * self.kv_width)
        return self.layer_count * (layer + self.mlp_parameters)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding table, and of the head if it is another matrix."""
        return (1 if self.tied_embeddings else 2) * self.vocabulary_size * self.hidden_size

    @property
    def query_parameters(self) -> int:
        """h * n_q * d: W_Q, and W_O as well."""
        return self.hidden_size * self.query_width

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer: gate (if gated), up and down."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self) -> int:
        if self.held_weight_bytes is not None:
            return self.held_weight_bytes
        return self.parameter_count * self.data_type.size

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: all layers and the head.

        An embedding table that is no head is read for a few tokens only.
        """
        table = 0 if self.tied_embeddings else self.embedding_bytes
        size = self.parameter_count * self.data_type.size
        # Codes of a quantised checkpoint are fewer.
        return min(size, self.weight_bytes) - table

    def decode_step_bytes(self, batch: int, tokens: float) -> int:
        """Return the bytes that a decode step must read, for `batch` sequences of `tokens` tokens.

        The weights once, and all of K and V: what no order of work avoids.
        """
        return self.step_weight_bytes + int(batch * tokens * self.kv_bytes_per_token)

    @property
    def embedding_bytes(self) -> int:
        """The embedding table; an untied head is as large."""
        return self.vocabulary_size * self.activation_bytes_per_token_layer

    @property
    def rebuild_flops_per_token_layer(self) -> int:
        """K and V of one token from X: 4 * h * d_kv (KVPR Eq. 8, general form)."""
        return 4 * self.hidden_size * self.kv_width

    @property
    def prefill_flops_per_token(self) -> int:
        """F_pf = 2 * N_active, without attention: the embedding is a look-up, and logits
        are computed once per prefill."""
        active = self.active_parameters
        return 2 * (self.layer_parameters if active is None else active)

    def prefill_flops(self, new_tokens: int, cached_tokens: int = 0) -> int:
        """Return 2 * N_active per new token, plus attention to all tokens before it.

        Attention reads (cached + half of the new ones) keys per token on average, with
        4 * n_q * d FLOP each (scores and values).
        """
        embedding = self.vocabulary_size * self.hidden_size
        context = cached_tokens + (new_tokens + 1) / 2
        attention = 4 * self.query_width * self.layer_count * context
        return int(new_tokens * (self.prefill_flops_per_token + attention)) + 2 * embedding

    def fill_flops(self, new_tokens: int, cached_tokens: int = 0) -> int:
        """Return the FLOP of K and V of new tokens in every layer from their ids.

        That is a prefill without logits, and in the last layer without what follows K and V.
        """
        embedding = self.vocabulary_size * self.hidden_size
        whole = self.prefill_flops(new_tokens, cached_tokens) - 2 * embedding
        before_last = whole * (self.layer_count - 1) // self.layer_count
        return before_last + new_tokens * self.rebuild_flops_per_token_layer


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of one layer over all slots. `offset` is from the file's start."""

    layer: int
    tensor: str  # "K", "V" or "X"; "P" of pages
    offset: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The bytes of one chunk, on which store and workers must agree.

    Slots of K and V are `[n_kv, chunk_tokens]` rows of d elements, slots of X
    `[chunk_tokens]` rows of h elements; `data_type` is that of the elements before they are
    encoded. See docs/arena-format.md.

    A layout of pages (`of_pages`) has slots of `page_bytes` opaque bytes, and nothing else.
    """

    chunk_tokens: int
    layer_count: int
    kv_head_count: int
    head_dim: int
    hidden_size: int
    data_type: DataType
    has_activations: bool
    model_fingerprint: bytes = b""
    encoding: Encoding = Encoding.NATIVE
    page_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_tokens <= 4096:
            raise InvalidArgument("chunk_tokens must be in [1, 4096]", field="chunk_tokens")
        if not self.page_bytes:
            return
        if not 1 <= self.page_bytes <= PAGE_BYTES_LIMIT:
            raise InvalidArgument(
                f"pages have 1 to {PAGE_BYTES_LIMIT} bytes, not {self.page_bytes}",
                field="page_bytes",
            )
        if replace(self, page_bytes=0) != _NO_TENSORS:
            raise InvalidArgument("a layout of pages has no tensors", field="page_bytes")

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        chunk_tokens: int,
        has_activations: bool,
        model_fingerprint: bytes = b"",
        encoding: Encoding = Encoding.NATIVE,
    ) -> ArenaLayout:
        return cls(
            chunk_tokens=chunk_tokens,
            layer_count=shape.layer_count,
            kv_head_count=shape.kv_head_count,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            data_type=shape.data_type,
            has_activations=has_activations,
            model_fingerprint=model_fingerprint,
            encoding=encoding,
        )

    @classmethod
    def of_pages(cls, page_bytes: int) -> ArenaLayout:
        """Return the layout of pages of at most this many bytes. Raises InvalidArgument."""
        if page_bytes < 1:
            raise InvalidArgument("a page has at least 1 byte", field="page_bytes")
        return replace(_NO_TENSORS, page_bytes=page_bytes)

    @property
    def tensors(self) -> tuple[str, ...]:
        if self.page_bytes:
            return ("P",)
        return ("K", "V", "X") if self.has_activations else ("K", "V")

    @property
    def kv_row_bytes(self) -> int:
        """K, or V, of one token of one head in one layer, as stored."""
        return self.encoding.row_bytes(self.head_dim, self.data_type)

    @property
    def x_row_bytes(self) -> int:
        """X of one token in one layer, as stored."""
        return self.encoding.row_bytes(self.hidden_size, self.data_type)

    @property
    def stored_kv_bytes_per_token_layer(self) -> int:
        """K and V of one token in one layer on the link."""
        return 2 * self.kv_head_count * self.kv_row_bytes

    @property
    def stored_activation_bytes_per_token_layer(self) -> int:
        """X of one token in one layer on the link, also if this arena stores none."""
        return self.x_row_bytes

    @property
    def kv_slot_bytes(self) -> int:
        """K, or V, of one chunk in one layer."""
        return self.kv_head_count * self.chunk_tokens * self.kv_row_bytes

    @property
    def x_slot_bytes(self) -> int:
        """X of one chunk in one layer."""
        return self.chunk_tokens * self.x_row_bytes

    @property
    def chunk_bytes(self) -> int:
        """Payload of one slot over all planes."""
        if self.page_bytes:
            return self.page_bytes
        per_layer = 2 * self.kv_slot_bytes + (self.x_slot_bytes if self.has_activations else 0)
        return self.layer_count * per_layer

    @property
    def layout_hash(self) -> bytes:
        """16 bytes that differ if the bytes of a chunk do."""
        return _layout_hash(self)

    def planes(self, first_offset: int, slot_count: int) -> list[Plane]:
        """Return all planes in file order: K0, V0, [X0], K1, ... each 4 KiB aligned.

        Pages have one plane, P.
        """
        if self.page_bytes:
            return [Plane(0, "P", first_offset, self.page_bytes)]
        planes = []
        offset = first_offset
        for layer in range(self.layer_count):
            for tensor in self.tensors:
                slot_bytes = self.x_slot_bytes if tensor == "X" else self.kv_slot_bytes
                planes.append(Plane(layer, tensor, offset, slot_bytes))
                offset = align(offset + slot_bytes * slot_count)
        return planes

    def to_json(self) -> str:
        fields = asdict(self)
        fields["data_type"] = self.data_type.value
        fields["encoding"] = self.encoding.value
        fields["model_fingerprint"] = self.model_fingerprint.hex()
        if not self.page_bytes:  # read by versions from before there were pages
            del fields["page_bytes"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ArenaLayout:
        fields = json.loads(text)
        fields["data_type"] = DataType(fields["data_type"])
        fields["encoding"] = Encoding(fields.get("encoding", Encoding.NATIVE.value))
        fields["model_fingerprint"] = bytes.fromhex(fields["model_fingerprint"])
        return cls(**fields)


# What every layout of pages has besides their size.
_NO_TENSORS = ArenaLayout(PAGE_KEY_WORDS, 0, 0, 0, 0, DataType.FLOAT32, has_activations=False)


# Computed for every chunk; a process sees one layout or two.
@lru_cache(maxsize=16)
def _layout_hash(layout: ArenaLayout) -> bytes:
    if layout.page_bytes:
        size = struct.pack("<Q", layout.page_bytes)
        return hashlib.sha256(b"splitpoint page layout v1\0" + size).digest()[:16]
    packed = struct.pack(
        "<6I?",
        layout.chunk_tokens,
        layout.layer_count,
        layout.kv_head_count,
        layout.head_dim,
        layout.hidden_size,
        list(DataType).index(layout.data_type),
        layout.has_activations,
    )
    domain = b"splitpoint layout v1\0"
    if layout.encoding is not Encoding.NATIVE:
        # A domain of its own: native layouts keep the hash from before there were encodings.
        number = list(Encoding).index(layout.encoding)
        domain = b"splitpoint encoded layout v1\0" + struct.pack("<I", number)
    return hashlib.sha256(domain + packed + layout.model_fingerprint).digest()[:16]


def align(offset: int, to: int = PAGE_ALIGNMENT) -> int:
    """Return `offset` rounded up to a multiple of `to`."""
    return -(-offset // to) * to


def chunks_of(tokens: int, chunk_tokens: int) -> int:
    """Return the chunks that hold this many tokens; the last one may be partial."""
    return -(-tokens // chunk_tokens)


# -- shapes by name, for planning without a checkpoint --------------------------


def _shape(name: str, family: str, *dimensions: int, tied: bool = False) -> ModelShape:
    """Return a shape from dimensions in the order of ModelShape's fields."""
    is_opt = family == "opt"
    rest: tuple[Any, ...] = (*dimensions, DataType.BFLOAT16, not is_opt, tied or is_opt)
    return ModelShape(name, family, *rest)


BUILT_IN_SHAPES: dict[str, ModelShape] = {
    shape.name.lower(): shape
    for shape in (
        _shape("OPT-125M", "opt", 12, 768, 12, 12, 64, 3072, 50272, 2048),
        _shape("OPT-6.7B", "opt", 32, 4096, 32, 32, 128, 16384, 50272, 2048),
        _shape("OPT-13B", "opt", 40, 5120, 40, 40, 128, 20480, 50272, 2048),
        _shape("OPT-30B", "opt", 48, 7168, 56, 56, 128, 28672, 50272, 2048),
        # Not a published model: a Llama with grouped queries of a size that a CPU decodes.
        _shape("Llama-168M", "llama", 12, 1024, 16, 4, 64, 2816, 32000, 4096, tied=True),
        _shape("Llama-2-7B", "llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
        _shape("Llama-2-13B", "llama", 40, 5120, 40, 40, 128, 13824, 32000, 4096),
        _shape("Llama-3-8B", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192),
        _shape("Llama-3-70B", "llama", 80, 8192, 64, 8, 128, 28672, 128256, 8192),
        _shape("Llama-3.1-8B", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
        _shape("Llama-3.1-70B", "llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        _shape("Llama-3.1-405B", "llama", 126, 16384, 128, 8, 128, 53248, 128256, 131072),
        _shape("Mistral-7B", "mistral", 32, 4096, 32, 8, 128, 14336, 32000, 32768),
        _shape("SmolLM2-135M", "llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True),
        _shape("Qwen2-7B", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 32768),
        _shape("Qwen3-4B", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960, tied=True),
        _shape("Qwen3-8B", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960),
        _shape("Gemma-2-2B", "gemma2", 26, 2304, 8, 4, 256, 9216, 256000, 8192, tied=True),
        _shape("Gemma-2-9B", "gemma2", 42, 3584, 16, 8, 256, 14336, 256000, 8192, tied=True),
        _shape("Gemma-2-27B", "gemma2", 46, 4608, 32, 16, 128, 36864, 256000, 8192, tied=True),
        _shape("Gemma-3-1B", "gemma3_text", 26, 1152, 4, 1, 256, 6912, 262144, 32768, tied=True),
        _shape("Gemma-3-4B", "gemma3_text", 34, 2560, 8, 4, 256, 10240, 262208, 131072, tied=True),
        _shape(
            "Gemma-3-12B", "gemma3_text", 48, 3840, 16, 8, 256, 15360, 262208, 131072, tied=True
        ),
        _shape(
            "Gemma-3-27B", "gemma3_text", 62, 5376, 32, 16, 128, 21504, 262208, 131072, tied=True
        ),
    )
}


class Numerics(StrEnum):
    """What the bits of a row's result depend on (docs/numerics.md)."""

    # On that row's inputs and the model alone.
    INVARIANT = "invariant"
    # Also on what is computed beside it, and on where its prefix was computed.
    FAST = "fast"
