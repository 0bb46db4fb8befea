"""Greedy texts of transformers' models, computed once for all processes of a test session."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens, and the lead of each token's logit over the second one."""

    tokens: list[int]
    leads: list[float]


_folders: list[Path] = []


def use_folder_of(session: pytest.TempPathFactory) -> None:
    """Keep references in pytest's temporary folder; processes of xdist share it."""
    folder = session.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    _folders[:] = [folder / "references"]
    _folders[0].mkdir(exist_ok=True)


def session_folder() -> Path:
    """Return the folder that all processes of this test session share."""
    return _folders[0]


def find(key: str, count: int) -> Greedy | None:
    """Return the first `count` tokens kept under a key; None if there are not as many."""
    for folder in _folders:
        try:
            kept = Greedy(**json.loads((folder / key).read_text()))
        except FileNotFoundError:
            return None
        if len(kept.tokens) >= count:
            return Greedy(kept.tokens[:count], kept.leads[:count])
    return None


def keep(key: str, found: Greedy) -> None:
    """Keep tokens for the whole session. A file that has its name is whole."""
    for folder in _folders:
        working = folder / f"{key}.{os.getpid()}"
        working.write_text(json.dumps({"tokens": found.tokens, "leads": found.leads}))
        working.rename(folder / key)
