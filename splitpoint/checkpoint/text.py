"""Text to token ids and back, piece by piece, with stop strings.

On top of the tokenizers library: streamed text is returned only once it is final, and a stop
string is found across token borders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from splitpoint.checkpoint.files import MOST_TOKENIZER_BYTES, is_there, read_object
from splitpoint.checkpoint.token_bytes import (
    bytes_of_spelling,
    is_byte_level,
    longest_token_bytes,
)
from splitpoint.errors import InvalidArgument

REPLACEMENT = "\ufffd"  # decoded from bytes that are not (yet) UTF-8
# Byte tokens of vocabularies in SentencePiece's manner.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# UTF-8 characters have at most 4 bytes, tokens at least 1: a token that is followed by so
# many others is not part of an incomplete character.
_SETTLED_AFTER_TOKENS = 4
_LONGEST_UNCERTAIN = 64


class TooManyTokens(ValueError):
    """A text has more tokens than allowed: `count`, or at least `count`."""

    def __init__(self, count: int, *, is_exact: bool) -> None:
        super().__init__(f"{'' if is_exact else 'at least '}{count:,} tokens")
        self.count = count


class Tokenizer:
    """A checkpoint's tokenizer: immutable, so threads can share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A checkpoint may carry the truncation and padding of its training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._longest_token = longest_token_bytes(backend)
        # Byte-level vocabularies spell each byte as a character.
        self._spells_bytes = is_byte_level(backend)
        # Filled as tokens are asked for: few of a large vocabulary are.
        self._bytes: dict[int, bytes] = {}
        self._anchor = self._find_anchor()
        self._anchor_text = self._decode_plain(self._anchor)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """Load `tokenizer.json`, else `vocab.json` and `merges.txt` (byte-level BPE, as OPT's).

        None if the folder has neither. Special tokens follow `tokenizer_config.json` as in
        transformers: an explicit `add_bos_token` or `add_eos_token` replaces the file's own
        template. Raises InvalidArgument if a file cannot be read.
        """
        single, vocabulary, merges = (
            folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
        )
        try:
            if is_there(single, MOST_TOKENIZER_BYTES):
                backend = tokenizers.Tokenizer.from_file(str(single))
            elif all(is_there(path, MOST_TOKENIZER_BYTES) for path in (vocabulary, merges)):
                model = models.BPE.from_file(str(vocabulary), str(merges))
                backend = tokenizers.Tokenizer(model)
                backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
                backend.decoder = decoders.ByteLevel()
            else:
                return None
            _apply_config(backend, _settings(folder / "tokenizer_config.json"))
        except InvalidArgument:
            raise
        except Exception as error:  # the library raises bare Exception for bad files
            raise InvalidArgument(
                f"the tokenizer in {folder} cannot be read: {error}", field="model"
            ) from error
        return cls(backend)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids with a spelling, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def spellings(self) -> dict[int, str]:
        """Return the token of each id, added tokens included, as the tokenizer's file spells it."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return {index: token for token, index in vocabulary.items()}

    def encode(
        self, text: str, most: int | None = None, *, adds_special_tokens: bool = True
    ) -> list[int]:
        """Return token ids, by default with the special tokens that a prompt has around it.

        Other threads run meanwhile. Raises TooManyTokens for more than `most`, before making
        a list of the ids, which holds the interpreter.
        """
        least = self.fewest_tokens(text)
        if most is not None and least > most:
            raise TooManyTokens(least, is_exact=False)
        # Unlike `encode` this releases the interpreter, for one text too.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding), is_exact=True)
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Return the least number of tokens of the text, by its bytes; see `token_bytes`."""
        if self._longest_token is None:
            return 0
        size = len(text) if text.isascii() else len(text.encode())
        return -(-size // self._longest_token)

    def decode(self, token_ids: Sequence[int], *, keeps_special_tokens: bool = False) -> str:
        """Return the text of a whole sequence, by default without special tokens."""
        text = self.decode_segment(list(token_ids), first=True, keeps_special=keeps_special_tokens)
        if REPLACEMENT not in text:
            return text
        # The library turns every byte of a run into U+FFFD if one of them is wrong.
        stream = TextStream(self, (), keeps_special=keeps_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token's text inside a sequence; a special token's spelling.

        They are not UTF-8 by themselves if the token is a part of a character. Empty for an id
        without a spelling.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def spelling(self, token_ids: Iterable[int]) -> list[str]:
        """Return each token's spelling in the vocabulary; empty for ids without one."""
        return [self._backend.id_to_token(index) or "" for index in token_ids]

    def is_silent(self, token_id: int, *, keeps_special: bool = False) -> bool:
        """Return True if the token has no text: no spelling, or it is special and not kept."""
        is_dropped = token_id in self._special_ids and not keeps_special
        return is_dropped or self._backend.id_to_token(token_id) is None

    def decode_segment(
        self, token_ids: list[int], *, first: bool, keeps_special: bool = False
    ) -> str:
        """Return the text of tokens inside a sequence, or from its `first` token on.

        Decoders may treat the start of a text differently (SentencePiece drops one space
        there), so inner segments are decoded after a known token.
        """
        if first:
            return self._decode_plain(token_ids, keeps_special=keeps_special)
        text = self._decode_plain([*self._anchor, *token_ids], keeps_special=keeps_special)
        return text[len(self._anchor_text) :]

    def _find_bytes(self, token_id: int) -> bytes:
        spelling = self._backend.id_to_token(token_id)
        if spelling is None:
            return b""
        if token_id in self._added_ids:
            return spelling.encode()
        if self._spells_bytes:
            return bytes_of_spelling(spelling)
        if (byte := _BYTE_TOKEN.fullmatch(spelling)) is not None:
            return bytes.fromhex(byte[1])
        return self.decode_segment([token_id], first=False).encode()

    def _decode_plain(self, token_ids: list[int], *, keeps_special: bool = False) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=not keeps_special)
        return text

    def _find_anchor(self) -> list[int]:
        """Return a token whose text is independent of the tokens that follow."""
        likely = self._backend.encode("a", add_special_tokens=False).ids[-1:]
        for index in (*likely, *range(self._backend.get_vocab_size())):
            text = self._decode_plain([index])
            if text.isalnum() and not self.is_silent(index):
                return [index]
        return []


class TextStream:
    """The text of one growing sequence of tokens, up to a stop string.

    The results of `push` are final: they never end inside a character, and no stop string
    begins in them. All results of `push` and `finish` together are the decoded sequence, or
    its part before the match.

    Among several matching stop strings the one that ends first counts, then the longest,
    independent of token borders and of how tokens were grouped into pushes.

    SentencePiece vocabularies spell rare characters as runs of byte tokens. The library turns
    every byte of a run into U+FFFD if the whole run is not UTF-8; here valid characters are
    returned as soon as they are complete.

    Args:
        tokenizer: of the model that generates the tokens.
        stops: strings that end the text; none may be empty.
        min_tokens: matches that complete before this many tokens are ignored.
        keeps_special: special tokens are text.
        keeps_stop: the text ends with the match instead of before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        keeps_special: bool = False,
        keeps_stop: bool = False,
    ) -> None:
        if not all(stops):
            raise InvalidArgument("a stop string must not be empty", field="sampling.stop")
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._keeps_special = keeps_special
        self._keeps_stop = keeps_stop
        self._token_count = 0
        self._segment: list[int] = []  # tokens whose text is not final
        self._first = True  # no text was returned yet
        self._held = ""  # final text that may begin a stop string
        self.matched_stop: str | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens, and return the text that is final now; "" after a match."""
        pieces = []
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self._token_count += 1
            if not self._tokenizer.is_silent(token_id, keeps_special=self._keeps_special):
                self._segment.append(token_id)
                pieces.append(self._scan(self._settled()))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the rest of the text; no token follows. A match may still occur."""
        if self.matched_stop is not None:
            return ""
        rest = self._decode(self._segment, first=self._first)
        self._segment = []
        text = self._scan(rest)
        if self.matched_stop is None:
            text += self._held
            self._held = ""
        return text

    def _decode(self, token_ids: list[int], *, first: bool) -> str:
        return self._tokenizer.decode_segment(
            token_ids, first=first, keeps_special=self._keeps_special
        )

    def _settled(self) -> str:
        """Return the text of the segment's leading tokens that no further token can change."""
        text = self._decode(self._segment, first=self._first)
        if text and not text.endswith(REPLACEMENT):
            self._drop(len(self._segment))
            return text
        if len(self._segment) < _LONGEST_UNCERTAIN:
            return ""
        # A long run of invalid bytes (or of real U+FFFD): cut it, far enough from the end,
        # where both parts decode to the whole.
        for cut in range(len(self._segment) - _SETTLED_AFTER_TOKENS, 0, -1):
            head = self._decode(self._segment[:cut], first=self._first)
            tail = self._decode(self._segment[cut:], first=False)
            if head and head + tail == text:
                self._drop(cut)
                return head
        return ""

    def _drop(self, count: int) -> None:
        del self._segment[:count]
        self._first = False

    def _scan(self, text: str) -> str:
        """Return text that cannot be part of a stop string; set matched_stop."""
        if not text or not self._stops:
            return text
        text = self._held + text
        if self._token_count >= self._min_tokens:
            match = self._first_match(text)
            if match is not None:
                begin, self.matched_stop = match
                self._held = ""
                return text[: begin + len(self.matched_stop) * self._keeps_stop]
        held = max(_overlap(text, stop) for stop in self._stops)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return (begin, stop) of the match that ends first; of those the longest."""
        found = [
            (begin + len(stop), begin, stop)
            for stop in self._stops
            if (begin := text.find(stop)) >= 0
        ]
        if not found:
            return None
        _, begin, stop = min(found)
        return begin, stop


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins but not completes `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _settings(path: Path) -> dict[str, Any]:
    return read_object(path) if is_there(path) else {}


def _apply_config(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add named special tokens and the prompt's template, as transformers does."""
    names = {key: _content(config.get(key)) for key in _NAMED_TOKENS}
    backend.add_special_tokens(
        [
            AddedToken(content, special=True, normalized=False)
            for content in names.values()
            # Only tokens with an embedding in the model.
            if content and backend.token_to_id(content) is not None
        ]
    )
    explicit = "add_bos_token" in config or "add_eos_token" in config
    if not explicit and backend.post_processor is not None:
        return
    before, after = (
        names[f"{end}_token"] if config.get(f"add_{end}_token") else "" for end in ("bos", "eos")
    )
    template = " ".join([*([before] if before else []), "$A", *([after] if after else [])])
    ids = {name: backend.token_to_id(name) for name in (before, after) if name}
    unknown = [name for name, index in ids.items() if index is None]
    if unknown:
        raise ValueError(f"{unknown[0]!r} should surround prompts but is not in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(ids.items())
    )


def _content(token: Any) -> str:
    """Return the text of a token in the config: a string, or an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
