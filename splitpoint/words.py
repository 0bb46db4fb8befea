"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, singular: str, plural: str = "") -> str:
    """Like "1 token" and "2,000 tokens". `plural`: where an s does not make it."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"
