"""Chunk keys: chained, salted, and free of accidental collisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitpoint.keys import (
    chunk_key,
    chunk_keys,
    fingerprint,
    numerics_salt,
    pack_tokens,
    tenant_salt,
)

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


@given(TOKENS, st.integers(1, 8), st.binary(max_size=8))
def test_keys_chain_and_extend(tokens: list[int], chunk: int, salt: bytes) -> None:
    keys = list(chunk_keys(b"layout", salt, tokens, chunk))
    assert len(keys) == len(tokens) // chunk
    parent = b""
    for index, key in enumerate(keys):
        assert key == chunk_key(
            b"layout", salt, parent, tokens[index * chunk : (index + 1) * chunk]
        )
        parent = key
    longer = list(chunk_keys(b"layout", salt, [*tokens, 1, 2, 3], chunk))
    assert longer[: len(keys)] == keys
    for count in range(1, len(keys)):
        rest = chunk_keys(b"layout", salt, tokens[count * chunk :], chunk, parent=keys[count - 1])
        assert keys[:count] + list(rest) == keys


def test_every_part_enters_the_key() -> None:
    base = (b"layout", b"salt", b"p" * 32, (1, 2, 3))
    variants = [
        base,
        (b"layouT", *base[1:]),
        (base[0], b"salT", *base[2:]),
        (*base[:2], b"q" * 32, base[3]),
        (*base[:3], (1, 2, 4)),
        (*base[:3], (1, 2)),
        # The same bytes split elsewhere must not collide.
        (base[0], b"sal", b"t" + b"p" * 32, base[3]),
    ]
    assert len({chunk_key(*variant) for variant in variants}) == len(variants)


def test_tenant_salts_cannot_be_confused() -> None:
    key = b"k" * 32
    assert tenant_salt(key, "ab", b"c") != tenant_salt(key, "a", b"bc")
    assert tenant_salt(key, "a") != tenant_salt(b"x" * 32, "a")
    assert tenant_salt(key, "a", b"") == tenant_salt(key, "a")


def test_unlike_numerics_and_tenants_have_salts_of_their_own() -> None:
    salts = [b"", b"s", b"sa", b"t" * 32]
    derived = [numerics_salt(salt, digest) for salt in salts for digest in ("", "a", "b", "ab")]
    assert len(set(derived)) == len(derived)
    assert numerics_salt(b"s", "") == b"s", "fast workers share chunks, as older workers do"


def test_fingerprint_is_over_the_token_plane_form() -> None:
    assert pack_tokens([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert fingerprint([1, 2]) != fingerprint([2, 1])
