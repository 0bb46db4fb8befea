"""Counts device memory on a CPU: what an engine holds, and what its operations take beside.

On a CPU device memory is a budget that nothing enforces; these count the tensors
themselves.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker_service.weights.host import HostUnit

# Objects that share what they refer to.
_BORDERS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, HostUnit)


def held_bytes(*roots: object, beside: tuple[torch.Tensor | None, ...] = ()) -> int:
    """Return the bytes of the tensors that can be reached from here, each memory once.

    Weights on the host are no device memory: HostUnits, and the tensors in `beside`.
    """
    seen: set[int] = set()
    memory: dict[int, int] = {}
    todo = list(roots)
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, _BORDERS):
            continue
        seen.add(id(found))
        if any(found is tensor for tensor in beside):
            continue
        if isinstance(found, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                address, size = _memory_of(found)
            memory[address] = max(size, memory.get(address, 0))
            todo.append(vars(found))
        else:
            todo += gc.get_referents(found)
    return sum(memory.values())


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that operations made and that still live, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[StorageWeakRef, int] = {}
        self._bytes = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        }
        made = func(*args, **(kwargs or {}))
        for gone in [ref for ref in self._live if ref.expired()]:  # type: ignore[no-untyped-call]
            self._bytes -= self._live.pop(gone)
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if ref not in self._live and storage.data_ptr() not in before:
                    self._live[ref] = storage.nbytes()
                    self._bytes += storage.nbytes()
        self.peak = max(self.peak, self._bytes)
        return made


@contextmanager
def counting() -> Iterator[_Counting]:
    """Count in this thread: `.peak` bytes of tensors that operations made meanwhile."""
    with _Counting() as mode:
        yield mode
