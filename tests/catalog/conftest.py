"""The doubles of the neighbouring folders, by plain name."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path += [str(TESTS / "kvstore"), str(TESTS / "scheduler")]
