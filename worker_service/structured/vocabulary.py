"""The model's vocabulary as llguidance sees it: the bytes of each token's text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.structured.grammar import unavailable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Text of many kinds of characters, which a tokenizer must keep as it is.
_SAMPLE = 'a{"Key_1": [-2.5e+3, true, null], "z": "\\u00e9\\n"}\n\t <b>é€😀</b>  日本'

_BYTES_OF_UTF8 = [*range(0xC0), *range(0xC2, 0xF5)]


class Vocabulary:
    """A tokenizer, and its tokens' bytes.

    Behind the model's ids there is one more, `end_id`: its bit in a mask says that the answer may
    end. Which ids of the model end it is the request's business.

    Attributes:
        size: ids of the model, those without a token included.
        drops_first_space: one space at the begin of an answer is no part of its text.
        spaces: ids whose text begins with a space.
        not_first: ids that would lose other spaces at the begin of an answer, or none where others
            lose one. They do not begin any.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Raises FailedPrecondition if texts are not the tokens' bytes in a row."""
        check_spells_bytes(tokenizer)
        self.size = self.end_id = size
        self._tokenizer = tokenizer
        self._bytes = [
            b"" if tokenizer.is_silent(index) else tokenizer.token_bytes(index)
            for index in range(size)
        ]
        self.spaces = [index for index, text in enumerate(self._bytes) if text[:1] == b" "]
        firsts = {
            index: tokenizer.decode_segment([index], first=True)
            for index, text in enumerate(self._bytes)
            if b" " in text
        }
        self.drops_first_space = any(not firsts[index].startswith(" ") for index in self.spaces)
        self.not_first = [
            index for index, text in firsts.items() if text.encode() != self._first(index)
        ]
        self._anchor = tokenizer.encode("a", adds_special_tokens=False)
        self._by_bytes = {text: index for index, text in enumerate(self._bytes) if text}
        self._most_bytes = max(map(len, self._by_bytes))
        # Any text can be spelled, so that one that a grammar forces always can.
        if not all(bytes([byte]) in self._by_bytes for byte in _BYTES_OF_UTF8):
            raise unavailable("the model's vocabulary lacks tokens of single bytes")

    def _first(self, index: int) -> bytes:
        """Return the text that a token should have at the begin of an answer."""
        text = self._bytes[index]
        return text.removeprefix(b" ") if self.drops_first_space else text

    def guide(self) -> LLTokenizer:
        """Return llguidance's tokenizer, which matchers share."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Spelled(self)))

    def special_ids(self) -> list[int]:
        """Return the ids without text."""
        return [index for index, text in enumerate(self._bytes) if not text]

    def spelled(self) -> list[bytes]:
        """Return the bytes of all ids and of `end_id`; those without text by their spelling."""
        names = self._tokenizer.spelling(range(self.size))
        texts = zip(self._bytes, names, strict=True)
        return [*(text or name.encode() for text, name in texts), b"<answer-end>"]

    def encode(self, text: bytes) -> list[int]:
        """Return the ids of a text within an answer, as the tokenizer cuts it.

        Where these would not spell it, each id is the longest token at its place.
        """
        try:
            ids = self._tokenizer.encode("a" + text.decode(), adds_special_tokens=False)
        except UnicodeDecodeError:
            return self._longest(text)
        is_anchored = ids[: len(self._anchor)] == self._anchor
        ids = ids[len(self._anchor) :]
        is_known = is_anchored and all(index < self.size for index in ids)
        if is_known and b"".join(self._bytes[index] for index in ids) == text:
            return ids
        return self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            size = min(self._most_bytes, len(text) - place)
            while (index := self._by_bytes.get(text[place : place + size])) is None:
                size -= 1
            ids.append(index)
            place += size
        return ids


class _Spelled:
    """What llguidance reads of a vocabulary."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.spelled()
        self.eos_token_id = vocabulary.end_id
        self.special_token_ids = [*vocabulary.special_ids(), vocabulary.end_id]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def check_spells_bytes(tokenizer: Tokenizer) -> None:
    """Raise FailedPrecondition if a text is not its tokens' bytes in a row."""
    ids = tokenizer.encode(_SAMPLE, adds_special_tokens=False)
    spelled = b"".join(tokenizer.token_bytes(index) for index in ids)
    if spelled.removeprefix(b" ") != _SAMPLE.encode():
        raise unavailable("the model's tokenizer changes texts: answers cannot follow a grammar")
