"""CUDA graphs on paper: a recorder that plays back on a CPU, and the span kernels in plain torch.

Operators are recorded with the very tensors that they read and wrote, and played back over the same
memory, as a graph does. What the host decides while it records stays as it was; what it computes
outside of tensors is not recorded. It proves nothing about a device: only that a step depends on
the memory of its tables, and on nothing else of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker_service.graphs.recorder import Recording

# Kernels add themselves to the tape of the recording under way.
_TAPES: list[Tape] = []


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of a call, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_place(each) for each in tree_leaves((args, kwargs)) if _has_place(each)}
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        # Views, and what was changed in place, keep their memory; the rest gets the new values.
        fresh = [not _has_place(each) or _place(each) not in given for each in outputs]
        self.made += [each for each, is_new in zip(outputs, fresh, strict=True) if is_new]
        if "empty" not in str(func):
            self.calls.append(partial(_call_again, func, args, kwargs, outputs, fresh))
        return result

    def play(self) -> None:
        for call in self.calls:
            call()

    def spoil(self) -> None:
        """Overwrite all results: a device has computed nothing yet when it has recorded."""
        for each in self.made:
            if each.is_floating_point():
                each.fill_(math.nan)


def _call_again(
    func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor], fresh: list[bool]
) -> None:
    again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
    for output, new, is_new in zip(outputs, again, fresh, strict=True):
        if is_new:
            output.copy_(new)


def _has_place(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecorderDouble:
    """In place of `GraphRecorder`.

    Attributes:
        error: what the next recordings raise, as a device does for what cannot be recorded.
        pool_bytes, own_bytes: of each recording.
    """

    def __init__(self, *, pool_bytes: int = 0, own_bytes: int = 0) -> None:
        self.error: Exception | None = None
        self.pool_bytes = pool_bytes
        self.own_bytes = own_bytes
        self.recorded = 0

    def record(self, call: Callable[[], torch.Tensor]) -> Recording:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        tape = Tape()
        _TAPES.append(tape)
        try:
            with tape:
                result = call()
        finally:
            _TAPES.pop()
        tape.spoil()
        return Recording(tape.play, result, self.pool_bytes, self.own_bytes)


# -- the kernels of span_kernel.py --------------------------------------------------------------


class _Kernel:
    """Called as Triton's are: `kernel[grid](...)`; recorded, not run, while a tape records."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, int], *args: Any, **kwargs: Any) -> None:
        call = partial(self._function, grid, *args, **kwargs)
        if _TAPES:
            _TAPES[-1].calls.append(call)
        else:
            call()


def _attend_spans(
    grid: tuple[int, int],
    weighted: torch.Tensor,
    peaks: torch.Tensor,
    totals: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *more: Any,
    scale: float,
    cap: float,
    query_heads: int,
    kv_heads: int,
    has_cap: bool,
    group: int,
    chunk: int,
    unit_rows: int,
    least: float,
    **_: Any,
) -> None:
    units, lows, highs, starts, owners, seen, *prompt, is_prompt, is_masked = more
    assert not is_prompt
    assert seen.dtype is torch.uint8
    assert prompt == [0, 0, 0, 1 << 30, len(queries), 1]
    assert grid == (len(owners), kv_heads)
    assert unit_rows == chunk
    assert query_heads == group * kv_heads
    for span in range(grid[0]):
        entries = range(int(starts[span]), int(starts[span + 1]))
        peaks[span], totals[span], weighted[span] = least, 0.0, 0.0
        if not entries:
            continue
        query = queries[int(owners[span])].view(kv_heads, group, -1)
        own_keys, own_values = (
            torch.cat([plane[units[i], :, lows[i] : highs[i]] for i in entries], dim=1)
            for plane in (keys, values)
        )
        scores = torch.einsum("hgd,hrd->hgr", query, own_keys) * scale
        if has_cap:
            scores = cap * torch.tanh(scores / cap)
        if is_masked:
            rows = torch.cat([seen[i, :, lows[i] : highs[i]] for i in entries], dim=1)
            scores = scores.masked_fill(rows[:, None] == 0, least)
        peak = scores.amax(dim=-1, keepdim=True)
        weights = (scores - peak).exp()
        peaks[span], totals[span] = peak.flatten(), weights.sum(dim=-1).flatten()
        weighted[span] = torch.einsum("hgr,hrd->hgd", weights, own_values).reshape(query_heads, -1)


def _merge_spans(
    grid: tuple[int, int],
    merged: torch.Tensor,
    merged_peaks: torch.Tensor,
    merged_totals: torch.Tensor,
    weighted: torch.Tensor,
    peaks: torch.Tensor,
    totals: torch.Tensor,
    firsts: torch.Tensor,
    _listing: torch.Tensor,
    query_heads: int,
    *,
    is_listed: bool,
    least: float,
    **_: Any,
) -> None:
    assert not is_listed
    assert grid == (len(firsts) - 1, query_heads)
    for query in range(grid[0]):
        spans = slice(int(firsts[query]), int(firsts[query + 1]))
        highest = torch.full((query_heads,), least)
        if spans.stop > spans.start:
            highest = peaks[spans].amax(dim=0)
        shrunk = (peaks[spans] - highest).exp()
        merged_peaks[query] = highest
        merged_totals[query] = (totals[spans] * shrunk).sum(dim=0)
        merged[query] = (weighted[spans] * shrunk.unsqueeze(-1)).sum(dim=0)


class SpanKernels:
    """In place of the module span_kernel."""

    attend_spans = _Kernel(_attend_spans)
    merge_spans = _Kernel(_merge_spans)


@contextmanager
def span_kernels(kernels: Any = SpanKernels) -> Iterator[None]:
    """Let a CPU decode by spans, as a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("attention", "attention_parts", "attention_plan"):
            patch.setattr(f"worker_service.model.{module}.kernels_of", lambda _: kernels)
        yield
