"""The most text that one token can stand for, from a tokenizer's parts.

A text of B bytes has at least B / L tokens if no token stands for more than L bytes. Each byte
of a text belongs to a token's spelling if no part of the tokenizer drops or joins bytes:

- the normalizer is absent, or only inserts bytes (Prepend, a Replace by something as long);
- the pre-tokenizer cuts without removing what it cuts at;
- no added token swallows adjacent spaces;
- the model is a BPE that has a token for every byte, so that it never skips a character and
  never joins a run of unknown ones.

Then L is the longest spelling of the vocabulary; else there is no such L.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# Pre-tokenizers that keep every byte.
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
# These keep every byte, except with this behaviour.
_CUTTING = {"Split", "Punctuation"}
_REMOVING = "Removed"


def _characters_of_bytes() -> dict[str, int]:
    """Return the byte of each character by which byte-level vocabularies spell bytes.

    Printable bytes of Latin-1 are themselves; the others follow in order from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in plain}, **shifted}


_BYTE_OF_CHARACTER = _characters_of_bytes()


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Return True if the vocabulary spells each byte of a text as a character."""
    return any(part["type"] == "ByteLevel" for part in _parts(backend.decoder))


def bytes_of_spelling(spelling: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary stands for."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, spelling))
    except KeyError:  # not spelled in this manner: the decoder takes it as text
        return spelling.encode()


def longest_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of UTF-8 text for one token; None if there is no bound."""
    model = backend.model
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(model, models.BPE) or any(token.lstrip or token.rstrip for token in added):
        return None
    cutters = list(_parts(backend.pre_tokenizer))
    if not all(_only_inserts(part) for part in _parts(backend.normalizer)):
        return None
    if not all(_keeps_all(part) for part in cutters):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    is_byte_level = any(part["type"] == "ByteLevel" for part in cutters)
    if is_byte_level:
        every_byte = set(pre_tokenizers.ByteLevel.alphabet())
    elif model.byte_fallback:
        every_byte = {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        return None
    if not every_byte <= vocabulary.keys():
        return None
    # Byte-level spellings have one character for each byte.
    spelled = (len(token if is_byte_level else token.encode()) for token in vocabulary)
    return max([*spelled, *(len(token.content.encode()) for token in added)])


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a tokenizer's part; sequences yield those of each part."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] == "Sequence":
        inner_parts = (part.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
        for inner in next(filter(None, inner_parts), ()):
            yield from _flat(inner)
    else:
        yield part


def _only_inserts(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())
    return bool(part["type"] == "Prepend")


def _keeps_all(part: dict[str, Any]) -> bool:
    if part["type"] in _CUTTING:
        return bool(part["behavior"] != _REMOVING)
    return part["type"] in _KEEPING
