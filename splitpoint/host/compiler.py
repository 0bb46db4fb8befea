"""The host's C++ compiler, which makes the kernels of CPU workers."""

from __future__ import annotations

import os
import shlex
import shutil
from functools import cache

COMPILERS = ("c++", "g++", "clang++")


@cache
def compiler() -> tuple[str, ...] | None:
    """Return the C++ compiler's command: a path, then arguments; None if there is none.

    $CXX if it is set, which may have several words: `ccache g++`, `g++ -m64`.
    """
    given = _words(os.environ.get("CXX", ""))
    for program, *arguments in [given] if given else [[name] for name in COMPILERS]:
        path = shutil.which(program)
        if path is not None:
            return path, *arguments
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quotation mark
        return [text]
