"""Decode attention of whole sequences by FlashInfer, where it is installed (extra `flashinfer`).

Its layout "HND", `[pages, n_kv, page_size, d]`, is that of this cache. It takes half-precision
sequences whose pages are all on the device; the rest is span_attention's, its fallback and
twin. Not confirmed on a GPU yet.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.upload import Upload
from worker_service.kernels.choice import adds_in_one_order
from worker_service.kernels.paged_attention import Partial

log = logging.getLogger(__name__)

# What its documentation advises for the partial results of long sequences.
WORKSPACE_BYTES = 128 << 20
_HEAD_DIMS = (64, 128, 256)
_TYPES = (torch.float16, torch.bfloat16)
# Groups that its kernel without tensor cores was made for; it wins below 4.
_SMALL_GROUPS = (1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class WholeSequences:
    """Page tables of B sequences as FlashInfer takes them, all int32.

    Attributes:
        bounds: `[B + 1]` on the host: sequence b has pages[bounds[b] : bounds[b + 1]].
        pages: `[P]` on the device.
        last_rows: `[B]` on the host: rows in use of each last page.
        window: the sliding window of the layers that read them.
    """

    bounds: torch.Tensor
    pages: torch.Tensor
    last_rows: torch.Tensor
    window: int | None

    @classmethod
    def of(
        cls,
        pages: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        chunk_tokens: int,
        window: int | None,
        upload: Upload,
    ) -> WholeSequences:
        """Take the pages of sequences of these lengths, one sequence after the other."""
        counts = -(-lengths // chunk_tokens)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        return cls(
            bounds=_on_host(bounds, upload.device),
            pages=upload.table(pages, np.int32),
            last_rows=_on_host(lengths - (counts - 1) * chunk_tokens, upload.device),
            window=window,
        )


class Library:
    """FlashInfer on one device. For one thread.

    `module` is flashinfer, or in tests a double of its wrapper.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._workspace: torch.Tensor | None = None
        # For each window and kind of kernel: its wrapper, and what it was planned for last.
        self._wrappers: dict[tuple[int | None, bool], tuple[Any, WholeSequences]] = {}
        self.is_usable = True

    def takes(self, queries: torch.Tensor, keys: torch.Tensor) -> bool:
        """Return True for sizes and types that it has kernels for."""
        return self.has_kernel(queries.dtype, keys.shape[-1])

    def has_kernel(self, dtype: torch.dtype, head_dim: int) -> bool:
        return self.is_usable and dtype in _TYPES and head_dim in _HEAD_DIMS

    def attend(
        self,
        whole: WholeSequences,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
    ) -> Partial | None:
        """Attend whole sequences, query b `[n_q, d]` at the end of sequence b.

        The first layer of a step plans for all of them. None if the library failed, which the
        log tells; it is not asked again.
        """
        try:
            wrapper = self._planned(whole, queries, keys, scale, cap)
            attended, logs = wrapper.run(queries.contiguous(), (keys, values), return_lse=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.is_usable = False
            log.warning("FlashInfer is not used: %s: %s", type(error).__name__, error)
            return None
        # Normalised, so the sum of weights relative to exp(peak) is 1. It counts in base 2.
        peaks = logs.to(torch.float32) * math.log(2.0)
        return attended.to(torch.float32), peaks, torch.ones_like(peaks)

    def _planned(
        self,
        whole: WholeSequences,
        queries: torch.Tensor,
        keys: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> Any:
        _, kv_heads, chunk, head_dim = keys.shape
        group = queries.shape[1] // kv_heads
        key = (whole.window, group not in _SMALL_GROUPS)
        wrapper, planned = self._wrappers.get(key, (None, None))
        if planned is whole:
            return wrapper
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        if wrapper is None:
            # Wrappers share the workspace: they run one after the other in one stream.
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=key[1]
            )
        wrapper.plan(
            whole.bounds,
            whole.pages,
            whole.last_rows,
            queries.shape[1],
            kv_heads,
            head_dim,
            chunk,
            # Keys that a query sees to its left; ours counts the query itself.
            window_left=-1 if whole.window is None else whole.window - 1,
            logits_soft_cap=cap,
            sm_scale=scale,
            q_data_type=queries.dtype,
            kv_data_type=keys.dtype,
        )
        self._wrappers[key] = (wrapper, whole)
        return wrapper


def library_of(device: torch.device) -> Library | None:
    """Return FlashInfer for a GPU; None on a CPU, and if it is not installed.

    Its splits depend on the batch, so it has no place beside kernels of one order.
    """
    if device.type != "cuda" or adds_in_one_order():
        return None
    return _library_on(device)


@lru_cache
def _library_on(device: torch.device) -> Library | None:
    try:
        return Library(device, importlib.import_module("flashinfer"))
    except ModuleNotFoundError:
        return None
    except Exception as error:
        log.warning("FlashInfer is installed but not used: %s: %s", type(error).__name__, error)
        return None


def _on_host(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return int32 on the host, pinned if it goes to a GPU: its copies make nothing wait."""
    table = torch.from_numpy(values.astype(np.int32))
    return table.pin_memory() if device.type == "cuda" else table
