"""Bounds oneDNN's caches: it compiles a kernel for each shape that it multiplies.

A kernel takes 0.5 MiB and milliseconds. By default up to 1,024 of them stay in oneDNN's own
cache, and as many for each kind of operation and thread in PyTorch's cache above it: a worker
that saw prompts of many lengths grew by more than a gigabyte (docs/log.md).
"""

from __future__ import annotations

import os

# Most kernels in a cache. A step uses some dozens, the same in every layer.
KERNELS = 128
# The caches of oneDNN, and of the layer between PyTorch and oneDNN.
CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_primitive_caches() -> None:
    """Bound them in this process; call before torch is imported. Values that the user set stay."""
    for name in CAPACITIES:
        os.environ.setdefault(name, str(KERNELS))
