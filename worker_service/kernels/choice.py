"""Which of a CPU's kernels this process uses: set once, before its model is loaded.

All workers of a host use the same, and so compute equal bits (profiling/calibration.py). GPUs
know nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch

from splitpoint.errors import InvalidArgument
from splitpoint.host.processor import AMX_BF16


class Decode(StrEnum):
    """Decode attention: one pass over the pages, or torch's products of all pages at once."""

    FUSED = "fused"
    PRODUCTS = "products"


class Prefill(StrEnum):
    """Prefill attention: torch's, or products of blocks of queries."""

    SDPA = "sdpa"
    PRODUCTS = "products"


class Linear(StrEnum):
    """Layout of weights: oneDNN's blocks, or `[out, in]` as in the checkpoint."""

    PACKED = "packed"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Choice:
    """One kernel for each purpose. `str` gives the form that `parsed` reads."""

    decode: Decode
    prefill: Prefill
    linear: Linear

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
        kinds = {"decode": Decode, "prefill": Prefill, "linear": Linear}
        changes: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            kind = kinds.get(name)
            values = [] if kind is None else [each.value for each in kind]
            if kind is None or value not in values:
                known = "; ".join(f"{n}={'|'.join(kinds[n])}" for n in kinds)
                raise InvalidArgument(f"{part!r} is none of {known}", field="cpu-kernels")
            changes[name] = kind(value)
        return replace(self, **changes)


def by_flags(dtype: torch.dtype, flags: Collection[str]) -> Choice:
    """Return what is best by the instruction sets alone, and needs no compiler.

    A layer of 8 sequences x 12 heads x 512 x 64 in bfloat16 prefills, by products / SDPA, in
    3.1 / 5.7 ms on an EPYC, and in 56 / 10.7 ms (all eight) on a Xeon with AMX. fp32 gains
    nothing from blocks.
    """
    has_tiles = dtype == torch.bfloat16 and AMX_BF16 in flags
    by_sdpa = dtype == torch.float32 or has_tiles
    return Choice(Decode.PRODUCTS, Prefill.SDPA if by_sdpa else Prefill.PRODUCTS, Linear.PACKED)


_in_use: list[Choice] = []


def in_use() -> Choice | None:
    """Return the choice of this process; None if nothing was chosen: by flags, then."""
    return _in_use[0] if _in_use else None


def use(choice: Choice | None) -> None:
    """Use these kernels from now on; a model that is loaded keeps its layout."""
    _in_use[:] = [] if choice is None else [choice]
