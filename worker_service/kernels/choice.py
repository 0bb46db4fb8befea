"""Which kernels this process uses: set once, before its model is loaded.

All workers of a host use the same of a CPU's kernels, and so compute equal bits
(profiling/calibration.py). A GPU's kernels add in one order or are the fastest ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from splitpoint.host.processor import AMX_BF16
from splitpoint.options.cpu_kernels import Decode, Layout, Prefill, named_kernels

# The names are the option's: `up` checks them without torch.
__all__ = [
    "Choice",
    "Decode",
    "Layout",
    "Prefill",
    "adds_in_one_order",
    "by_flags",
    "in_use",
    "use",
    "use_one_order",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """One kernel for each purpose. `str` gives the form that `parsed` reads."""

    decode: Decode
    prefill: Prefill
    linear: Layout

    def __str__(self) -> str:
        return ",".join(f"{each.name}={getattr(self, each.name).value}" for each in fields(self))

    @property
    def text(self) -> str:
        """The same for people."""
        return (
            f"decode attention {self.decode.value}, prefill attention {self.prefill.value}, "
            f"weights {self.linear.value}"
        )

    def parsed(self, text: str) -> Choice:
        """Return this choice with what a text such as `decode=products,linear=plain` names.

        Raises InvalidArgument.
        """
        changes: dict[str, Any] = {**named_kernels(text)}
        return replace(self, **changes)


def by_flags(dtype: torch.dtype, flags: Collection[str]) -> Choice:
    """Return what is best by the instruction sets alone, and needs no compiler.

    A layer of 8 sequences x 12 heads x 512 x 64 in bfloat16 prefills, by products / SDPA, in
    3.1 / 5.7 ms on an EPYC, and in 56 / 10.7 ms (all eight) on a Xeon with AMX. fp32 gains
    nothing from blocks.
    """
    has_tiles = dtype == torch.bfloat16 and AMX_BF16 in flags
    by_sdpa = dtype == torch.float32 or has_tiles
    return Choice(Decode.PRODUCTS, Prefill.SDPA if by_sdpa else Prefill.PRODUCTS, Layout.PACKED)


_in_use: list[Choice] = []


def in_use() -> Choice | None:
    """Return the choice of this process; None if nothing was chosen: by flags, then."""
    return _in_use[0] if _in_use else None


def use(choice: Choice | None) -> None:
    """Use these kernels from now on; a model that is loaded keeps its layout."""
    _in_use[:] = [] if choice is None else [choice]


@contextmanager
def plain_weights() -> Iterator[None]:
    """Let models that are loaded inside hold plain weights, whose products have gradients."""
    before = in_use()
    use(Choice(Decode.PRODUCTS, Prefill.SDPA, Layout.PLAIN))
    try:
        yield
    finally:
        use(before)


# -- GPUs -----------------------------------------------------------------------------

# Not empty if kernels add in one order, whatever is beside a row.
_one_order: list[bool] = []


def adds_in_one_order() -> bool:
    """Return True if a row's bits must not depend on the other rows of its call."""
    return bool(_one_order)


def use_one_order(wanted: bool) -> None:
    """Use kernels of one order from now on, or the fastest ones.

    Plans and graphs that were made before keep their own.
    """
    _one_order[:] = [True] if wanted else []
