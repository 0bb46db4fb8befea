"""The installed extras, and errors that name a missing one.

A client installs little; services come with extras of pyproject.toml. Programs call this
module before they import anything else, so it needs the standard library only.
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
# The modules that each extra brings. tests/packaging compares them with pyproject.toml. A missing
# module is blamed on the first one that brings it.
MODULES: dict[str, tuple[str, ...]] = {
    "scheduler": (*_SERVICE, "jinja2", "tokenizers"),
    "store": (*_SERVICE, "numpy"),
    "worker": (*_SERVICE, "numpy", "pynvml", "safetensors", "tokenizers", "torch", "transformers"),
    "gateway": (*_SERVICE, "httptools", "starlette", "uvicorn", "uvloop"),
    "mooncake": (*_SERVICE, "mooncake", "numpy"),
    "plots": ("matplotlib",),
    "structured": ("llguidance",),
    "tracing": ("opentelemetry",),
    "vllm": ("numpy", "xxhash"),
}
SERVICES = ("scheduler", "store", "worker")


class MissingExtra(FailedPrecondition):
    """A module is not installed; the error names the extra that brings it."""

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


def is_installed(extra: str) -> bool:
    """Return whether every module of an extra can be imported."""
    return _first_missing(extra) is None


def need_all(what: str) -> None:
    """Raise MissingExtra for `what` unless all three services can run."""
    for extra in SERVICES:
        if (module := _first_missing(extra)) is not None:
            raise MissingExtra(what, "all", module)


def need_for_program(extra: str) -> None:
    """Print one line and exit with code 2 unless the extra of a service is installed."""
    try:
        need(f"the {extra}", extra)
    except MissingExtra as error:
        print(f"splitpoint: {error.message}", file=sys.stderr)
        sys.exit(2)


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Return the error for the extra that brings the missing module; None if no extra does."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if module in modules:
            return MissingExtra("this command", extra, module)
    return None


def _first_missing(extra: str) -> str | None:
    return next((module for module in MODULES[extra] if find_spec(module) is None), None)
