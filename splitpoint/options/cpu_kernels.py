"""`--cpu-kernels`: the names of a CPU worker's kernels, and how a text of them is read."""

from __future__ import annotations

from enum import StrEnum

from splitpoint.errors import InvalidArgument

AUTO = "auto"
FLAGS = "flags"
_FIELD = "cpu-kernels"


class Decode(StrEnum):
    """Decode attention: one pass over the pages, or torch's products of all pages at once."""

    FUSED = "fused"
    PRODUCTS = "products"


class Prefill(StrEnum):
    """Prefill attention: one pass over the pages, torch's, or products of blocks of queries."""

    FUSED = "fused"
    SDPA = "sdpa"
    PRODUCTS = "products"


class Layout(StrEnum):
    """Layout of weights: panels for our own kernel, oneDNN's blocks, or `[out, in]`."""

    PANELS = "panels"
    PACKED = "packed"
    PLAIN = "plain"


_KINDS: dict[str, type[StrEnum]] = {"decode": Decode, "prefill": Prefill, "linear": Layout}


def named_kernels(text: str) -> dict[str, StrEnum]:
    """Return what a text such as `decode=products,linear=plain` names, by purpose.

    Raises InvalidArgument.
    """
    named = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        kind = _KINDS.get(name)
        if kind is None or value not in tuple(kind):
            known = ", ".join(f"{n}={'|'.join(_KINDS[n])}" for n in _KINDS)
            raise InvalidArgument(
                f"--{_FIELD}: {part!r} is none of {AUTO}, {FLAGS}, {known}", field=_FIELD
            )
        named[name] = kind(value)
    return named


def with_panels(text: str, what: str = "--weights int8") -> str:
    """Return this value of the option with weights in panels, as these weights need them.

    Raises InvalidArgument if it is a value that has them otherwise.
    """
    if text == FLAGS:
        raise InvalidArgument(
            f"{what} needs a compiled kernel, and --{_FIELD} {FLAGS} compiles none",
            field=_FIELD,
        )
    panels = f"linear={Layout.PANELS.value}"
    if text == AUTO:
        return panels
    layout = named_kernels(text).get("linear", Layout.PANELS)
    if layout is not Layout.PANELS:
        raise InvalidArgument(f"{what} needs {panels}, not linear={layout.value}", field=_FIELD)
    return f"{text},{panels}"


def check_cpu_kernels(text: str) -> None:
    """Raise InvalidArgument unless a worker understands this value of the option."""
    if text not in (AUTO, FLAGS):
        named_kernels(text)
