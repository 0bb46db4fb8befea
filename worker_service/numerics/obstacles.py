"""Reasons that exclude invariant numerics before the check."""

from __future__ import annotations

from splitpoint.numerics import Numerics
from splitpoint.shapes import Encoding
from worker_service.kernels.choice import Choice, Decode, Prefill


def obstacle(
    wish: str,
    *,
    is_gpu: bool,
    encoding: Encoding,
    kernels: Choice | None,
    has_triton: bool = False,
) -> str | None:
    """Return why numerics cannot be invariant, in words; None if a check has to say.

    Args:
        wish: the value of `--numerics`.
        encoding: of what the worker reads from its store.
        kernels: of a CPU; None on a GPU.
        has_triton: whether Triton's kernels run on this GPU.
    """
    if encoding.is_lossy:
        return f"the store keeps {encoding.value}, so what is reused differs from what was computed"
    if is_gpu:
        if wish != Numerics.INVARIANT:
            return (
                "a GPU's kernels of one order are used only if they are asked for "
                "(--numerics invariant): no GPU has confirmed them yet"
            )
        return None if has_triton else "Triton's kernels cannot be built on this GPU (see the log)"
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
