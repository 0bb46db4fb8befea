"""Whether Mooncake can be loaded on this host, and what to install if not."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

# Shared libraries that the wheel links but does not bring, and Debian's packages of them.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libcurl.so.4": "libcurl4",
    "libnuma.so.1": "libnuma1",
}


def has_wheel() -> bool:
    return find_spec("mooncake") is not None


def missing_packages() -> list[str]:
    """Return Debian's packages of the libraries that this host lacks.

    It loads those that there are, so a store does not call it.
    """
    return [package for library, package in LIBRARIES.items() if not _loads(library)]


def how_to_install() -> str:
    """Return what is missing and how to get it; empty if nothing is."""
    if not has_wheel():
        return "Mooncake is not installed: pip install 'splitpoint[mooncake]'"
    if missing := missing_packages():
        return f"Mooncake's wheel needs {' '.join(missing)}: apt-get install {' '.join(missing)}"
    return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
