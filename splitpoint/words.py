"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return "1 token" or "2,000 tokens". `plural`: if it is not the singular with an s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"
