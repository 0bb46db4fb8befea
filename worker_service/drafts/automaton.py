"""A suffix automaton of a growing text: where its end, or another text's end, occurred before.

Construction by Blumer et al. (1985): a token costs amortised constant time, a few dictionary
operations. This module knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

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
