"""The files of TLS and tokens: whole, closed to others, of this host, not expired."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from splitpoint.errors import PermissionDenied, SplitpointError
from splitpoint.transport.access import Role, read_tokens
from splitpoint.transport.tls import read_identity
from splitpoint_cli.checks.finding import Finding, Verdict

_SOON = timedelta(days=14)
_EVERYWHERE = {"0.0.0.0", "::"}


def check_tls(
    certificate: str | None, key: str | None, authorities: str | None, listen: str, now: datetime
) -> Iterator[Finding]:
    """Check the files of --tls-cert, --tls-key and --tls-ca for the address of --listen."""
    name = "TLS files"
    try:
        identity = read_identity(certificate=certificate, key=key, authorities=authorities)
    except PermissionDenied as error:
        yield Finding(name, Verdict.PROBLEM, error.message, f"Close it to others: chmod 600 {key}")
        return
    except SplitpointError as error:
        yield Finding(
            name,
            Verdict.PROBLEM,
            error.message,
            "For a development authority and its certificates: splitpoint certs DIR",
        )
        return
    if not identity.serves_tls:
        return
    yield Finding(name, Verdict.OK, f"{certificate} and its key, closed to others")
    from splitpoint.transport import certificates  # what parses them is slow to load

    yield judge_end(certificates.expires_at(identity.certificate), now)
    if not listen.startswith("unix:"):
        yield judge_hosts(
            certificates.hosts_of(identity.certificate), listen.rpartition(":")[0].strip("[]")
        )


def judge_end(end: datetime, now: datetime) -> Finding:
    """Return a finding about a certificate's end."""
    name, on = "certificate ends", end.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    renew = "Renew it; of a development authority: splitpoint certs DIR --force"
    if end <= now:
        return Finding(name, Verdict.PROBLEM, f"it expired on {on}: no peer accepts it", renew)
    if end - now < _SOON:
        return Finding(name, Verdict.WARNING, f"in {(end - now).days} days, on {on}", renew)
    return Finding(name, Verdict.OK, f"on {on}")


def judge_hosts(names: list[str], host: str) -> Finding:
    """Return a finding on whether the certificate names `host`, which clients call."""
    name, shown = "certificate names", ", ".join(names)
    if not names:
        return Finding(
            name,
            Verdict.PROBLEM,
            "the certificate names no host (subjectAltName): no client could accept it",
            f"Make one that does: splitpoint certs DIR --force --host {host}",
        )
    if host in _EVERYWHERE:
        return Finding(name, Verdict.OK, f"clients must call one of {shown}")
    if any(_covers(pattern, host) for pattern in names):
        return Finding(name, Verdict.OK, f"{host} is among {shown}")
    return Finding(
        name,
        Verdict.WARNING,
        f"the certificate is for {shown}: clients that call {host} refuse it",
        f"Call one of these names, or add it: splitpoint certs DIR --force --host {host}",
    )


def _covers(pattern: str, host: str) -> bool:
    try:
        return ipaddress.ip_address(pattern) == ipaddress.ip_address(host)
    except ValueError:
        pass
    pattern, host = pattern.lower(), host.lower()
    if pattern.startswith("*."):  # stands for one label
        return host.partition(".")[2] == pattern[2:]
    return pattern == host


def check_tokens(path: str) -> Finding:
    """Check the file of --tokens."""
    name = "tokens"
    make = f"splitpoint token --file {path} --name me --role admin"
    try:
        entries = read_tokens(path)
    except PermissionDenied as error:
        return Finding(name, Verdict.PROBLEM, error.message, f"Close it: chmod 600 {path}")
    except SplitpointError as error:
        advice = "" if Path(path).exists() else f"Make it: {make}"
        return Finding(name, Verdict.PROBLEM, error.message, advice)
    roles = Counter(entry.caller.role for entry in entries)
    if not entries:
        return Finding(name, Verdict.WARNING, "no token in it: every caller is refused", make)
    found = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()) if role)
    if Role.ADMIN not in roles:
        return Finding(
            name, Verdict.NOTE, f"{found}; none may ask for `splitpoint status`", f"Add one: {make}"
        )
    return Finding(name, Verdict.OK, found)
