"""What factors of screens are made from by default: text, and how they are trained."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

# Held out when the bundled model was trained (models/README.md).
HELD_OUT = frozenset({"asyncio", "unittest", "idlelib", "lib2to3", "tomllib", "wsgiref"})
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "__pycache__"})
# A token of code has more than one byte, so a passage takes more bytes than tokens.
_TOKEN_BYTES = 4

# Factors that are trained on shorter text rank the tokens of longer text badly.
LENGTH = 2048
TOKENS = 16_384
# First step of MAPLE's training. At 0.03 the squared error of some layers rises.
RATE = 0.02


def calibration_passages(
    folder: Path, text: Path | None, tokens: int, length: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Return passages of `length` tokens, about `tokens` in all, at least two.

    They are cut from the user's file, or from files of Python's library, which come from outside
    of the packages that the bundled model's quality is measured on.

    Raises InvalidArgument if there is too little text, or the checkpoint has no tokenizer.
    """
    from splitpoint_cli.bench.texts import beginnings  # loads the tokenizers library

    count = max(2, tokens // length)
    files = [text] if text is not None else _library_files(count, length, seed)
    return beginnings(files, folder, count, length)


def _library_files(count: int, length: int, seed: int) -> list[Path]:
    """Return files of Python's library that hold enough passages, in a random order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folders = [library, *(path for path in sorted(library.iterdir()) if path.is_dir())]
    files = [
        path
        for folder in folders
        if folder.name not in HELD_OUT | _NOT_LIBRARY
        for path in sorted(folder.glob("*.py"))
        if path.stat().st_size >= _TOKEN_BYTES * length
    ]
    random.Random(seed).shuffle(files)
    # The first passages of twice as many files: some are in few and long tokens.
    return files[: max(8, 2 * count)]
