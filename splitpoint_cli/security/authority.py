"""A development certificate authority: its key, its certificates, their files.

Knows nothing of the command line, and loads the library that signs: only the command
that makes certificates imports this.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from splitpoint.errors import AlreadyExists, InvalidArgument
from splitpoint.host.files import replace_file

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# New certificates are valid on machines whose clock is behind.
_BACKDATE = timedelta(minutes=5)
_Usage = x509.ObjectIdentifier


class Authority:
    """A certificate authority; its key is in memory only, unless it is written to a file."""

    def __init__(self, days: float, now: datetime) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._now = now
        self._days = days
        self._name = _subject("Splitpoint development CA")
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        self.certificate = (
            self._builder(self._name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def issue(
        self, name: str, hosts: Sequence[str], usages: Sequence[_Usage]
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """Return a certificate for these hosts (names or addresses), and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            self._builder(_subject(name), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(authority_key, critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256()), key

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _BACKDATE)
            .not_valid_after(self._now + timedelta(days=self._days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )


def make_certificates(
    folder: Path,
    hosts: Sequence[str] = (),
    *,
    days: float = 365,
    force: bool = False,
    now: datetime | None = None,
) -> list[Path]:
    """Write ca, server and client certificates (NAME.pem) and their keys (NAME-key.pem).

    The server's is for localhost and each of `hosts`; services also use it as clients of
    each other. Raises AlreadyExists without `force`,
    InvalidArgument for a host that is neither a name nor an address.
    """
    authority = Authority(days, now or datetime.now(UTC))
    server = authority.issue(
        "Splitpoint server",
        list(dict.fromkeys([*LOCAL_HOSTS, *hosts])),
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
    )
    client = authority.issue("Splitpoint client", [], [ExtendedKeyUsageOID.CLIENT_AUTH])
    files: dict[Path, tuple[bytes, int]] = {}
    for name, certificate, key in (
        ("ca", authority.certificate, authority.key),
        ("server", *server),
        ("client", *client),
    ):
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        files[folder / f"{name}.pem"] = (pem, 0o644)
        files[folder / f"{name}-key.pem"] = (_key_pem(key), 0o600)
    there = [path for path in files if path.exists()]
    if there and not force:
        raise AlreadyExists(f"{there[0]} exists; --force replaces all six files")
    folder.mkdir(parents=True, exist_ok=True)
    for path, (content, mode) in files.items():
        replace_file(path, content, mode)
    return list(files)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode())
    except UnicodeError as error:
        raise InvalidArgument(f"{host!r} is neither a name nor an address", field="host") from error


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
