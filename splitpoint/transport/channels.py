"""Channels to servers of this project, with TLS and a token if the identity has them.

gRPC repeats no call. With a retry policy, a stream whose server is killed before its first answer
never ends: neither its deadline nor a cancellation reaches the reader (grpcio 1.85). Callers repeat
what may be repeated (`splitpoint.client.scheduler_attempts`).
"""

from __future__ import annotations

from typing import Any, cast

import grpc

from splitpoint.config import is_local_address
from splitpoint.errors import InvalidArgument
from splitpoint.transport.access import METADATA_KEY
from splitpoint.transport.limits import (
    SHARED_OPTIONS,
    WATCH_ANSWER_SECONDS,
    WATCH_SECONDS,
    Options,
    answer_pings_within,
)
from splitpoint.transport.tls import PLAIN, Identity

_CHANNEL_OPTIONS: Options = [
    *SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is the time limit of one attempt to connect. A busy peer, or
    # a TLS handshake over some distance, needs more than the first back-off.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
]
_WATCH_OPTIONS: Options = [
    ("grpc.keepalive_time_ms", round(WATCH_SECONDS * 1000)),
    *answer_pings_within(WATCH_ANSWER_SECONDS),
]


def open_channel(
    address: str,
    identity: Identity = PLAIN,
    *,
    is_fresh: bool = False,
    is_watched: bool = False,
) -> grpc.aio.Channel:
    """Return an asyncio channel to `host:port` or `unix:/path`; it connects on first use.

    An identity with authorities uses TLS (except over sockets), one with a token
    presents it with every call. Raises InvalidArgument for a token that would
    leave this host unencrypted.

    Args:
        is_fresh: use a separate connection. Otherwise the channels of one process to one
            address share their connection, and the pause after a failed connection attempt.
        is_watched: give the peer up, and fail all calls, within 3 s after it stopped answering.
    """
    options = _options_for(address, identity, is_watched=is_watched)
    if is_fresh:
        options.append(("grpc.use_local_subchannel_pool", 1))
    return cast(grpc.aio.Channel, _open(grpc.aio, address, identity, options))


def open_sync_channel(
    address: str, identity: Identity = PLAIN, *, is_watched: bool = False
) -> grpc.Channel:
    """Return a blocking channel with the same options."""
    options = _options_for(address, identity, is_watched=is_watched)
    return cast(grpc.Channel, _open(grpc, address, identity, options))


def _open(api: Any, address: str, identity: Identity, options: Options) -> Any:
    """Open a channel of `api`, grpc or grpc.aio."""
    if _is_encrypted(address, identity):
        channel = api.secure_channel(address, _channel_credentials(identity), options=options)
    else:
        channel = api.insecure_channel(address, options=options)
    if not identity.token:
        return channel
    return _TokenChannel(channel, (METADATA_KEY, f"Bearer {identity.token}"))


def _is_encrypted(address: str, identity: Identity) -> bool:
    return identity.expects_tls and not address.startswith("unix:")


def check_token_stays_safe(address: str, identity: Identity) -> None:
    """Raise InvalidArgument if a token to this address would leave the host unencrypted."""
    if not _is_encrypted(address, identity) and not is_local_address(address):
        raise InvalidArgument(
            f"a token is never sent to {address} unencrypted: name the certificate authority "
            "of that server (--tls-ca for services, SPLITPOINT_CA or --ca for clients)",
            field="ca",
            reason="TOKEN_WITHOUT_TLS",
        )


def _options_for(address: str, identity: Identity, *, is_watched: bool) -> Options:
    is_encrypted = _is_encrypted(address, identity)
    if identity.token:
        check_token_stays_safe(address, identity)
    # gRPC takes the first of an option that is given twice.
    options = list({**dict(_CHANNEL_OPTIONS), **dict(_WATCH_OPTIONS if is_watched else ())}.items())
    if is_encrypted and identity.server_name:
        options.append(("grpc.ssl_target_name_override", identity.server_name))
    return options


def _channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=identity.authorities,
        private_key=identity.key or None,
        certificate_chain=identity.certificate or None,
    )


_CALL_KINDS = frozenset({"unary_unary", "unary_stream", "stream_unary", "stream_stream"})


# gRPC's interceptors are not used for tokens: they replace a call by an object that
# cancels, reads and times out differently.
class _TokenChannel:
    """A blocking or asyncio channel that adds one metadata entry to every call."""

    def __init__(self, channel: Any, entry: tuple[str, str]) -> None:
        self._channel = channel
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in _CALL_KINDS:
            return found

        def make_method(*path: Any, **options: Any) -> Any:
            return _with_entry(found(*path, **options), self._entry)

        return make_method

    def __enter__(self) -> _TokenChannel:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.__exit__(*exception)

    async def __aenter__(self) -> _TokenChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.__aexit__(*exception)


def _with_entry(method: Any, entry: tuple[str, str]) -> Any:
    """Return `method` with one more entry in the metadata of each call."""

    def call(*request: Any, metadata: Any = None, **options: Any) -> Any:
        return method(*request, metadata=(*(metadata or ()), entry), **options)

    return call
