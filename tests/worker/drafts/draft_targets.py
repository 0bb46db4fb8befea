"""A sequence as drafters see it, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitpoint.selection import FULL, Selection
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.drafts.drafter import TargetKey


@dataclass
class TargetDouble:
    """A `DraftTarget`: tests append to its tokens."""

    key: TargetKey
    tokens: list[int]
    prompt_length: int = 0
    salt: bytes = b""
    is_streamed: bool = False
    speculation: Speculation = field(default_factory=lambda: Speculation(DraftMethod.SUFFIX))
    selection: Selection = FULL

    @property
    def computed(self) -> int:
        return len(self.tokens) - 1
