"""Who this process is on the wire, and whom it trusts: certificates, keys and tokens from files.

Reads and checks files, once, into a frozen `Identity` that is passed down to
whatever opens channels or listens. Knows no gRPC: `channels.py` and `servers.py` make their
credentials from it. What is inside a certificate is read by `certificates.py`, which
only services load: a client gets by without the library that parses certificates.
"""

from __future__ import annotations

import argparse
import os
import ssl
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitpoint.errors import InvalidArgument, PermissionDenied


@dataclass(frozen=True, slots=True)
class Identity:
    """PEM bytes, and a token in the clear: never printed, never logged. Empty: not used.

    A certificate is served with by servers and presented by clients. Servers
    with authorities demand a certificate of theirs from every client (mutual
    TLS); clients with authorities speak TLS and accept servers of theirs only.
    UNIX sockets stay plain: the permissions of their folder protect them.
    """

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authorities: bytes = field(default=b"", repr=False)
    # Presented with every call.
    token: str = field(default="", repr=False)
    # Name to expect in a server's certificate instead of the host connected to.
    server_name: str = ""

    @property
    def serves_tls(self) -> bool:
        return bool(self.certificate)

    @property
    def expects_tls(self) -> bool:
        """Whether channels made with it are encrypted."""
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
    """The identity in these files; what is absent stays empty.

    Raises InvalidArgument (a file that cannot be read or is not what it should
    be, a certificate without its key), PermissionDenied (a key or token file
    that others can read).
    """
    if (certificate is None) != (key is None):
        raise InvalidArgument(
            "a certificate and its key are given together or not at all",
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
        _check_pair(certificate, key)
    if authorities is not None:
        authorities_pem = _read(authorities, "the certificate authority")
        _check_authorities(authorities, authorities_pem)
    return Identity(certificate_pem, key_pem, authorities_pem, token, server_name)


def identity_of(arguments: argparse.Namespace) -> Identity:
    """What a service's command line says (`splitpoint.options.service`). Raises as above.

    Logs a warning if the service's certificate has expired or will soon.
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
    """A client's identity: what is given, else what the environment says.

    SPLITPOINT_TOKEN, SPLITPOINT_TOKEN_FILE, SPLITPOINT_CA, SPLITPOINT_CERT,
    SPLITPOINT_KEY, SPLITPOINT_SERVER_NAME. Raises what `read_identity` raises.
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
    """For a client that checks on the server of this very identity, by whatever address.

    It accepts that one certificate and no other, whoever signed it, and does
    without the name, which need not be that of a loopback address.
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
    """A secret's bytes.

    Raises PermissionDenied when anybody else could read or write it, InvalidArgument
    when it cannot be read; that names `field`, the argument which gave the path.
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
        own_groups = {os.getegid(), *os.getgroups()}
        if not is_private(found, user=os.getuid(), groups=own_groups):
            raise PermissionDenied(
                f"{what} {path} is open to others (mode {mode:04o}): it must belong to this user, "
                "with mode 0600 or 0400, or to root and this user's group, with 0640 or 0440"
            )
        return file.read()


def is_private(found: os.stat_result, *, user: int, groups: Collection[int]) -> bool:
    """Whether only this user, or root, can read or write a file.

    Secrets that root hands to a service are its group's (Kubernetes mounts them so).
    """
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == user:
        return not mode & 0o177
    return found.st_uid == 0 and found.st_gid in groups and not mode & 0o137


def _read(path: str | Path, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{what} {path} cannot be read: {error.strerror}") from error


def _check_authorities(path: str | Path, pem: bytes) -> None:
    """Raise InvalidArgument, which names `path`, unless there is a certificate in `pem`."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=pem.decode("ascii", "ignore")
        )
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(f"{path} holds no certificate (PEM)", field="tls-ca") from error


def _check_pair(certificate: str | Path, key: str | Path) -> None:
    """gRPC would only say that it cannot listen."""
    try:
        # The empty password: an encrypted key must fail, not ask on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            f"{certificate} and {key} are not a certificate (PEM) and its unencrypted key",
            field="tls-cert",
        ) from error
