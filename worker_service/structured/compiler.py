"""Compiles grammars for the requests of one worker."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import FailedPrecondition, Internal
from splitpoint.structured.checker import GrammarChecker
from splitpoint.structured.grammar import GrammarText, has_llguidance, parser_limits
from worker_service.structured.masks import allowed_ids, computed, masks_of, slow_threads
from worker_service.structured.matcher import GrammarMatcher
from worker_service.structured.vocabulary import Vocabulary, check_spells_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept for further requests of the same tenant, and threads that compile.
_MOST_KEPT = 128
_THREADS = 4


class GrammarCompiler:
    """Makes matchers. Threads may share it; `matcher` blocks for as long as compiling takes.

    Attributes:
        threads: for calls of `matcher`; they give way to other threads.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._size = vocabulary_size
        self._checker = GrammarChecker()
        self.threads = slow_threads("grammars", _THREADS)
        self._lock = threading.Lock()
        self._known: tuple[Vocabulary, LLTokenizer] | None = None
        self._kept: OrderedDict[tuple[bytes, GrammarText], LLMatcher] = OrderedDict()

    @classmethod
    def if_possible(cls, tokenizer: Tokenizer | None, size: int) -> GrammarCompiler | None:
        """Return None if llguidance is not installed, or the tokenizer is none that it can use."""
        if tokenizer is None or not has_llguidance():
            return None
        try:
            check_spells_bytes(tokenizer)
        except FailedPrecondition:
            return None
        return cls(tokenizer, size)

    def matcher(
        self,
        grammar: GrammarText,
        *,
        salt: bytes,
        delivered: Sequence[int] = (),
        ends: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> GrammarMatcher:
        """Return the matcher of an answer that begins with the delivered tokens.

        Its first mask is computed, too. An `error` that this meets is the matcher's.
        `salt`: the tenant's: how long this takes tells nothing of another one's grammars.
        Raises InvalidArgument (the grammar, or the tokens do not fit it), ResourceExhausted.
        """
        found = self._kept_one(salt, grammar)
        if found is None:
            self._checker.check(grammar)
            found = self._compiled(grammar)
            with self._lock:
                self._kept[salt, grammar] = found
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            found = found.deep_copy()
        vocabulary, _ = self._vocabulary()
        matcher = GrammarMatcher(
            found, ends=ends, min_tokens=min_tokens, not_first=vocabulary.not_first
        )
        matcher.replay(delivered)
        if not matcher.is_complete:
            matcher.ahead = computed(masks_of(matcher, (), vocabulary.size))
        return matcher

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._checker.close()

    def _kept_one(self, salt: bytes, grammar: GrammarText) -> LLMatcher | None:
        with self._lock:
            found = self._kept.get((salt, grammar))
            if found is None:
                return None
            self._kept.move_to_end((salt, grammar))
            return found.deep_copy()

    def _compiled(self, grammar: GrammarText) -> LLMatcher:
        vocabulary, tokenizer = self._vocabulary()
        found = _made(tokenizer, grammar.source())
        if not vocabulary.drops_first_space:
            return found
        # One space before the answer is no part of its text. If its own text may begin with one,
        # that space must be there, for else the text's would be dropped.
        allowed = allowed_ids(np.frombuffer(found.compute_bitmask(), np.int32), vocabulary.size)
        is_spaced = bool(np.isin(vocabulary.spaces, allowed).any())
        return _made(tokenizer, grammar.source('" "' if is_spaced else '" "?'))

    def _vocabulary(self) -> tuple[Vocabulary, LLTokenizer]:
        with self._lock:
            if self._known is None:
                vocabulary = Vocabulary(self._tokenizer, self._size)
                self._known = vocabulary, vocabulary.guide()
            return self._known


def _made(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar that was checked. Raises Internal."""
    from llguidance import LLMatcher

    failed = Internal("a grammar that was checked does not compile", reason="GRAMMAR_NOT_COMPILED")
    try:
        made = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise failed from error
    if made.is_error():
        raise failed
    return made
