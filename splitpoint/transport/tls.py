"""The identity of a process: certificates, keys and tokens, read once from files.

A frozen `Identity` is passed to the code that opens channels or listens. This module knows
no gRPC: `channels.py` and `servers.py` make credentials from an identity. Only services load
`certificates.py`, which parses certificates: clients do not need its library.
"""

from __future__ import annotations

import argparse
import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitpoint.errors import InvalidArgument, PermissionDenied
from splitpoint.host.files import is_private


@dataclass(frozen=True, slots=True)
class Identity:
    """PEM bytes and an unencrypted token, never printed or logged. Empty fields are not used.

    Servers serve with the certificate, and clients present it. A server with authorities
    demands a certificate signed by them from every client (mutual TLS). A client with
    authorities uses TLS and accepts only servers with a certificate signed by them. UNIX
    sockets are not encrypted: the permissions of their folder protect them.
    """

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authorities: bytes = field(default=b"", repr=False)
    # Sent with every call.
    token: str = field(default="", repr=False)
    # The name required in a server's certificate, instead of the address's host.
    server_name: str = ""

    @property
    def serves_tls(self) -> bool:
        return bool(self.certificate)

    @property
    def expects_tls(self) -> bool:
        """True if channels with this identity are encrypted."""
        return bool(self.authorities)


PLAIN = Identity()


def read_identity(
    *,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    authorities: str | Path | None = None,
    token: str = "",
    token_file: str | Path | None = None,
    server_name: str = "",
) -> Identity:
    """Return the identity in these files; absent files leave their fields empty.

    Raises InvalidArgument (a file that cannot be read or has other contents, a certificate
    without its key), PermissionDenied (a key or token file that other users can read).
    """
    if (certificate is None) != (key is None):
        raise InvalidArgument(
            "give a certificate and its key together, or neither",
            field="tls-key" if key is None else "tls-cert",
        )
    if token_file is not None and not token:
        token = read_private(token_file, "the token file").decode("ascii", "replace").strip()
        if not token or not token.isprintable():
            raise InvalidArgument(f"{token_file} does not hold a token", field="token-file")
    certificate_pem = key_pem = authorities_pem = b""
    if certificate is not None and key is not None:
        key_pem = read_private(key, "the private key")
        certificate_pem = _read(certificate, "the certificate")
        # Here with a cause: gRPC would only say that it cannot listen.
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    if authorities is not None:
        authorities_pem = _read(authorities, "the certificate authority")
        _check_authorities(authorities, authorities_pem)
    return Identity(certificate_pem, key_pem, authorities_pem, token, server_name)


def identity_of(arguments: argparse.Namespace) -> Identity:
    """Return the identity in a service's arguments. Raises what `read_identity` raises.

    Logs a warning if the certificate has expired or will soon.
    """
    identity = read_identity(
        certificate=arguments.tls_cert,
        key=arguments.tls_key,
        authorities=arguments.tls_ca,
        token_file=arguments.token_file,
        server_name=arguments.tls_server_name,
    )
    if identity.serves_tls:
        from splitpoint.transport import certificates

        certificates.warn_of_expiry(arguments.tls_cert, identity.certificate)
    return identity


def client_identity(
    *,
    token: str | None = None,
    token_file: str | Path | None = None,
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Identity:
    """Return a client's identity from the arguments, else from the environment.

    Its variables are SPLITPOINT_TOKEN, SPLITPOINT_TOKEN_FILE, SPLITPOINT_CA, SPLITPOINT_CERT,
    SPLITPOINT_KEY and SPLITPOINT_SERVER_NAME. Raises what `read_identity` raises.
    """

    def given(value: str | Path | None, name: str) -> str | Path | None:
        return value if value is not None else environment.get(name) or None

    if token is None and token_file is None:
        token = environment.get("SPLITPOINT_TOKEN") or None
        token_file = environment.get("SPLITPOINT_TOKEN_FILE") or None
    return read_identity(
        certificate=given(certificate, "SPLITPOINT_CERT"),
        key=given(key, "SPLITPOINT_KEY"),
        authorities=given(ca, "SPLITPOINT_CA"),
        token=token or "",
        token_file=token_file,
        server_name=environment.get("SPLITPOINT_SERVER_NAME", ""),
    )


def trusting_own_server(identity: Identity) -> Identity:
    """Return an identity for a client that checks the server of `identity` at any address.

    It accepts only that one certificate, by any signer, and expects one of the names in it,
    which need not be the address's.
    """
    if not identity.serves_tls:
        return identity
    from splitpoint.transport import certificates

    return Identity(
        identity.certificate,
        identity.key,
        identity.certificate,
        identity.token,
        certificates.host_of(identity.certificate),
    )


def read_private(path: str | Path, what: str, *, field: str = "") -> bytes:
    """Return a secret file's bytes.

    Raises PermissionDenied if other users could read or write it, InvalidArgument with
    `field`, the argument that gave the path, if it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgument(
            f"{what} {path} cannot be read: {error.strerror}", field=field
        ) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"{what} {path} is not a file", field=field)
    with os.fdopen(descriptor, "rb") as file:
        mode = stat.S_IMODE(found.st_mode)
        if not is_private(found):
            raise PermissionDenied(
                f"{what} {path} is open to others (mode {mode:04o}): it must belong to this user, "
                "with mode 0600 or 0400, or to root and this user's group, with 0640 or 0440"
            )
        return file.read()


def _read(path: str | Path, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{what} {path} cannot be read: {error.strerror}") from error


def _check_authorities(path: str | Path, pem: bytes) -> None:
    """Raise InvalidArgument unless there is a certificate in `pem`."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=pem.decode("ascii", "ignore")
        )
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(f"{path} holds no certificate (PEM)", field="tls-ca") from error


def load_pair(context: ssl.SSLContext, certificate: str | Path, key: str | Path) -> None:
    """Give a context its certificate and key. Raises InvalidArgument."""
    try:
        # The empty password: an encrypted key must fail, not ask on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            f"{certificate} and {key} are not a certificate (PEM) and its unencrypted key",
            field="tls-cert",
        ) from error
