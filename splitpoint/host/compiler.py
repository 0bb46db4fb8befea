"""The host's C++ compiler, which makes the kernels of CPU workers."""

from __future__ import annotations

import os
import shutil
from functools import cache

COMPILERS = ("c++", "g++", "clang++")


@cache
def compiler() -> str | None:
    """Return the path of the C++ compiler, the one that $CXX names if it is set; None: none."""
    given = os.environ.get("CXX")
    found = (shutil.which(name) for name in ((given,) if given else COMPILERS))
    return next((path for path in found if path is not None), None)
