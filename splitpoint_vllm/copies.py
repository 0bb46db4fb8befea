"""Copies between the blocks of vLLM's cache and slots of the arena: one native call for many parts.

A block has a part in each tensor of its group; its page holds them one after the other. A Python
loop over them would take the interpreter's lock for every part while the model runs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger("vllm.splitpoint.copies")

Numbers = npt.NDArray[np.int64]

# Limits of one call (Linux: IOV_MAX, MAX_RW_COUNT).
_CALL_PARTS = 1024
_CALL_BYTES = 1 << 30
# What is page-locked at once.
_PIN_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a group's blocks: the first `size` of each row of `rows`, `[blocks, bytes]`."""

    rows: torch.Tensor
    size: int


class Parts:
    """The parts of each group's blocks in vLLM's tensors."""

    def __init__(self, groups: Sequence[Sequence[Part]]) -> None:
        self._groups = groups
        self._bases = [_numbers(part.rows.data_ptr() for part in group) for group in groups]
        self._strides = [
            _numbers(part.rows.stride(0) * part.rows.element_size() for part in group)
            for group in groups
        ]
        self._sizes = [_numbers(part.size for part in group) for group in groups]
        self._offsets = [np.cumsum(sizes) - sizes for sizes in self._sizes]
        self.page_bytes = [int(sizes.sum()) for sizes in self._sizes]

    @property
    def device(self) -> torch.device:
        return self._groups[0][0].rows.device

    def pieces(
        self, groups: Numbers, block_ids: npt.NDArray[Any], slot_addresses: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return the address of each part in vLLM's cache, in the arena, and its size in bytes.

        Args:
            groups, block_ids: of each block.
            slot_addresses: of the page of each block.
        """
        in_cache, in_arena, sizes = [], [], []
        for group in np.unique(groups):
            of_group = groups == group
            blocks = block_ids[of_group, None].astype(np.int64)
            slots = slot_addresses[of_group, None]
            in_cache.append((self._bases[group] + blocks * self._strides[group]).ravel())
            in_arena.append((slots + self._offsets[group]).ravel())
            sizes.append(np.tile(self._sizes[group], len(blocks)))
        return np.concatenate(in_cache), np.concatenate(in_arena), np.concatenate(sizes)


def _numbers(values: Any) -> Numbers:
    return np.fromiter(values, dtype=np.int64)


class Copier(Protocol):
    """Copies bytes between the host's memory and the device of vLLM's cache."""

    def mark(self) -> Any:
        """Return what a copy that is submitted now has to wait for. Called on vLLM's thread."""

    def pin(self, payload: npt.NDArray[np.uint8]) -> None:
        """Prepare the memory of an arena that was mapped just now, in place of the one before."""

    def copy(self, to: Numbers, source: Numbers, sizes: Numbers, after: Any) -> None:
        """Copy `sizes[i]` bytes from address `source[i]` to `to[i]`, and return when it is done.

        `after`: what `mark` returned. Raises OSError if an address is not mapped (any more).
        """


class HostCopier:
    """Copies within this process's memory, in the kernel: it takes a list of ranges.

    Memory whose file was truncated is an error then, where a plain copy would be a signal that
    ends the process.
    """

    def mark(self) -> None:
        return None

    def pin(self, payload: npt.NDArray[np.uint8]) -> None:
        return None

    def copy(self, to: Numbers, source: Numbers, sizes: Numbers, after: None) -> None:
        ends = np.cumsum(sizes)
        start = done = 0
        while start < len(sizes):
            last = int(np.searchsorted(ends, done + _CALL_BYTES, side="right"))
            last = min(max(last, start + 1), start + _CALL_PARTS)
            _copy_ranges(to[start:last], source[start:last], sizes[start:last])
            start, done = last, int(ends[last - 1])


def _copy_ranges(to: Numbers, source: Numbers, sizes: Numbers) -> None:
    local, remote = np.stack((to, sizes), axis=1), np.stack((source, sizes), axis=1)
    count, expected = len(sizes), int(sizes.sum())
    copied = _process_vm_readv()(
        os.getpid(), local.ctypes.data, count, remote.ctypes.data, count, 0
    )
    if copied != expected:
        number = ctypes.get_errno() if copied < 0 else 0
        raise OSError(number, f"copied {max(0, copied)} of {expected} bytes: {os.strerror(number)}")


@cache
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    size = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, size, ctypes.c_void_p, size, size]
    function.restype = ctypes.c_ssize_t
    return function


class MoveCopier:
    """Copies within this process's memory part by part, for a kernel that refuses lists."""

    def mark(self) -> None:
        return None

    def pin(self, payload: npt.NDArray[np.uint8]) -> None:
        return None

    def copy(self, to: Numbers, source: Numbers, sizes: Numbers, after: None) -> None:
        for destination, address, size in zip(
            to.tolist(), source.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(destination, address, size)


class StreamCopier:
    """Copies between the host and an accelerator, on a stream of its own, by vLLM's batched copy.

    Not confirmed on a GPU yet.
    """

    def __init__(self) -> None:
        from vllm._custom_ops import swap_blocks_batch
        from vllm.platforms import current_platform
        from vllm.v1.kv_offload.cpu import host_register

        self._platform: Any = current_platform
        self._copy_batch: Any = swap_blocks_batch
        self._register: Any = host_register
        self._stream: Any = current_platform.Stream()
        self._copying = threading.Lock()
        self._pinned: list[int] = []  # addresses
        self._payload: npt.NDArray[np.uint8] | None = None  # stays mapped while it is pinned

    def pin(self, payload: npt.NDArray[np.uint8]) -> None:
        """Page-lock an arena, and unlock the one before. Copies work meanwhile, more slowly.

        Takes seconds for many GiB. Called by one thread at a time.
        """
        with self._copying:
            self._unpin()
        self._payload = payload
        for start in range(0, payload.nbytes, _PIN_BYTES):
            address = payload.ctypes.data + start
            size = min(_PIN_BYTES, payload.nbytes - start)
            if not self._register.host_register(address, size):  # vLLM has logged why
                with self._copying:
                    self._unpin()
                return
            self._pinned.append(address)

    def _unpin(self) -> None:
        for address in self._pinned:
            self._register.host_unregister(address)
        self._pinned, self._payload = [], None

    def mark(self) -> Any:
        """Return an event of the model's stream: blocks are written, or zeroed, before it."""
        event = torch.Event()
        event.record(self._platform.current_stream())
        return event

    def copy(self, to: Numbers, source: Numbers, sizes: Numbers, after: Any) -> None:
        done = torch.Event()
        with self._copying, self._platform.stream(self._stream):
            self._stream.wait_event(after)
            try:
                self._copy_batch(*(torch.from_numpy(each) for each in (source, to, sizes)))
            finally:  # also of a batch of which a part was enqueued
                done.record(self._stream)
                done.synchronize()


def copier_for(device: torch.device) -> Copier:
    """Return the copier for the device of vLLM's cache."""
    if device.type != "cpu":
        return StreamCopier()
    probe = np.zeros(2, dtype=np.int64)
    address = probe.ctypes.data
    try:
        HostCopier().copy(_numbers([address]), _numbers([address + 8]), _numbers([8]), None)
    except (OSError, AttributeError) as error:
        log.warning("Splitpoint: pages are copied part by part: %s", error)
        return MoveCopier()
    return HostCopier()
