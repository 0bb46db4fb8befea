"""How much a test does: all of it in `make chaos`, less of the same in `make test`.

Tests that are scaled so have the marker `scaled`, or `make chaos` would not run them.
"""

from __future__ import annotations

import os


def scaled(number: int, *, chaos: int) -> int:
    """Return `number`, and in `make chaos`, which sets SPLITPOINT_LONG, the other one."""
    return chaos if os.environ.get("SPLITPOINT_LONG") else number
