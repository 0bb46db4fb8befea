"""Reasons that exclude invariant numerics before the check."""

from __future__ import annotations

from splitpoint.numerics import Numerics
from splitpoint.shapes import Encoding
from worker_service.kernels.choice import Choice, Decode, Prefill


def obstacle(wish: str, *, is_gpu: bool, encoding: Encoding, kernels: Choice | None) -> str | None:
    """Return why numerics cannot be invariant, in words; None if a check has to say.

    Args:
        wish: the value of `--numerics`.
        encoding: of what the worker reads from its store.
        kernels: of a CPU; None on a GPU.
    """
    if encoding.is_lossy:
        return f"the store keeps {encoding.value}, so what is reused differs from what was computed"
    if is_gpu:
        return None if wish == Numerics.INVARIANT else "a GPU is checked only if it is asked for"
    if kernels is None:
        return "no kernels were chosen"
    for purpose, kernel, fused in (
        ("decode", kernels.decode, Decode.FUSED),
        ("prefill", kernels.prefill, Prefill.FUSED),
    ):
        if kernel is not fused:
            return (
                f"{purpose} attention by {kernel.value} adds in an order of its own "
                f"(--cpu-kernels {purpose}={fused.value})"
            )
    return None
