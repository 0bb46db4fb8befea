"""Which extras of the installation are there, and what to install where one is missing.

A client installs little; what serves comes with extras of pyproject.toml. Standard library
only: programs ask here before they import anything else.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from splitpoint.errors import FailedPrecondition

_SERVICE = (
    "cryptography",
    "grpc_reflection",
    "hiredis",
    "huggingface_hub",
    "prometheus_client",
    "redis",
    "xxhash",
)
# The modules that each extra brings. tests/packaging compares them with pyproject.toml.
MODULES: dict[str, tuple[str, ...]] = {
    "scheduler": (*_SERVICE, "tokenizers"),
    "store": (*_SERVICE, "numpy"),
    "worker": (*_SERVICE, "numpy", "pynvml", "safetensors", "tokenizers", "torch"),
    "plots": ("matplotlib",),
    "tracing": ("opentelemetry",),
}
SERVICES = ("scheduler", "store", "worker")


class MissingExtra(FailedPrecondition):
    """A part of Splitpoint is used that is not installed; names the extra that brings it."""

    exit_code = 2

    def __init__(self, what: str, extra: str, module: str) -> None:
        super().__init__(
            f"{what} needs {module}, which is not installed: pip install 'splitpoint[{extra}]'",
            reason="MISSING_EXTRA",
            extra=extra,
        )


def need(what: str, extra: str) -> None:
    """Raise MissingExtra for `what` unless every module of an extra can be imported."""
    if (module := _first_missing(extra)) is not None:
        raise MissingExtra(what, extra, module)


def need_all(what: str) -> None:
    """Raise MissingExtra for `what`, which runs or is all three services, if one cannot run."""
    for extra in SERVICES:
        if (module := _first_missing(extra)) is not None:
            raise MissingExtra(what, "all", module)


def need_for_program(extra: str) -> None:
    """Print one line and exit with code 2 unless the extra of a service's program is there."""
    try:
        need(f"the {extra}", extra)
    except MissingExtra as error:
        print(f"splitpoint: {error.message}", file=sys.stderr)
        sys.exit(2)


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """The extra that brings the module which was not found; None if no extra does."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if module in modules:
            return MissingExtra("this command", extra, module)
    return None


def _first_missing(extra: str) -> str | None:
    return next((module for module in MODULES[extra] if find_spec(module) is None), None)
