"""Decode attention of a GPU that reads pages where they lie, by number: a Triton kernel.

The pages of each query are cut into spans of the same length, whatever else is in the batch,
so a query's result does not depend on the others. This module knows no plans and no requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.upload import Upload
from worker_service.kernels.paged_attention import Partial

log = logging.getLogger(__name__)

# Tokens of a span. Shorter ones fill a GPU with few queries, longer ones leave less to merge.
SPAN_TOKENS = 256
_LEAST = float(np.finfo(np.float32).min)
# Elements of the tile of K or V that a program holds at once.
_TILE_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class SpanView:
    """The pages that B queries read, in spans of one query each; int32 on the device.

    Attributes:
        pages, lows, highs: `[P]`, page i is read in its rows [lows[i], highs[i]).
        starts: `[S + 1]`, span s has pages[starts[s] : starts[s + 1]].
        owners: `[S]`, the query of each span, in order.
        firsts: `[B + 1]`, query b has spans [firsts[b], firsts[b + 1]).
    """

    pages: torch.Tensor
    lows: torch.Tensor
    highs: torch.Tensor
    starts: torch.Tensor
    owners: torch.Tensor
    firsts: torch.Tensor

    @property
    def tables(self) -> list[torch.Tensor]:
        return [self.pages, self.lows, self.highs, self.starts, self.owners, self.firsts]

    @classmethod
    def of(
        cls,
        numbers: npt.NDArray[np.int64],
        owner: npt.NDArray[np.int64],
        seen: npt.NDArray[np.bool_],
        query_count: int,
        upload: Upload,
        padded_count: int | None = None,
    ) -> SpanView:
        """Cut pages into spans.

        Query `owner[i]` sees the rows `seen[i]` `[C]` of page `numbers[i]`: at least one, and
        no two with a gap between them. `padded_count`: spans for which the tables have room;
        those without pages are nobody's. Raises ValueError if there are more.
        """
        order = np.argsort(owner, kind="stable")
        numbers, owner, seen = numbers[order], owner[order], seen[order]
        lows = seen.argmax(axis=1)
        per_span = pages_per_span(seen.shape[1])
        counts = np.bincount(owner, minlength=query_count)
        # The place of each page among those of its query.
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.flatnonzero(place % per_span == 0)
        firsts = np.concatenate([[0], np.cumsum(-(-counts // per_span))])

        spans = len(starts) if padded_count is None else padded_count
        pages = len(owner) if padded_count is None else padded_count * per_span

        def table(values: npt.NDArray[Any], size: int, padding: int = 0) -> torch.Tensor:
            missing = size - len(values)
            if missing:
                values = np.pad(values, (0, missing), constant_values=padding)
            return upload.table(values, np.int32)

        return cls(
            pages=table(numbers, pages),
            lows=table(lows, pages),
            highs=table(lows + seen.sum(axis=1), pages),
            starts=table(starts, spans + 1, padding=len(owner)),
            owners=table(owner[starts], spans),
            firsts=table(firsts, query_count + 1),
        )

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
        kernels: Any,
    ) -> Partial:
        """Attend pages of `keys`, `values` `[pages, n_kv, C, d]` with queries `[B, n_q, d]`.

        `kernels`: the result of `kernels_of`.
        """
        queries = queries.contiguous()
        count, query_heads, head_dim = queries.shape
        _, kv_heads, chunk, _ = keys.shape
        spans = len(self.owners)
        sizes = [(spans, query_heads, head_dim), (spans, query_heads), (spans, query_heads)]
        parts = [queries.new_empty(size, dtype=torch.float32) for size in sizes]
        group = query_heads // kv_heads
        dim_block = _block(head_dim)
        if spans:
            kernels.attend_spans[(spans, kv_heads)](
                *(*parts, queries, keys, values),
                *(self.pages, self.lows, self.highs, self.starts, self.owners),
                *(scale, cap or 1.0, query_heads, kv_heads),
                has_cap=cap is not None,
                group=group,
                chunk=chunk,
                head_dim=head_dim,
                group_block=_block(group),
                row_block=_row_block(chunk, dim_block),
                dim_block=dim_block,
                least=_LEAST,
            )
        merged = [queries.new_empty((count, *size[1:]), dtype=torch.float32) for size in sizes]
        kernels.merge_spans[(count, query_heads)](
            *(*merged, *parts, self.firsts, query_heads),
            head_dim=head_dim,
            dim_block=dim_block,
            least=_LEAST,
        )
        return merged[0], merged[1], merged[2]


def pages_per_span(chunk_tokens: int) -> int:
    """Return the pages of a span, the last one of a query excepted."""
    return max(1, SPAN_TOKENS // chunk_tokens)


def _block(size: int) -> int:
    """Return the power of two that holds `size`, at least 16: the least side of a product."""
    return max(16, 1 << (size - 1).bit_length())


def _row_block(chunk: int, dim_block: int) -> int:
    """Return the rows of a page that a program holds at once."""
    return min(_block(chunk), max(16, _TILE_ELEMENTS // dim_block))


def load_kernels() -> Any:
    """Return the module of the kernels. Raises ModuleNotFoundError without Triton."""
    from worker_service.model import span_kernel

    return span_kernel


@lru_cache
def kernels_of(device: torch.device) -> Any:
    """Return the kernels; None if they cannot be built or run here.

    The first call compiles one, which takes a second or two.
    """
    if device.type != "cuda":
        return None
    try:
        kernels = load_kernels()
        _try(device, kernels)
    except Exception as error:
        # Plain products give the same result; the log says why the faster way is missing.
        log.warning("decode attention gathers pages: %s: %s", type(error).__name__, error)
        return None
    return kernels


@torch.inference_mode()
def _try(device: torch.device, kernels: Any) -> None:
    """Attend one page of ones. Raises RuntimeError if the result is not one."""
    upload = Upload(device)
    pages = np.zeros(1, dtype=np.int64)
    view = SpanView.of(pages, pages, np.ones((1, 16), dtype=np.bool_), 1, upload)
    upload.send()
    ones = torch.ones(1, 1, 16, 16, device=device)
    weighted, _, total = view.attend(
        ones[0, :, :1], ones, ones, scale=1.0, cap=None, kernels=kernels
    )
    if not torch.allclose(weighted / total.unsqueeze(-1), torch.ones_like(weighted)):
        raise RuntimeError("a trial gave a wrong result")
