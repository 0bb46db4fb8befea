"""Texts that a benchmark's prompts are cut from: the user's files, or some of Python's library.

The bundled model was trained on the standard library without these folders.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument

HELD_BACK = ("asyncio", "unittest")


def held_back_files() -> list[Path]:
    """Return the running interpreter's files that the bundled model has not seen."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for folder in HELD_BACK for path in (library / folder).glob("*.py"))


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
