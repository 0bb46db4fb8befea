"""What a worker's numerics are, from what was asked for and what excludes it before the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitpoint.errors import InvalidArgument
from splitpoint.options.worker import NUMERICS
from splitpoint.shapes import Encoding, Numerics
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
                "(--numerics invariant): one GPU has confirmed them so far"
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


@dataclass(frozen=True, slots=True)
class WorkerNumerics:
    """What the bits of a worker's results depend on, and why, for people.

    Attributes:
        digest: of what decides the bits (`digest.py`); empty if numerics are fast.
    """

    numerics: Numerics
    reason: str
    digest: str = ""


NOT_CHECKED = WorkerNumerics(Numerics.FAST, "not checked")


def decide(wish: str, *, obstacle: str | None, check: Callable[[], str | None]) -> WorkerNumerics:
    """Return the numerics for `--numerics`.

    Args:
        obstacle: why no check can lead to invariant numerics; None: nothing is known.
        check: returns what depends on other rows; None: nothing. Called only if it matters.

    Raises InvalidArgument if invariant numerics are asked for and cannot be had.
    """
    if wish == Numerics.FAST:
        return WorkerNumerics(Numerics.FAST, "as asked for")
    found = check() if obstacle is None else obstacle
    if found is None:
        return WorkerNumerics(Numerics.INVARIANT, "no operator depends on what is beside a row")
    check_wish(wish, found)
    return WorkerNumerics(Numerics.FAST, found)


def check_wish(wish: str, found: str | None) -> None:
    """Raise InvalidArgument if invariant numerics are asked for and `found` is against it."""
    if wish == Numerics.INVARIANT and found is not None:
        raise InvalidArgument(
            f"{NUMERICS.flag} invariant cannot be had here: {found}", field=NUMERICS.name
        )
