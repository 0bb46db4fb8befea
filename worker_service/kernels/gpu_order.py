"""Whether this process's GPU kernels add in one order, whatever is beside a row.

Set once, before its model is loaded. A CPU's kernels are chosen by choice.py.
"""

from __future__ import annotations

_in_use: list[bool] = []


def adds_in_one_order() -> bool:
    """Return True if a row's bits must not depend on the other rows of its call."""
    return bool(_in_use)


def use_one_order(wanted: bool) -> None:
    """Use kernels of one order from now on, or the fastest ones.

    Plans and graphs that were made before keep their own.
    """
    _in_use[:] = [True] if wanted else []
