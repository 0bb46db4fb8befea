"""Contents of certificates: their end and their hosts.

This loads the `cryptography` library, which is slow and which clients lack. Import it only
where a service's certificate is given.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from splitpoint.errors import InvalidArgument

_log = logging.getLogger(__name__)

_EXPIRY_WARNING = timedelta(days=14)


def warn_of_expiry(path: str | Path, pem: bytes) -> None:
    """Log a warning if the first certificate has expired or will within two weeks."""
    left = expires_at(pem) - datetime.now(UTC)
    if left <= timedelta():
        _log.warning("the certificate %s has expired: no peer will accept it", path)
    elif left < _EXPIRY_WARNING:
        _log.warning("the certificate %s expires in %d days", path, left.days)


def expires_at(pem: bytes) -> datetime:
    """Return the end of the first certificate. Raises ValueError if there is none."""
    return x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc


def host_of(pem: bytes) -> str:
    """Return a name in the first certificate. Raises InvalidArgument if it has none."""
    found = hosts_of(pem)
    if not found:
        raise InvalidArgument(
            "the certificate names no host (subjectAltName): no client could accept it",
            field="tls-cert",
        )
    return found[0].replace("*", "any", 1)


def hosts_of(pem: bytes) -> list[str]:
    """Return the names and addresses in the first certificate, wildcards unchanged."""
    certificate = x509.load_pem_x509_certificates(pem)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    return [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]
