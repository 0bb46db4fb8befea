"""Prompts: random ones, or cut from the user's files or from unseen Python packages.

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

# Token ids of each prompt.
Prompts = tuple[tuple[int, ...], ...]


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


def beginnings(files: Sequence[Path], folder: Path, count: int, length: int) -> Prompts:
    """Return the first `length` tokens of `count` files that are long enough, in order.

    If there are fewer files, further pieces of them follow.

    Raises InvalidArgument if that is too little text, a file is no text, or the checkpoint folder
    has no tokenizer.
    """
    tokenizer = _tokenizer(folder, "shape")
    before = _opening(tokenizer)
    pieces: list[tuple[int, int, tuple[int, ...]]] = []
    size = length - len(before)
    for place, path in enumerate(files):
        tokens = _tokens(tokenizer, path)
        for piece in range(len(tokens) // size):
            cut = tokens[piece * size : (piece + 1) * size]
            pieces.append((piece, place, (*before, *cut)))
    if len(pieces) < count:
        raise InvalidArgument(
            f"{count} prompts of {length} tokens are wanted; the text has {len(pieces)}",
            field="text",
        )
    return tuple(tokens for _, _, tokens in sorted(pieces)[:count])


def text_prompts(text: Path, folder: Path, batch: int, length: int) -> Prompts:
    """Return `batch` passages of a text in a checkpoint's tokens, spread evenly over it.

    Each begins with what the tokenizer puts before a text. Raises InvalidArgument if the
    text cannot be read or is shorter than one passage.
    """
    tokenizer = _tokenizer(folder, "model")
    return passages(_opening(tokenizer), _tokens(tokenizer, text), batch, length)


def passages(before: Sequence[int], tokens: Sequence[int], batch: int, length: int) -> Prompts:
    """Return passages of `length` tokens, `before` included. Raises InvalidArgument."""
    wanted = length - len(before)
    spare = len(tokens) - wanted
    if wanted < 1 or spare < 0:
        raise InvalidArgument(
            f"the text has {len(tokens)} tokens: --prompt {length} takes more", field="prompt"
        )
    starts = [spare * index // max(1, batch - 1) for index in range(batch)]
    return tuple((*before, *tokens[start : start + wanted]) for start in starts)


def random_prompts(vocabulary_size: int, batch: int, length: int, seed: int) -> Prompts:
    """Return `batch` prompts of `length` token ids drawn from the seed."""
    draw = random.Random(seed)
    return tuple(tuple(draw.choices(range(vocabulary_size), k=length)) for _ in range(batch))


def _tokenizer(folder: Path, field: str) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        raise InvalidArgument(f"{folder} has no tokenizer", field=field)
    return tokenizer


def _opening(tokenizer: Tokenizer) -> list[int]:
    """Return what stands before any text, such as a token for its beginning."""
    return tokenizer.encode("")


def _tokens(tokenizer: Tokenizer, path: Path) -> list[int]:
    """Return a file's tokens without the opening. Raises InvalidArgument."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{path} cannot be read as text: {why}", field="text") from None
    return tokenizer.encode(text)[len(_opening(tokenizer)) :]
