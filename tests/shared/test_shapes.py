"""Byte and FLOP formulas against the tables of the papers, worked out by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import (
    BUILT_IN_SHAPES,
    ArenaLayout,
    DataType,
    Encoding,
    chunks_of,
)

KIB = 1024


@pytest.mark.parametrize(
    ("name", "x_bytes", "kv_bytes", "rho"),
    [
        ("opt-6.7b", 8 * KIB, 16 * KIB, 0.5),
        ("llama-2-7b", 8 * KIB, 16 * KIB, 0.5),
        ("gemma-2-9b", 7 * KIB, 8 * KIB, 0.875),
        ("qwen3-4b", 5 * KIB, 4 * KIB, 1.25),
        ("llama-3-8b", 8 * KIB, 4 * KIB, 2.0),
        ("mistral-7b", 8 * KIB, 4 * KIB, 2.0),
        ("qwen3-8b", 8 * KIB, 4 * KIB, 2.0),
        ("qwen2-7b", 7 * KIB, 2 * KIB, 3.5),
        ("llama-3-70b", 16 * KIB, 4 * KIB, 4.0),
    ],
)
def test_bytes_per_token_and_layer(name: str, x_bytes: int, kv_bytes: int, rho: float) -> None:
    shape = BUILT_IN_SHAPES[name]
    assert shape.activation_bytes_per_token_layer == x_bytes
    assert shape.kv_bytes_per_token_layer == kv_bytes
    assert shape.rho == rho
    assert shape.activations_can_pay == (rho < 1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("opt-125m", 0.125), ("opt-6.7b", 6.66), ("llama-3-8b", 8.03), ("llama-3-70b", 70.6)],
)
def test_parameter_count_is_the_published_one(name: str, billions: float) -> None:
    assert BUILT_IN_SHAPES[name].parameter_count / 1e9 == pytest.approx(billions, rel=0.02)


def test_kv_bytes_per_token_of_the_kappa_paper() -> None:
    # Llama-3.1-70B: 327.7 KB a token in 16 bits.
    assert BUILT_IN_SHAPES["llama-3.1-70b"].kv_bytes_per_token == 327_680


def test_prefill_work_is_two_flops_a_weight_and_token() -> None:
    shape = BUILT_IN_SHAPES["llama-3-8b"]
    per_token = shape.prefill_flops(1000) / 1000
    embeddings = 2 * shape.vocabulary_size * shape.hidden_size
    assert per_token == pytest.approx(2 * (shape.parameter_count - embeddings), rel=0.05)
    assert shape.prefill_flops(10, cached_tokens=5000) > shape.prefill_flops(10)


def test_planes_are_aligned_in_file_order_and_do_not_overlap() -> None:
    layout = ArenaLayout(
        chunk_tokens=3,
        layer_count=2,
        kv_head_count=2,
        head_dim=5,
        hidden_size=7,
        data_type=DataType.FLOAT16,
        has_activations=True,
    )
    planes = layout.planes(8192, slot_count=11)
    assert [(plane.layer, plane.tensor) for plane in planes] == [
        (layer, tensor) for layer in (0, 1) for tensor in ("K", "V", "X")
    ]
    for before, after in itertools.pairwise(planes):
        assert after.offset % 4096 == 0
        assert before.offset + 11 * before.slot_bytes <= after.offset
    assert layout.chunk_bytes == sum(plane.slot_bytes for plane in planes)


def test_layout_hash_differs_with_every_field() -> None:
    base = ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, False, b"weights")
    others = [
        ArenaLayout(32, 2, 2, 8, 16, DataType.FLOAT32, False, b"weights"),
        ArenaLayout(64, 3, 2, 8, 16, DataType.FLOAT32, False, b"weights"),
        ArenaLayout(64, 2, 1, 8, 16, DataType.FLOAT32, False, b"weights"),
        ArenaLayout(64, 2, 2, 4, 16, DataType.FLOAT32, False, b"weights"),
        ArenaLayout(64, 2, 2, 8, 32, DataType.FLOAT32, False, b"weights"),
        ArenaLayout(64, 2, 2, 8, 16, DataType.BFLOAT16, False, b"weights"),
        ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, True, b"weights"),
        ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, False, b"other weights"),
        ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, False, b"weights", Encoding.INT8),
        ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, False, b"weights", Encoding.INT4),
    ]
    hashes = {layout.layout_hash for layout in (base, *others)}
    assert len(hashes) == len(others) + 1
    for layout in (base, *others):
        assert ArenaLayout.from_json(layout.to_json()) == layout


def test_pages_have_one_plane_of_opaque_slots() -> None:
    layout = ArenaLayout.of_pages(1001)
    assert layout.chunk_bytes == layout.page_bytes == 1001
    [plane] = layout.planes(1 << 21, slot_count=3)
    assert (plane.layer, plane.tensor, plane.offset, plane.slot_bytes) == (0, "P", 1 << 21, 1001)
    assert layout.tensors == ("P",)
    assert ArenaLayout.from_json(layout.to_json()) == layout
    hashes = {ArenaLayout.of_pages(size).layout_hash for size in (1, 1000, 1001, 1 << 30)}
    assert len(hashes) == 4
    for size in (-1, 0, (1 << 30) + 1):
        with pytest.raises(InvalidArgument, match="page"):
            ArenaLayout.of_pages(size)
    with pytest.raises(InvalidArgument, match="no tensors"):
        ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, False, b"weights", page_bytes=1001)


def test_layouts_of_tokens_are_those_from_before_pages() -> None:
    """A disk tier's folder stays readable in both directions."""
    base = ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, False, b"weights")
    assert "page_bytes" not in base.to_json()


def test_native_layouts_are_those_from_before_encodings() -> None:
    base = ArenaLayout(64, 2, 2, 8, 16, DataType.FLOAT32, False, b"weights")
    assert base.layout_hash.hex() == "1426b299a0076bc176ee142b8aa0e495"
    before = json.loads(base.to_json())
    del before["encoding"]
    assert ArenaLayout.from_json(json.dumps(before)) == base


@pytest.mark.parametrize(
    ("encoding", "width", "expected"),
    [
        # Counted by hand: parameters, elements, padding.
        (Encoding.NATIVE, 64, 128),
        (Encoding.INT8, 1, 2 + 1 + 1),
        (Encoding.INT8, 64, 2 + 64),
        (Encoding.INT8, 128, 2 + 128),
        (Encoding.INT8, 129, 2 * 2 + 129 + 1),
        (Encoding.INT8, 4096, 32 * 2 + 4096),
        (Encoding.INT4, 1, 4 + 1 + 1),
        (Encoding.INT4, 6, 4 + 3 + 1),
        (Encoding.INT4, 64, 4 + 32),
        (Encoding.INT4, 65, 2 * 4 + 33 + 1),
        (Encoding.INT4, 128, 2 * 4 + 64),
        (Encoding.INT4, 4096, 64 * 4 + 2048),
    ],
)
def test_bytes_of_an_encoded_row(encoding: Encoding, width: int, expected: int) -> None:
    assert encoding.row_bytes(width, DataType.BFLOAT16) == expected
    if encoding.is_lossy:
        assert encoding.row_bytes(width, DataType.FLOAT32) == expected


@pytest.mark.parametrize(
    ("encoding", "kv_ratio", "x_ratio"),
    [
        (Encoding.NATIVE, 1.0, 1.0),
        (Encoding.INT8, 130 / 256, 130 / 256),
        (Encoding.INT4, 4.5 / 16, 4.5 / 16),
    ],
)
def test_stored_bytes_against_sixteen_bits(
    encoding: Encoding, kv_ratio: float, x_ratio: float
) -> None:
    shape = BUILT_IN_SHAPES["llama-3-8b"]
    stored = shape.stored_kv_bytes_per_token_layer(encoding)
    assert stored == kv_ratio * shape.kv_bytes_per_token_layer
    inputs = shape.stored_activation_bytes_per_token_layer(encoding)
    assert inputs == x_ratio * shape.activation_bytes_per_token_layer
    layout = ArenaLayout.of(shape, chunk_tokens=64, has_activations=True, encoding=encoding)
    assert layout.stored_kv_bytes_per_token_layer == stored
    assert layout.stored_activation_bytes_per_token_layer == inputs
    assert layout.chunk_bytes == 32 * 64 * (stored + inputs)
    assert layout.chunk_bytes == sum(plane.slot_bytes for plane in layout.planes(0, 1))


def test_config_without_a_key_names_it() -> None:
    with pytest.raises(InvalidArgument, match="hidden_size"):
        shape_from_config({"model_type": "llama"})
    with pytest.raises(InvalidArgument, match="gpt2"):
        shape_from_config({"model_type": "gpt2"})


@pytest.mark.parametrize(("tokens", "chunks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_chunks_of(tokens: int, chunks: int) -> None:
    assert chunks_of(tokens, 64) == chunks


def test_a_step_reads_a_tied_table_as_its_head_and_no_rows_of_another_one() -> None:
    tied, untied = BUILT_IN_SHAPES["opt-6.7b"], BUILT_IN_SHAPES["llama-3-8b"]
    assert tied.step_weight_bytes == tied.weight_bytes
    # 8.03 G parameters in all, 0.525 G of them in the embedding.
    assert untied.weight_bytes - untied.step_weight_bytes == 2 * 128256 * 4096
    assert untied.step_weight_bytes == pytest.approx(15.0e9, rel=0.01)
    # As codes of 4 bits: layers, table and head are counted.
    codes = replace(untied, held_weight_bytes=5_800_000_000)
    assert codes.step_weight_bytes == 5_800_000_000 - 2 * 128256 * 4096


def test_a_decode_step_reads_the_weights_once_and_all_of_k_and_v() -> None:
    shape = replace(BUILT_IN_SHAPES["llama-168m"], data_type=DataType.FLOAT32)
    # By hand: per layer 2 x 1024^2 + 2 x 1024 x 256 + 3 x 1024 x 2816, and a head of 32000 x 1024.
    weights = 4 * (12 * (2_097_152 + 524_288 + 8_650_752) + 32_768_000)
    assert shape.step_weight_bytes == weights
    assert shape.decode_step_bytes(8, 544.5) == weights + 8 * 544.5 * 12 * 2 * 256 * 4
