"""`python -m splitpoint.structured.process`: compiles grammars for a service, within limits.

Reads one JSON line for each grammar from its standard input and answers with one. It ends with the
service, and the kernel ends it when one grammar takes too long. It cannot write files.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from splitpoint.errors import InvalidArgument
from splitpoint.structured.grammar import GrammarKind, GrammarText, parser_limits

# Seconds of the processor, and bytes, that compiling one grammar may take.
MOST_SECONDS = 2.0
MOST_MEMORY_BYTES = 1 << 30


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

    _limit()
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    for line in sys.stdin:
        grammar = _grammar_of(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        error = _error_of(grammar, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"error": error}), flush=True)
    return 0


def _grammar_of(told: dict[str, str]) -> GrammarText:
    return GrammarText(GrammarKind(told["kind"]), told["text"])


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


def _limit() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the service decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, most in (
        (resource.RLIMIT_AS, MOST_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    sys.exit(main())
