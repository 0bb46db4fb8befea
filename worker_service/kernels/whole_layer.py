"""A layer before and behind its attention, by one call of C++ kernels for each: `layer.h`.

Products, norms and rotation are those of panel_gemm.py and row_wise.py, with the same bits. In one
call threads go from one to the next without sleeping, and Python sees layers, not operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from worker_service.kernels.panel_gemm import (
    NO_MEMORY,
    Kind,
    Operation,
    kind_of,
    library,
    scales_address,
)
from worker_service.kernels.row_wise import Angles, Norm, places_of

# Matrices and norms of a layer, as in the kernel.
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = ("attention_norm", "mlp_norm", "query_norm", "key_norm")


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "group")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in MATRICES),
        *((name, Norm) for name in NORMS),
        ("head_dim", ctypes.c_int64),
        ("activation", ctypes.c_int32),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layer", "hidden", "attended", "cosine", "sine")),
        *((name, ctypes.c_void_p) for name in ("inputs", "queries", "both", "outputs")),
        ("row_count", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """A matrix `[out, in]` in panels, and what is added to its products."""

    panels: torch.Tensor
    out_features: int
    in_features: int
    group: int
    bias: torch.Tensor | None

    @property
    def kind(self) -> Kind:
        return kind_of(self.panels)


class WholeLayer:
    """A layer that norms residuals before attention and its MLP, and adds what they give.

    Attributes:
        has_mlp: there is `end`.
    """

    def __init__(
        self,
        matrices: Mapping[str, PanelMatrix],
        norms: Mapping[str, Norm],
        head_dim: int,
        activation: Operation,
        dtype: torch.dtype,
    ) -> None:
        """Take matrices of one kind and norms by role, for rows of this type.

        A key may be `[2 n_kv d, h]`, with the values behind it. There may be a gate; `activation`
        is of it, or of up. Without an MLP there is only `begin`. Raises ValueError for matrices
        and norms that do not fit each other: the kernel reads and writes as their sizes say.
        """
        _check(matrices, norms, head_dim, dtype)
        self._matrices, self._norms = dict(matrices), dict(norms)
        self._library = library(dtype, matrices["query"].kind)
        self._dtype, self._head_dim = dtype, head_dim
        self._hidden_size = matrices["query"].in_features
        self._query_width = matrices["query"].out_features
        self._both_width = sum(
            matrices[role].out_features for role in ("key", "value") if role in matrices
        )
        self._layer = _Layer(head_dim=head_dim, activation=activation)
        for role, each in matrices.items():
            address = each.panels.data_ptr()
            sizes = (each.in_features, each.out_features, each.group)
            bias = None if each.bias is None else each.bias.data_ptr()
            scales = scales_address(each.panels, each.out_features, each.in_features, dtype)
            setattr(self._layer, role, _Matrix(address, scales, bias, *sizes))
        for role, norm in norms.items():
            setattr(self._layer, role, norm)
        self._address = ctypes.addressof(self._layer)
        self.has_mlp = "down" in matrices

    def begin(
        self, hidden: torch.Tensor, angles: Angles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return X `[N, h]`, q `[N, n_q, d]`, k and v `[N, n_kv, d]` of residuals `[N, h]`."""
        count = len(hidden)
        inputs = torch.empty(count, self._hidden_size, dtype=self._dtype)
        queries = torch.empty(count, self._query_width, dtype=self._dtype)
        both = torch.empty(count, self._both_width, dtype=self._dtype)
        cosine, sine = places_of(angles, count * self._head_dim, self._dtype)
        self._call(
            self._library.begin_layer,
            hidden,
            inputs=inputs.data_ptr(),
            queries=queries.data_ptr(),
            both=both.data_ptr(),
            cosine=cosine,
            sine=sine,
        )
        heads = both.view(count, 2, -1, self._head_dim)
        return inputs, queries.view(count, -1, self._head_dim), heads[:, 0], heads[:, 1]

    def end(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the next hidden `[N, h]` of residuals and `attended` `[N, n_q * d]`."""
        if attended.shape != (len(hidden), self._query_width) or attended.dtype != self._dtype:
            raise ValueError(
                f"{tuple(attended.shape)} of {attended.dtype} is not what was attended"
            )
        outputs = torch.empty(len(hidden), self._hidden_size, dtype=self._dtype)
        attended = attended.contiguous()
        self._call(
            self._library.end_layer,
            hidden,
            attended=attended.data_ptr(),
            outputs=outputs.data_ptr(),
        )
        return outputs

    def _call(
        self, function: Callable[..., int], hidden: torch.Tensor, **places: int | None
    ) -> None:
        hidden = hidden.contiguous()
        if hidden.dtype != self._dtype or hidden.shape[1] != self._hidden_size:
            raise ValueError(f"rows {tuple(hidden.shape)} of {hidden.dtype} are not this layer's")
        call = _Pass(
            layer=self._address,
            hidden=hidden.data_ptr(),
            row_count=len(hidden),
            threads=torch.get_num_threads(),
            **places,
        )
        if function(ctypes.byref(call)):
            raise MemoryError(NO_MEMORY)


def _check(
    matrices: Mapping[str, PanelMatrix],
    norms: Mapping[str, Norm],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError unless these are the matrices and norms of one layer."""
    query, key = matrices["query"], matrices["key"]
    hidden, heads = query.in_features, query.out_features
    value = matrices.get("value", key)
    sizes = {"query": (heads, hidden), "key": (key.out_features, hidden)}
    sizes |= {"value": (key.out_features, hidden), "output": (hidden, heads)}
    if "down" in matrices:
        inner = matrices["up"].out_features
        sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    widths = {"attention_norm": hidden, "mlp_norm": hidden}
    widths |= {"query_norm": head_dim, "key_norm": head_dim}
    kv_width = key.out_features // (1 if "value" in matrices else 2)
    is_fit = (
        all(
            (each.out_features, each.in_features) == sizes[role] and each.kind is query.kind
            for role, each in matrices.items()
        )
        and all(
            each.bias is None or (each.bias.dtype == dtype and len(each.bias) == each.out_features)
            for each in matrices.values()
        )
        and all(norm.fits(widths[role], dtype) for role, norm in norms.items())
        and not heads % head_dim
        and not kv_width % head_dim
        # Rows are packed once for all of these products.
        and query.group == key.group == value.group
        and ("gate" not in matrices or matrices["gate"].group == matrices["up"].group)
    )
    if not is_fit:
        raise ValueError("these matrices and norms are not those of one layer")
