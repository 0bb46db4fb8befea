"""What runs in Triton's interpreter to compare kernels of one order with themselves: see
tests/worker/kernels/test_worker_gpu_order.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from one_sequence import Sequence, Shape

from worker_service.kernels import tile_gemm
from worker_service.kernels.choice import by_flags, in_use, use, use_one_order
from worker_service.kernels.panel_gemm import Operation
from worker_service.model.decoder import Decoder
from worker_service.model.span_attention import load_kernels

CPU = torch.device("cpu")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let a CPU's tensors go through the kernels of an invariant worker on a GPU."""
    kernels, before = load_kernels(), in_use()
    # Prompts by pages, as a GPU has them then; weights as they are.
    use(by_flags(torch.float32, []).parsed("decode=products,prefill=fused,linear=plain"))
    use_one_order(True)
    modules = ("attention", "attention_parts", "attention_plan")
    patches = [
        mock.patch(f"worker_service.model.{name}.kernels_of", return_value=kernels)
        for name in modules
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        use_one_order(False)
        use(before)


def ways(shape: Shape, dtype: torch.dtype, length: int) -> dict[str, torch.Tensor]:
    """Return the newest rows' attention, computed in each way; what is not seen is NaN."""
    with as_on_a_gpu():
        sequence = Sequence(length, dtype, shape, poison=torch.nan)
        rows = range((len(sequence.pages) - 1) * shape.chunk - 3, length)
        cut = rows.start + 2
        prefilled, decoded = sequence.streamed(rows)
        pieces = (range(rows.start, cut), range(cut, length))
        alone = range(length - 1, length)
        return {
            "expected": sequence.expected()[rows.start :],
            "whole": sequence.prefilled(range(length))[rows.start :],
            "in pieces": torch.cat([sequence.prefilled(piece) for piece in pieces]),
            "decoded": sequence.decoded(rows),
            "prefilled from tiles": prefilled,
            "decoded from tiles": decoded,
            "alone": sequence.decoded(alone),
        }


def products(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor,
    counts: list[int],
) -> dict[tuple[Operation, int], torch.Tensor]:
    """Return the first rows' products by operation, computed so many at once, and the last one."""
    found = {}
    for operation in Operation:
        takes_other = operation in (Operation.ADD, Operation.MULTIPLY)
        for count in counts:
            beside = other[:count] if takes_other else None
            found[operation, count] = tile_gemm.multiply(
                rows[:count], weight, bias, operation, beside
            )
        beside = other[-1:] if takes_other else None
        found[operation, 1] = tile_gemm.multiply(rows[-1:], weight, bias, operation, beside)
    return found


def layer_results(folder: Path, hidden: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return a layer's projections and its next hidden: of all rows, of some, and as usual."""
    found = []
    parts = (hidden, hidden[5:8])
    with as_on_a_gpu():
        model = Decoder.load(folder, CPU, hidden.dtype)
        found += [_layer(model, part) for part in parts]
    return [*found, _layer(Decoder.load(folder, CPU, hidden.dtype), hidden)]


def _layer(model: Decoder, hidden: torch.Tensor) -> list[torch.Tensor]:
    layer = model.layers[0]
    inputs = layer.attention_input(hidden)
    queries, keys, values = layer.project(inputs, None)
    attended = queries.flatten(1)
    return [queries, keys, values, layer.finish(hidden, attended)]
