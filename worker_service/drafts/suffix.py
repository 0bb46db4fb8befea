"""Drafts what followed the newest tokens before: in the same text, or in the tenant's answers.

No model is run: a token costs some microseconds. Long prompts are read in over several steps,
so that no step waits for one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitpoint.speculation import DraftMethod
from worker_service.drafts.automaton import Cursor, SuffixAutomaton
from worker_service.drafts.drafter import DraftTarget, TargetKey

# Tokens that one call reads in, of all prompts and answers: about 2 ms.
TOKENS_AT_ONCE = 512
# Newest tokens of a prompt that are read in.
MOST_PROMPT_TOKENS = 16_384
# Tokens of a tenant's answers in one part of its corpus; the older one of two parts is dropped.
PART_TOKENS = 8_192
# Tenants whose answers are kept, those that were used last: each takes some megabytes.
MOST_TENANTS = 8


class Corpus:
    """Recent answers to one tenant: an older and a newer part, of bounded size."""

    def __init__(self, part_tokens: int = PART_TOKENS) -> None:
        self.parts: list[SuffixAutomaton] = [SuffixAutomaton()]
        self._part_tokens = part_tokens
        self._separators = 0
        self._coming: deque[int] = deque()

    def add(self, answer: Sequence[int]) -> None:
        """Take an answer in later calls of `read_in`; of a long one the end."""
        self._separators += 1
        # It matches nothing: no draft continues one answer with another.
        self._coming.append(-self._separators)
        self._coming.extend(answer[-self._part_tokens :])

    def read_in(self, count: int) -> int:
        """Read at most `count` tokens; return how many are left of the count."""
        while count and self._coming:
            if len(self.parts[-1].text) >= self._part_tokens:
                self.parts = [self.parts[-1], SuffixAutomaton()]
            self.parts[-1].append(self._coming.popleft())
            count -= 1
        return count


@dataclass(slots=True, eq=False)
class _Followed:
    """A sequence that is drafted for.

    Attributes:
        read: how many of its tokens were read in.
        found: the longest end of its text that occurred in it before, and where.
        cursors: its end in each part of its tenant's corpus.
    """

    target: DraftTarget
    read: int
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    found: tuple[int, int] = (0, -1)
    cursors: list[tuple[SuffixAutomaton, Cursor]] = field(default_factory=list)


class SuffixDrafter:
    """Drafts the continuation of an earlier occurrence. See `Drafter`."""

    method = DraftMethod.SUFFIX

    def __init__(self, *, tokens_at_once: int = TOKENS_AT_ONCE) -> None:
        self._tokens_at_once = tokens_at_once
        self._followed: dict[TargetKey, _Followed] = {}
        # The longest unused first.
        self._corpora: OrderedDict[bytes, Corpus] = OrderedDict()

    def propose(self, wanted: Sequence[tuple[DraftTarget, int]]) -> list[list[int]]:
        """Return what followed the longest end of each text that occurred before.

        At most as many tokens as that end has: a long one is the better evidence. A sequence
        whose prompt is not read in yet gets none.
        """
        left = self._tokens_at_once
        drafts: list[list[int]] = []
        for target, count in wanted:
            followed = self._followed.get(target.key) or self._follow(target)
            left = self._read_in(followed, left)
            is_ready = followed.read == len(target.tokens)
            drafts.append(self._draft(followed, count) if is_ready else [])
        for corpus in self._corpora.values():
            left = corpus.read_in(left)
        return drafts

    def forget(self, key: TargetKey) -> None:
        """Add the answer of a sequence to its tenant's corpus."""
        followed = self._followed.pop(key, None)
        if followed is None:
            return
        target = followed.target
        answer = target.tokens[target.prompt_length :]
        corpus = self._corpora.setdefault(target.salt, Corpus())
        self._corpora.move_to_end(target.salt)
        corpus.add(answer)
        if len(self._corpora) > MOST_TENANTS:
            self._corpora.popitem(last=False)

    def _follow(self, target: DraftTarget) -> _Followed:
        first = max(0, len(target.tokens) - MOST_PROMPT_TOKENS)
        followed = self._followed[target.key] = _Followed(target, first)
        return followed

    def _read_in(self, followed: _Followed, most: int) -> int:
        """Read the tokens that are new, at most so many; return what is left of `most`."""
        tokens, own = followed.target.tokens, followed.own
        self._renew_cursors(followed)
        end = min(len(tokens), followed.read + most)
        for index in range(followed.read, end):
            token = tokens[index]
            followed.found = own.append(token)
            for part, cursor in followed.cursors:
                part.advance(cursor, token)
        most -= end - followed.read
        followed.read = end
        return most

    def _renew_cursors(self, followed: _Followed) -> None:
        """Follow the parts that the corpus has now; a new one from the next token on."""
        corpus = self._corpora.get(followed.target.salt)
        parts = [] if corpus is None else corpus.parts
        if [part for part, _ in followed.cursors] != parts:
            known = {id(part): cursor for part, cursor in followed.cursors}
            followed.cursors = [(part, known.get(id(part), Cursor())) for part in parts]

    def _draft(self, followed: _Followed, count: int) -> list[int]:
        """Return the continuation of the longest end that occurred before."""
        text, (length, end) = followed.own, followed.found
        for part, cursor in followed.cursors:
            if cursor.length > length:
                text, length, end = part, cursor.length, part.end_of(cursor)
        if length < followed.target.speculation.prompt_lookup_min:
            return []
        count = min(count, length)
        return text.repeating(end, count) if text is followed.own else text.following(end, count)
