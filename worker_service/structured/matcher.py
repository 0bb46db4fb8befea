"""The grammar of one running request: what its answer has come to, and what may follow."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.structured.grammar import FIELD

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Bit i of a mask, least significant first, is set if id i may be chosen. `[words]`.
Mask = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks behind an answer and behind each of its drafts, with their processor seconds.

    `masks` is empty if the matcher has an error, and shorter if nothing may follow a draft.
    """

    drafts: tuple[int, ...]
    masks: list[Mask]
    seconds: float


class GrammarMatcher:
    """Follows the tokens of one answer. Used by one thread at a time.

    While `is_awaited`, that is the one which computes its masks.

    Attributes:
        ends: ids that end the answer where it is complete: the model's end of sequence and the
            request's stop tokens. They are no part of its text.
        min_tokens: before this many tokens it does not end where it can go on.
        not_first: ids that may not begin it.
        count: tokens of the answer so far.
        ahead: the masks behind the present answer, or their computation; None: not begun.
        is_slow: the latest masks took so long that a step should not wait for the next ones.
    """

    def __init__(
        self,
        inner: LLMatcher,
        *,
        ends: frozenset[int],
        min_tokens: int = 0,
        not_first: Sequence[int] = (),
    ) -> None:
        self._inner = inner
        self.ends = sorted(ends)
        self.min_tokens = min_tokens
        self.not_first = not_first
        self.count = 0
        self.ahead: Future[Masks] | None = None
        self.is_slow = False
        self._has_no_token = False
        self._takes_too_long = False

    @property
    def is_awaited(self) -> bool:
        """True while a thread computes its masks: nothing can be chosen yet."""
        return self.ahead is not None and not self.ahead.done()

    @property
    def inner(self) -> LLMatcher:
        """For `masks` only."""
        return self._inner

    @property
    def is_complete(self) -> bool:
        """True if the answer is whole and nothing can follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def error(self) -> SplitpointError | None:
        """Why the answer cannot go on; None if it can."""
        if self._takes_too_long or self._inner.is_error():
            return InvalidArgument(
                "the grammar is too complex at this place of the answer",
                field=FIELD,
                reason="GRAMMAR_TOO_COMPLEX",
            )
        if self._has_no_token:
            return InvalidArgument(
                "no token of the model may follow: stop_token_ids, or the grammar, exclude all",
                field=FIELD,
                reason="GRAMMAR_DEAD_END",
            )
        return None

    def accept(self, token_id: int) -> None:
        """Add a token of the answer's text, which the last mask allowed."""
        self._inner.consume_token(token_id)
        self.count += 1
        self.ahead = None

    def replay(self, token_ids: Sequence[int]) -> None:
        """Add tokens that an earlier attempt delivered.

        Raises InvalidArgument if they are no begin of an answer.
        """
        if self._inner.try_consume_tokens(list(token_ids)) < len(token_ids):
            raise InvalidArgument(
                "the tokens are no begin of an answer that the structured output allows",
                field="resume.token_ids",
            )
        self.count += len(token_ids)

    def allowed_drafts(self, drafts: Sequence[int]) -> int:
        """Return how many of the next tokens, as guessed, leave the answer open."""
        found = self._inner.try_consume_tokens(list(drafts))
        # Nothing is chosen behind the token that completes it.
        open_count = found - self._inner.is_stopped() if found else 0
        if found:
            self._inner.rollback(found)
        return max(0, int(open_count))

    def takes_too_long(self) -> None:
        """Note that a mask took more of the processor than one may."""
        self._takes_too_long = True

    def finds_no_token(self) -> None:
        """Note that a mask was empty."""
        self._has_no_token = True
