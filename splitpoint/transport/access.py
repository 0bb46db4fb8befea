"""Access control: bearer tokens, their roles and tenants, and the methods of each role.

A tokens file names callers and holds only the digests of their tokens:

    [[token]]
    name = "alice"
    role = "client"                 # client, worker or admin
    tenant = "research"             # clients only; default ""
    weight = 2.0                    # of the tenant, above 0; default 1, or that of its other tokens
    sha256 = "<hex of SHA-256 of the token>"

The file is read again after a change, which is checked once a second at most, so that
deleting an entry revokes its token. While the file cannot be used (unreadable, malformed,
open to other users), every call is refused. This module knows no gRPC;
`splitpoint.transport.guard` calls `Access.admit` before it looks up a handler.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from splitpoint.errors import (
    InvalidArgument,
    PermissionDenied,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)
from splitpoint.transport.tls import read_private

_log = logging.getLogger(__name__)

METADATA_KEY = "authorization"
_RECHECK_SECONDS = 1.0
_LOG_SECONDS = 1.0
# Bounds of a tenant's weight.
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Role(StrEnum):
    """What a token allows."""

    CLIENT = "client"
    WORKER = "worker"  # services among themselves
    ADMIN = "admin"


# -- what each role may do --------------------------------------------------------------

_CLIENTS = frozenset({Role.CLIENT, Role.ADMIN})
_SERVICES = frozenset({Role.WORKER})
_OBSERVERS = frozenset({Role.WORKER, Role.ADMIN})
_ADMINS = frozenset({Role.ADMIN})
_ANY_TOKEN = frozenset(Role)


def _allow(roles: frozenset[Role], service: str, *methods: str) -> dict[str, frozenset[Role]]:
    return {f"/{service}/{method}": roles for method in methods}


_INFERENCE = "splitpoint.v1.InferenceService"
_ADMIN = "splitpoint.v1.AdminService"
_WORKER = "splitpoint.v1.WorkerService"
_STORE = "splitpoint.v1.KvStoreService"
# A method that is not listed here is refused to every role.
ROLES: dict[str, frozenset[Role]] = {
    **_allow(_CLIENTS, _INFERENCE, "Generate", "GetModel", "ListModels", "ExplainPlan"),
    **_allow(_CLIENTS, _INFERENCE, "Tokenize", "Detokenize", "GetTokenizer"),
    **_allow(_ADMINS, _ADMIN, "ListWorkers", "GetQueue", "GetSchedulerStatus"),
    **_allow(_OBSERVERS, _WORKER, "GetInfo", "Profile", "Drain"),
    **_allow(_SERVICES, _WORKER, "Run"),
    **_allow(_SERVICES, _STORE, "Attach", "KeepAlive", "Match", "Reserve", "Seal", "Release"),
    **_allow(_SERVICES, _STORE, "MatchPages", "ReadChunks", "ReportChunks"),
    **_allow(_SERVICES, _STORE, "LoadChunks", "FillSlots"),
    **_allow(_ADMINS, _STORE, "Evict"),
    **_allow(_OBSERVERS, _STORE, "GetStats"),
    **_allow(_ADMINS, "grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
    # A watch lasts: callers without a token could use up all calls of a server.
    **_allow(_ANY_TOKEN, "grpc.health.v1.Health", "Watch"),
}
# Probes of orchestrators carry no tokens; they learn only whether the service serves.
OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List"})


# -- callers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of the current call. Without tokens all callers are one unnamed tenant."""

    name: str = ""
    role: Role | None = None
    tenant: str = ""
    # The tenant's share of the devices is in proportion to it, while others want more, too.
    weight: float = 1.0


_NO_CALLER = Caller()
_current: ContextVar[Caller] = ContextVar("caller", default=_NO_CALLER)


def current_caller() -> Caller:
    """Return the caller of the call that the running handler answers."""
    return _current.get()


def set_caller(caller: Caller) -> None:
    """Set the caller for the rest of this task; gRPC runs each call in its own task."""
    _current.set(caller)


# -- the tokens file --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A caller and the SHA-256 of its token, 32 bytes."""

    caller: Caller
    digest: bytes


def digest_of(token: str) -> bytes:
    # Tokens are 32 random bytes, so a fast hash is as good as a slow one.
    return hashlib.sha256(token.encode()).digest()


def parse_tokens(text: str, source: str | Path) -> tuple[TokenEntry, ...]:
    """Return the entries of a tokens file. Raises InvalidArgument."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{source} is not TOML: {error}", field="tokens") from error
    rows = document.pop("token", [])
    if document or not isinstance(rows, list):
        raise InvalidArgument(f"{source} holds more than [[token]] entries", field="tokens")
    entries = tuple(_entry(row, source) for row in rows)
    for what, values in (
        ("name", [entry.caller.name for entry in entries]),
        ("sha256", [entry.digest for entry in entries]),
    ):
        if len(set(values)) != len(values):
            raise InvalidArgument(f"{source} has a {what} twice", field="tokens")
    weights = _weights(rows, entries, source)
    return tuple(
        replace(entry, caller=replace(entry.caller, weight=weights.get(entry.caller.tenant, 1.0)))
        for entry in entries
    )


def _weights(
    rows: Iterable[dict[str, Any]], entries: Iterable[TokenEntry], source: str | Path
) -> dict[str, float]:
    """Return the weights of the tenants that have one. Raises InvalidArgument for two of one."""
    weights: dict[str, float] = {}
    for row, entry in zip(rows, entries, strict=True):
        tenant = entry.caller.tenant
        if "weight" in row and weights.setdefault(tenant, row["weight"]) != row["weight"]:
            raise InvalidArgument(f"{source} has two weights of tenant {tenant!r}", field="tokens")
    return weights


def _entry(row: Any, source: str | Path) -> TokenEntry:
    # Errors do not show values: one might be a token in the wrong place.
    row = dict(row) if isinstance(row, dict) else {}
    weight = row.pop("weight", None)
    if not row or not all(isinstance(value, str) for value in row.values()):
        raise InvalidArgument(f"{source}: an entry is not a table of strings", field="tokens")
    unknown = sorted(row.keys() - {"name", "role", "tenant", "sha256"})
    name, tenant, digest = row.get("name", ""), row.get("tenant", ""), row.get("sha256", "")
    if unknown:
        raise InvalidArgument(f"{source}: unknown keys {', '.join(unknown)}", field="tokens")
    check_name(name, field="name")
    if row.get("role") not in list(Role):
        raise InvalidArgument(
            f"{source}: the role of {name} is not one of {', '.join(Role)}", field="tokens"
        )
    role = Role(row["role"])
    if tenant:
        check_name(tenant, field="tenant")
        if role is not Role.CLIENT:
            raise InvalidArgument(f"{source}: only clients have tenants ({name})", field="tokens")
    if weight is not None:
        if role is not Role.CLIENT:
            raise InvalidArgument(f"{source}: only clients have weights ({name})", field="tokens")
        check_weight(weight, f"{source}: the weight of {name}")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise InvalidArgument(f"{source}: the sha256 of {name} is not 64 hex digits")
    return TokenEntry(Caller(name, role, tenant), bytes.fromhex(digest))


def check_name(text: str, *, field: str) -> str:
    """Return the name of a caller or tenant. Raises InvalidArgument."""
    if not _NAME.fullmatch(text):
        raise InvalidArgument(
            f"a {field} has 1 to 64 letters, digits and . _ @ -, the first a letter or digit",
            field=field,
        )
    return text


def check_weight(weight: object, what: str) -> float:
    """Return a tenant's weight. Raises InvalidArgument, which begins with `what`."""
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not LEAST_WEIGHT <= weight <= MOST_WEIGHT
    ):
        raise InvalidArgument(
            f"{what} is not a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}", field="weight"
        )
    return float(weight)


def entry_text(entry: TokenEntry) -> str:
    """Return the entry as text for the tokens file."""
    caller = entry.caller
    tenant = f'tenant = "{caller.tenant}"\n' if caller.tenant else ""
    weight = f"weight = {caller.weight!r}\n" if caller.weight != 1.0 else ""
    return (
        f'[[token]]\nname = "{caller.name}"\nrole = "{caller.role}"\n{tenant}{weight}'
        f'sha256 = "{entry.digest.hex()}"\n'
    )


def read_tokens(path: str | Path) -> tuple[TokenEntry, ...]:
    """Return a file's entries.

    Raises InvalidArgument, or PermissionDenied for a file that other users can read.
    """
    return parse_tokens(read_private(path, "the tokens file").decode("utf-8", "replace"), path)


def find_caller(entries: Iterable[TokenEntry], token: str) -> Caller | None:
    """Return the token's caller, in the same time for every entry; None if unknown."""
    digest = digest_of(token)
    found: Caller | None = None
    for entry in entries:
        if hmac.compare_digest(entry.digest, digest):
            found = entry.caller
    return found


# -- the check -------------------------------------------------------------------------------


class Access:
    """The current tokens file of a server, checked before every call."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise what `read_tokens` raises: a service does not start with a bad file."""
        self._path = Path(path)
        self._clock = clock
        # Taken before reading, so that a change in between is noticed.
        self._version = self._version_now()
        self._entries: tuple[TokenEntry, ...] | None = read_tokens(path)
        self._checked_at = clock()
        self._refused = 0
        self._quiet_until = 0.0

    def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]] | None) -> Caller:
        """Return the caller of `method` ("/package.Service/Method").

        Raises Unauthenticated (no token, several, or an unknown one), PermissionDenied (not
        with this role, or a method without roles), Unavailable (the tokens file cannot be
        used now).
        """
        if method in OPEN_METHODS:
            return _NO_CALLER
        try:
            return self._admit(method, metadata)
        except SplitpointError as error:
            self._note(method, error)
            raise

    def _admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]] | None) -> Caller:
        token = _bearer(metadata or ())
        entries = self._current_entries()
        if entries is None:
            raise Unavailable(
                "this service cannot read its tokens file now", reason="TOKENS_UNREADABLE"
            )
        caller = find_caller(entries, token)
        if caller is None:
            raise Unauthenticated("this service does not know the token", reason="TOKEN_UNKNOWN")
        allowed = ROLES.get(method, frozenset())
        if caller.role not in allowed:
            needed = (
                f"a token of the role {' or '.join(sorted(allowed))}" if allowed else "no token"
            )
            raise PermissionDenied(
                f"{method.rpartition('/')[2]} is allowed with {needed}; this one has the role "
                f"{caller.role}",
                reason="ROLE_NOT_ALLOWED",
            )
        return caller

    def _current_entries(self) -> tuple[TokenEntry, ...] | None:
        """Return None while the file cannot be used, so that revoked tokens end, too."""
        now = self._clock()
        if now - self._checked_at < _RECHECK_SECONDS:
            return self._entries
        self._checked_at = now
        version = self._version_now()
        if version == self._version:
            return self._entries
        self._version = version
        try:
            self._entries = read_tokens(self._path)
        except SplitpointError as error:
            self._entries = None
            _log.error("every call is refused until this is repaired: %s", error.message)
        else:
            _log.info("read %s again: %d tokens", self._path, len(self._entries))
        return self._entries

    def _version_now(self) -> tuple[int, ...]:
        """Return a value that changes with a rename, a write, another mode or owner."""
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _note(self, method: str, error: SplitpointError) -> None:
        """Log refusals, one line a second at most, so that callers cannot fill the disk."""
        self._refused += 1
        now = self._clock()
        if now >= self._quiet_until:
            _log.warning(
                "refused %d calls, the last to %s: %s", self._refused, method, error.reason
            )
            self._quiet_until = now + _LOG_SECONDS
            self._refused = 0


def _bearer(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    values = [value for key, value in metadata if key == METADATA_KEY]
    if not values:
        raise Unauthenticated(
            "this service requires a token (authorization: Bearer ...)", reason="TOKEN_MISSING"
        )
    value = values[0]
    if len(values) > 1 or not isinstance(value, str):
        raise Unauthenticated("the call must have exactly one token", reason="TOKEN_MALFORMED")
    scheme, _, token = value.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the token is not a bearer token", reason="TOKEN_MALFORMED")
    return token.strip()


def access_of(tokens_path: str | Path | None) -> Access | None:
    """Return the access control of `--tokens`; None: all calls are allowed."""
    return None if tokens_path is None else Access(tokens_path)
