"""The interface of all drafters: what they see of a sequence, and what they answer.

Drafts are guesses. A wrong one costs time and never changes the text, so a drafter may be
approximate; but it must not change anything that plain decoding reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from splitpoint.selection import Selection
from splitpoint.speculation import DraftMethod, Speculation

# The request's id, its attempt, and its Run stream.
TargetKey = tuple[str, int, int]


class DraftTarget(Protocol):
    """A decoding sequence, as drafters see it. The engine's `Sequence` is one."""

    @property
    def key(self) -> TargetKey: ...

    @property
    def tokens(self) -> list[int]:
        """The prompt and all tokens chosen so far; drafters do not change the list."""
        ...

    @property
    def prompt_length(self) -> int:
        """How many of `tokens` are the prompt."""
        ...

    @property
    def computed(self) -> int:
        """Leading tokens whose K and V are in the cache: all but the newest one."""
        ...

    @property
    def salt(self) -> bytes:
        """The tenant: what was seen of one must not show in drafts for another."""
        ...

    @property
    def is_streamed(self) -> bool:
        """True if its cache is in the store, and each step reads it from there."""
        ...

    @property
    def speculation(self) -> Speculation: ...

    @property
    def selection(self) -> Selection:
        """Which tokens of its cache drafts attend to, or its steps."""
        ...


Target_contra = TypeVar("Target_contra", bound=DraftTarget, contravariant=True)


class Drafter(Protocol[Target_contra]):
    """Guesses the next tokens of sequences. Used by the engine's thread only."""

    @property
    def method(self) -> DraftMethod: ...

    def propose(self, wanted: Sequence[tuple[Target_contra, int]]) -> list[list[int]]:
        """Return guesses for each target, at most as many as are wanted; [] is an answer.

        Called before a step is laid out. What the step before accepted is in the targets'
        tokens. For sampled text, guess what the target will draw: the token that the
        drafter's own distribution gives for the same seed and position.
        """
        ...

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        """Drop what is kept for a sequence: it has ended, or left the device.

        One that left comes back with the same target, or ends later, which is told, too.
        """
        ...
