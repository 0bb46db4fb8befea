"""Drafts what followed the newest tokens before: in the same text, or in its salt's answers.

A salt stands for a tenant and the `cache_salt` of its requests. No model is run: a suffix automaton
(Blumer et al., 1985) finds where a text's end occurred before, and a token costs amortised constant
time, some microseconds. Long prompts are read in over several steps, so that no step waits for one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitpoint.speculation import DraftMethod
from worker_service.drafts.draft_length import even_shares
from worker_service.drafts.drafter import DraftTarget, TargetKey

_ROOT = 0


@dataclass(slots=True)
class Cursor:
    """The longest end of a text that occurs in an automaton's text: its state and length."""

    state: int = _ROOT
    length: int = 0


class SuffixAutomaton:
    """All substrings of a text of token ids.

    Attributes:
        text: the tokens so far. Negative ones separate texts: each differs from all others.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        # For each state: its longest substring, its suffix link, the end of an occurrence of
        # its substrings, and its transitions.
        self._lengths = [0]
        self._links = [-1]
        self._ends = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._last = _ROOT

    def append(self, token: int) -> tuple[int, int]:
        """Add a token.

        Return the length of the longest end of the text that occurred before, and where that
        occurrence ends (the index of its last token); (0, -1) if there is none.
        """
        position = len(self.text)
        self.text.append(token)
        state = self._new_state(self._lengths[self._last] + 1, position, {})
        before = self._last
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = state
            before = self._links[before]
        self._last = state
        if before < 0:
            self._links[state] = _ROOT
            return 0, -1
        link = self._links[state] = self._at_length(before, token)
        found = self._lengths[link], self._ends[link]
        # The next time its latest occurrence is found, which is the likelier to go on alike.
        self._ends[link] = position
        return found

    def advance(self, cursor: Cursor, token: int) -> None:
        """Follow a token of another text."""
        # States may have been divided since: then the shorter substrings have a state above.
        while cursor.state != _ROOT and self._lengths[self._links[cursor.state]] >= cursor.length:
            cursor.state = self._links[cursor.state]
        while cursor.state != _ROOT and token not in self._next[cursor.state]:
            cursor.state = self._links[cursor.state]
            cursor.length = self._lengths[cursor.state]
        following = self._next[cursor.state].get(token)
        if following is not None:
            cursor.state = following
            cursor.length += 1

    def end_of(self, cursor: Cursor) -> int:
        """Return where an occurrence ends; -1 if the cursor has no length."""
        return self._ends[cursor.state] if cursor.length else -1

    def following(self, end: int, count: int) -> list[int]:
        """Return at most `count` tokens after the one at `end`, up to the end of its text."""
        tokens = self.text[end + 1 : end + 1 + count]
        for index, token in enumerate(tokens):
            if token < 0:
                return tokens[:index]
        return tokens

    def repeating(self, end: int, count: int) -> list[int]:
        """Return `count` tokens after the one at `end`, as if the text went round from there."""
        period = len(self.text) - 1 - end
        tokens = self.text[end + 1 : end + 1 + count]
        while len(tokens) < count:
            tokens.append(tokens[-period])
        return tokens

    def _new_state(self, length: int, end: int, transitions: dict[int, int]) -> int:
        self._lengths.append(length)
        self._links.append(_ROOT)
        self._ends.append(end)
        self._next.append(transitions)
        return len(self._lengths) - 1

    def _at_length(self, before: int, token: int) -> int:
        """Return the state after `token` whose longest substring ends right behind `before`'s.

        It is divided from the transition's state if that has longer ones.
        """
        target = self._next[before][token]
        length = self._lengths[before] + 1
        if self._lengths[target] == length:
            return target
        clone = self._new_state(length, self._ends[target], dict(self._next[target]))
        self._links[clone] = self._links[target]
        self._links[target] = clone
        while before >= 0 and self._next[before].get(token) == target:
            self._next[before][token] = clone
            before = self._links[before]
        return clone


# Drafted tokens for each token of the end that occurred before, at most. With 2 in place of 1 a
# step yields 5 % more tokens of code and 15 % more of records (16 drafts; docs/lab/log.md).
LENGTHS = 2
# Tokens that one call reads in, of all prompts and answers: about 2 ms.
TOKENS_AT_ONCE = 512
# The share of them that answers have while prompts take the rest.
ANSWERS_SHARE = 0.25
# Newest tokens of a prompt that are read in. A token that was read takes about 0.4 KB.
MOST_PROMPT_TOKENS = 16_384
# A text that has grown to this many tokens is begun anew with this many of its newest ones.
MOST_TEXT_TOKENS = 24_576
KEPT_TEXT_TOKENS = 8_192
# Tokens of a salt's answers in one part of its corpus; the older one of two parts is dropped.
PART_TOKENS = 8_192
# Tokens of all salts' answers, and salts, those that were used last: about 50 MB.
MOST_CORPUS_TOKENS = 131_072
MOST_CORPORA = 64


class Corpus:
    """Recent answers under one salt: an older and a newer part, of bounded size."""

    def __init__(self, part_tokens: int = PART_TOKENS) -> None:
        self.parts: list[SuffixAutomaton] = [SuffixAutomaton()]
        self._part_tokens = part_tokens
        self._separators = 0
        self._coming: deque[list[int]] = deque()
        # Tokens of the first one of `_coming` that were read in.
        self._begun = 0
        self.backlog = 0

    @property
    def size(self) -> int:
        """Tokens that were read in, and that are to be."""
        return self.backlog + sum(len(part.text) for part in self.parts)

    def add(self, answer: Sequence[int]) -> None:
        """Take an answer in later calls of `read_in`; of a long one the end.

        If more of them wait than the corpus can hold, the oldest are dropped.
        """
        self._separators += 1
        # The first token matches nothing: no draft continues one answer with another.
        coming = [-self._separators, *answer[-self._part_tokens :]]
        self._coming.append(coming)
        self.backlog += len(coming)
        while self.backlog > 2 * self._part_tokens + 1 and len(self._coming) > 1:
            self.backlog -= len(self._coming.popleft()) - self._begun
            self._begun = 0

    def read_in(self, count: int) -> int:
        """Read at most `count` tokens; return how many are left of the count."""
        while count and self._coming:
            if len(self.parts[-1].text) >= self._part_tokens:
                self.parts = [self.parts[-1], SuffixAutomaton()]
            self.parts[-1].append(self._coming[0][self._begun])
            self._begun += 1
            self.backlog -= 1
            count -= 1
            if self._begun == len(self._coming[0]):
                self._coming.popleft()
                self._begun = 0
        return count


@dataclass(slots=True, eq=False)
class _Followed:
    """A sequence that is drafted for.

    Attributes:
        read: how many of its tokens were read in.
        found: the longest end of its text that occurred in it before, and where.
        cursors: its end in each part of its salt's corpus.
    """

    target: DraftTarget
    read: int
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    found: tuple[int, int] = (0, -1)
    cursors: list[tuple[SuffixAutomaton, Cursor]] = field(default_factory=list)

    def begin_anew(self, first: int) -> None:
        """Drop what was read; the tokens from `first` on are read in again."""
        self.read, self.own, self.found, self.cursors = first, SuffixAutomaton(), (0, -1), []


class SuffixDrafter:
    """Drafts the continuation of an earlier occurrence. See `Drafter`."""

    method = DraftMethod.SUFFIX

    def __init__(
        self,
        *,
        tokens_at_once: int = TOKENS_AT_ONCE,
        most_text_tokens: int = MOST_TEXT_TOKENS,
        most_corpus_tokens: int = MOST_CORPUS_TOKENS,
    ) -> None:
        self._tokens_at_once = tokens_at_once
        self._most_text_tokens = most_text_tokens
        self._kept_text_tokens = min(KEPT_TEXT_TOKENS, most_text_tokens // 2)
        self._most_corpus_tokens = most_corpus_tokens
        self._followed: dict[TargetKey, _Followed] = {}
        # The longest unused first.
        self._corpora: OrderedDict[bytes, Corpus] = OrderedDict()

    def propose(self, wanted: Sequence[tuple[DraftTarget, int]]) -> list[list[int]]:
        """Return what followed the longest end of each text that occurred before.

        At most LENGTHS times as many tokens as that end has: a long one is the better evidence. A
        sequence whose prompt is not read in yet gets none.
        """
        backlogs = [corpus.backlog for corpus in self._corpora.values()]
        kept = min(sum(backlogs), int(ANSWERS_SHARE * self._tokens_at_once))
        left = self._tokens_at_once - kept
        drafts: list[list[int]] = []
        for target, count in wanted:
            followed = self._followed.get(target.key) or self._follow(target)
            left = self._read_in(followed, left)
            is_ready = followed.read == len(target.tokens)
            drafts.append(self._draft(followed, count) if is_ready else [])
        shares = even_shares(backlogs, left + kept)
        for corpus, share in zip(self._corpora.values(), shares, strict=True):
            corpus.read_in(share)
        return drafts

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        """Add the answer of a sequence that has ended to its salt's corpus.

        One that left the device comes back with the same text: all of it is kept.
        """
        followed = self._followed.pop(key, None) if has_ended else None
        if followed is None:
            return
        target = followed.target
        answer = target.tokens[target.prompt_length :]
        corpus = self._corpora.setdefault(target.salt, Corpus())
        self._corpora.move_to_end(target.salt)
        corpus.add(answer)
        sizes = deque(corpus.size for corpus in self._corpora.values())
        while sum(sizes) > self._most_corpus_tokens or len(sizes) > MOST_CORPORA:
            self._corpora.popitem(last=False)
            sizes.popleft()

    def _follow(self, target: DraftTarget) -> _Followed:
        first = max(0, len(target.tokens) - MOST_PROMPT_TOKENS)
        followed = self._followed[target.key] = _Followed(target, first)
        return followed

    def _read_in(self, followed: _Followed, most: int) -> int:
        """Read the tokens that are new, at most this many; return what is left of `most`."""
        tokens = followed.target.tokens
        if len(followed.own.text) >= self._most_text_tokens:
            followed.begin_anew(max(0, len(tokens) - self._kept_text_tokens))
        own = followed.own
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
        count = min(count, LENGTHS * length)
        return text.repeating(end, count) if text is followed.own else text.following(end, count)
