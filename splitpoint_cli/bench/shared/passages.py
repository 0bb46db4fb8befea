"""Texts that prompts and evaluations are cut from: the user's files, or unseen Python packages.

The bundled model was trained on the standard library without asyncio and unittest
(tools/train_stdlib_model.py). The other two are packages of the development environment, which
never were in it.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument

HELD_BACK = ("asyncio", "unittest")
# Where sysconfig's path of this name has them.
UNSEEN = (
    *(("stdlib", package) for package in HELD_BACK),
    ("purelib", "_pytest"),
    ("purelib", "hypothesis"),
)
UNSEEN_SEED = 0


def held_back_files() -> list[Path]:
    """Return the running interpreter's files that the bundled model has not seen."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for folder in HELD_BACK for path in (library / folder).glob("*.py"))


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginnings of some files of one package: window i is from file i."""

    package: str
    files: list[str]
    windows: list[list[int]]


def read_unseen(tokenizer: Tokenizer, window_count: int, window_tokens: int) -> Iterator[Sample]:
    """Yield each package's files that fill a window, in a reproducible random order.

    A package that is not installed, or has no such file, has an empty sample.
    """
    for scheme, package in UNSEEN:
        root = Path(sysconfig.get_paths()[scheme])
        paths = sorted((root / package).rglob("*.py"))
        random.Random(UNSEEN_SEED).shuffle(paths)
        files: list[str] = []
        windows: list[list[int]] = []
        for path in paths:
            if len(files) == window_count:
                break
            ids = tokenizer.encode(path.read_text(encoding="utf-8"))
            if len(ids) >= window_tokens:
                files.append(path.relative_to(root).as_posix())
                windows.append(ids[:window_tokens])
        yield Sample(package, files, windows)


def beginnings(
    files: Sequence[Path], folder: Path, count: int, length: int
) -> tuple[tuple[int, ...], ...]:
    """Return the first `length` tokens of `count` files that are long enough, in order.

    Of fewer files, further pieces follow. Raises InvalidArgument if that is too little text,
    a file is no text, or the checkpoint folder has no tokenizer.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        raise InvalidArgument(f"{folder} has no tokenizer", field="shape")
    # What stands before any text, such as a token for its beginning.
    before = tokenizer.encode("")
    pieces: list[tuple[int, int, tuple[int, ...]]] = []
    size = length - len(before)
    for place, path in enumerate(files):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path} cannot be read as text: {error}", field="text") from None
        tokens = tokenizer.encode(text)[len(before) :]
        for piece in range(len(tokens) // size):
            cut = tokens[piece * size : (piece + 1) * size]
            pieces.append((piece, place, (*before, *cut)))
    if len(pieces) < count:
        raise InvalidArgument(
            f"{count} prompts of {length} tokens are wanted; the text has {len(pieces)}",
            field="text",
        )
    return tuple(tokens for _, _, tokens in sorted(pieces)[:count])
