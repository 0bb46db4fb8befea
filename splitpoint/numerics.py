"""Numerics as workers and clients name them: whether results depend on what else is computed."""

from __future__ import annotations

from enum import StrEnum


class Numerics(StrEnum):
    """What the bits of a row's result depend on (docs/numerics.md)."""

    # On that row's inputs and the model alone.
    INVARIANT = "invariant"
    # Also on what is computed beside it, and on where its prefix was computed.
    FAST = "fast"
