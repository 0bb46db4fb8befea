"""`python -m splitpoint.structured.process`: compiles grammars for a service, within limits.

Each request has a grammar's kind and text and is answered with why it cannot be used, if so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from splitpoint.errors import InvalidArgument
from splitpoint.limited.child import serve
from splitpoint.structured.grammar import GrammarKind, GrammarText, parser_limits


class _Bytes:
    """The smallest tokenizer: what a grammar takes to compile does not depend on a vocabulary."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> int:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])

    def answer(parts: Sequence[str]) -> tuple[str, ...]:
        kind, text = parts
        return (_error_of(GrammarText(GrammarKind(kind), text), tokenizer),)

    serve(answer)
    return 0


def _error_of(grammar: GrammarText, tokenizer: Any) -> str:
    """Return why a grammar cannot be used; empty if it can."""
    from llguidance import LLMatcher

    try:
        source = grammar.source()
        wrong, messages = LLMatcher.validate_grammar_with_warnings(source, limits=parser_limits())
        if wrong:
            return messages[0]
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
        if matcher.is_error():
            return matcher.get_error()
        # One that allows no first byte allows no answer.
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not mask:
            return "no text satisfies it"
        if matcher.is_accepting() and mask >> 256 and not mask % (1 << 256):
            return "only the empty text satisfies it"
    except InvalidArgument as error:
        return error.message
    return ""


if __name__ == "__main__":
    sys.exit(main())
