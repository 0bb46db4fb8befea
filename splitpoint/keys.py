"""Chunk keys: a hash chain over token ids, so that equal prefixes have equal keys.

    key_i = SHA-256(domain || layout hash || salt || key_{i-1} || token ids)

Layout hash and salt are part of every key, so another layout (another checkpoint, dtype or
chunk size) or another tenant never has an equal key. The salt of an invariant worker's keys
depends on the digest of its numerics, too.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from array import array
from collections.abc import Iterator, Sequence

import xxhash

KEY_BYTES = 32
SALT_LIMIT = 128
# Leading bytes of a key that name its chunk where millions of chunks are compared: two are never
# equal by chance.
MARK_BYTES = 8
_DOMAIN = b"splitpoint chunk v1\0"


def chunk_key(
    layout_hash: bytes, salt: bytes, parent_key: bytes, token_ids: Sequence[int]
) -> bytes:
    """Return the key of the chunk `token_ids` after `parent_key` (empty for the first).

    Lengths are part of the message, so that different divisions into fields never collide.
    """
    return packed_chunk_key(layout_hash, salt, parent_key, pack_tokens(token_ids))


def packed_chunk_key(
    layout_hash: bytes, salt: bytes, parent_key: bytes, packed_tokens: bytes
) -> bytes:
    """Return `chunk_key` of tokens from `pack_tokens`."""
    message = (
        *(_DOMAIN, layout_hash, len(salt).to_bytes(2, "little"), salt),
        *(len(parent_key).to_bytes(2, "little"), parent_key, packed_tokens),
    )
    return hashlib.sha256(b"".join(message)).digest()


def chunk_keys(
    layout_hash: bytes,
    salt: bytes,
    token_ids: Sequence[int],
    chunk_tokens: int,
    *,
    parent: bytes = b"",
) -> Iterator[bytes]:
    """Yield the keys of the full chunks of `token_ids`, in order.

    `parent`: the key of the chunk before them; empty at the beginning of a sequence.
    """
    for start in range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        parent = chunk_key(layout_hash, salt, parent, token_ids[start : start + chunk_tokens])
        yield parent


def tenant_salt(server_key: bytes, tenant: str, client_salt: bytes = b"") -> bytes:
    """Return the salt of a tenant's keys: HMAC(server key, tenant || client salt).

    A client salt narrows sharing inside the tenant. Another tenant's salt cannot be computed
    without the server key.
    """
    name = tenant.encode()
    message = len(name).to_bytes(4, "little") + name + client_salt
    return hmac.new(server_key, message, hashlib.sha256).digest()


def tenant_pseudonym(server_key: bytes, tenant: str) -> str:
    """Return a name for a tenant that tells nothing of its own, for metrics: 8 hex digits.

    Equal on all schedulers with one server key. It shares no digit with the tenant's salt.
    """
    return hmac.new(server_key, b"pseudonym\0" + tenant.encode(), hashlib.sha256).hexdigest()[:8]


def numerics_salt(salt: bytes, numerics_digest: str) -> bytes:
    """Return the salt of a worker's chunk keys, from a tenant's salt and the worker's digest.

    Workers of another digest compute other bits (docs/numerics.md), so they share no chunks. An
    empty digest is that of fast workers: they share chunks with each other, under the tenant's
    own salt.
    """
    if not numerics_digest:
        return salt
    parts = (b"splitpoint numerics v1\0", len(salt).to_bytes(2, "little"), salt)
    return hashlib.sha256(b"".join(parts) + numerics_digest.encode()).digest()


def request_seed(server_key: bytes, tenant: str, request_id: str) -> int:
    """Return the seed, in [0, 2**63), of a request that has none of its own.

    Schedulers with one key draw the same tokens for a request that goes from one to another.
    The seed of another tenant's request cannot be computed without the key.
    """
    parts = (tenant.encode(), request_id.encode())
    sized = (len(part).to_bytes(4, "little") + part for part in parts)
    message = b"".join((b"splitpoint seed v1\0", *sized))
    digest = hmac.new(server_key, message, hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def private_salt(
    salt: bytes, request_id: str, attempt: int, stream: int, parent_key: bytes
) -> bytes:
    """Return the salt of chunks that one attempt of a request stores for itself alone.

    Nothing is looked up by it: what a selection computed is no one else's prefix. The first
    chunk under it has no parent, since a parent has the same salt; `parent_key` is the one
    that it follows. `stream`: random number of the Run stream, since schedulers count their
    attempts alike.
    """
    name = request_id.encode()
    numbers = attempt.to_bytes(8, "little") + stream.to_bytes(8, "little")
    parts = (salt, name, numbers, parent_key)
    sized = (len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.sha256(b"".join((b"splitpoint private v1\0", *sized))).digest()


def page_words(page_key: bytes) -> tuple[int, ...]:
    """Return a page key as words in place of a chunk's tokens, which `pack_tokens` undoes."""
    return struct.unpack(f"<{KEY_BYTES // 4}i", page_key)


def fingerprint(token_ids: Sequence[int]) -> int:
    """Return XXH3-64 of the ids: compared on a hit, independent of the key's hash."""
    return packed_fingerprint(pack_tokens(token_ids))


def packed_fingerprint(packed_tokens: bytes) -> int:
    """Return `fingerprint` of tokens from `pack_tokens`."""
    return xxhash.xxh3_64_intdigest(packed_tokens)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return little-endian int32, as in the arena's token plane."""
    packed = array("i", token_ids)
    if packed.itemsize != 4:
        raise RuntimeError("this platform's C int is not 32 bits wide")
    return packed.tobytes()
