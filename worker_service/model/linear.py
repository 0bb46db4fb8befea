"""One linear layer, its weights held in the layout that is fastest on the device.

Layouts, measured on 2 AVX-512 cores with OPT-125M's matrices at 8 rows (GB/s of
weights read): fp32 `F.linear` 11, `x @ W[in, out]` 8, MKL's packed form 8,
oneDNN's blocked form 26; bf16 14, 13, -, 27. At 512 and 4,096 rows the blocked
form is also the fastest by a tenth. So a CPU holds oneDNN-blocked weights where
oneDNN takes the type, everything else holds `[out, in]`. The choice depends on
device and type only, so that equal workers compute equal bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from worker_service.model.config import Activation

# Rows that oneDNN lays the blocks out for; other counts run from the same blocks.
_PACKED_FOR_ROWS = 32


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this type are held in oneDNN's blocked layout."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class Linear:
    """`x @ weight.T + bias`, optionally with the activation fused.

    Takes the weight as checkpoints store it, `[out, in]`, on its final device
    and type; with `packs` it keeps a blocked copy instead of the argument.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.numel() * weight.element_size()
        if bias is not None:
            self.weight_bytes += bias.numel() * bias.element_size()
        self._bias = bias
        self._packed = packs(weight.device, weight.dtype)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            if self._packed
            else weight
        )

    def __call__(self, rows: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        """`[N, in]` to `[N, out]`."""
        if self._packed:
            name = "none" if activation is None else activation.value
            return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
                rows, self._weight, self._bias, name, [], ""
            )
        product = functional.linear(rows, self._weight, self._bias)
        if activation is Activation.RELU:
            return product.relu_()
        if activation is Activation.SILU:
            return functional.silu(product, inplace=True)
        return product

    def added_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + self(rows)`."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(  # type: ignore[no-any-return]
                rows, residual, self._weight, self._bias, "add"
            )
        return self(rows).add_(residual)

    def times(self, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """`factor * self(rows)`, elementwise."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(  # type: ignore[no-any-return]
                rows, factor, self._weight, self._bias, "mul"
            )
        return self(rows).mul_(factor)
