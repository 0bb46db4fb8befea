"""The tokens file: what it may hold, who may read it, how it is compared and read again."""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Any

import pytest

from splitpoint.errors import (
    InvalidArgument,
    PermissionDenied,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)
from splitpoint.transport import access
from splitpoint.transport.access import (
    Access,
    Caller,
    Role,
    TokenEntry,
    digest_of,
    entry_text,
    parse_tokens,
)
from splitpoint.v1 import kvstore_pb2, scheduler_pb2, worker_pb2

LIST = "/splitpoint.v1.AdminService/ListWorkers"
GENERATE = "/splitpoint.v1.InferenceService/Generate"
ALICE, ROOT = Caller("alice", Role.CLIENT, "a"), Caller("root", Role.ADMIN)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *entries: tuple[Caller, str], mode: int = 0o600) -> Path:
    path.write_text("\n".join(entry_text(TokenEntry(c, digest_of(t))) for c, t in entries))
    path.chmod(mode)
    return path


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


def test_every_method_of_the_contract_has_its_roles_and_nothing_else_has() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in (scheduler_pb2, worker_pb2, kvstore_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    listed = {method for method in access.ROLES if method.startswith("/splitpoint.v1.")}
    assert listed == methods
    assert all(roles for roles in access.ROLES.values())


def test_who_calls(tmp_path: Path) -> None:
    guard = Access(write(tmp_path / "t", (ALICE, "one"), (ROOT, "two")))
    assert guard.admit(GENERATE, bearer("one")) == ALICE
    assert guard.admit(LIST, bearer("two")) == ROOT
    with pytest.raises(PermissionDenied):
        guard.admit(LIST, bearer("one"))
    with pytest.raises(PermissionDenied):
        guard.admit("/any.Service/Method", bearer("two"))
    for metadata in (None, [], bearer("three"), bearer(""), [*bearer("one"), *bearer("one")]):
        with pytest.raises(Unauthenticated):
            guard.admit(GENERATE, metadata)
    assert guard.admit("/grpc.health.v1.Health/Check", None) == Caller()


def tokens_file(*rows: str) -> str:
    return "\n".join(
        f'[[token]]\nname = "c{n}"\n{row}\nsha256 = "{digest_of(str(n)).hex()}"\n'
        for n, row in enumerate(rows)
    )


CLIENT = 'role = "client"\ntenant = "a"'


def test_a_tenant_has_one_weight_from_any_of_its_tokens() -> None:
    entries = parse_tokens(
        tokens_file(CLIENT, f"{CLIENT}\nweight = 2.5", 'role = "client"', 'role = "admin"'), "t"
    )
    assert [entry.caller.weight for entry in entries] == [2.5, 2.5, 1.0, 1.0]
    again = parse_tokens("\n".join(map(entry_text, entries)), "t")
    assert again == entries


@pytest.mark.parametrize(
    "rows",
    [
        (f"{CLIENT}\nweight = 2", f"{CLIENT}\nweight = 3"),
        (f"{CLIENT}\nweight = 0",),
        (f"{CLIENT}\nweight = nan",),
        (f"{CLIENT}\nweight = true",),
        (f'{CLIENT}\nweight = "2"',),
        ('role = "admin"\nweight = 2',),
    ],
)
def test_what_is_no_weight_is_refused(rows: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument, match="weight"):
        parse_tokens(tokens_file(*rows), "t")


def test_every_entry_is_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = [(Caller(f"c{n}", Role.CLIENT), f"token{n}") for n in range(5)]
    guard = Access(write(tmp_path / "t", *callers))
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: Any, right: Any) -> bool:
        compared.append((left, right))
        return bool(left == right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    expected = [digest_of(token) for _, token in callers]
    for token in ("token0", "token2", "token4", "none of them"):
        compared.clear()
        try:
            guard.admit(GENERATE, bearer(token))
        except Unauthenticated:
            assert token == "none of them"
        assert compared == [(digest, digest_of(token)) for digest in expected]


def test_changes_are_seen_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path / "t", (ALICE, "one"), (ROOT, "two"))
    guard = Access(path, clock=clock)
    write(path, (ROOT, "two"))
    assert guard.admit(GENERATE, bearer("one")) == ALICE  # not looked at again yet
    clock.now += 1.0
    with pytest.raises(Unauthenticated):
        guard.admit(GENERATE, bearer("one"))
    assert guard.admit(LIST, bearer("two")) == ROOT
    write(path, (ROOT, "two"), (ALICE, "new"))
    clock.now += 1.0
    assert guard.admit(GENERATE, bearer("new")) == ALICE


@pytest.mark.parametrize("damage", ["mode", "toml", "gone"])
def test_nobody_is_let_in_on_a_file_that_cannot_be_trusted(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = write(tmp_path / "t", (ROOT, "two"))
    guard = Access(path, clock=clock)
    if damage == "mode":
        path.chmod(0o644)
    elif damage == "toml":
        path.write_text("[[token]")
    else:
        path.unlink()
    clock.now += 1.0
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            guard.admit(LIST, bearer("two"))
        assert caught.value.reason == "TOKENS_UNREADABLE"
    assert "every call is refused" in caplog.text
    path.unlink(missing_ok=True)
    write(path, (ROOT, "two"))
    clock.now += 1.0
    assert guard.admit(LIST, bearer("two")) == ROOT


def test_refusals_are_logged_sparingly_and_without_the_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    guard = Access(write(tmp_path / "t", (ROOT, "two")), clock=clock)
    for _ in range(100):
        with pytest.raises(Unauthenticated):
            guard.admit(LIST, bearer("canarytoken"))
    clock.now += 1.0
    with pytest.raises(Unauthenticated):
        guard.admit(LIST, bearer("canarytoken"))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "refused 1 calls",
        "refused 100 calls",
    ]
    assert "canarytoken" not in caplog.text


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602, 0o700, 0o777])
def test_files_open_to_others_are_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "t", (ROOT, "two"), mode=mode)
    with pytest.raises(PermissionDenied, match=f"{mode:04o}"):
        Access(path)


def test_a_read_only_file_is_good_and_a_foreign_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "t", (ROOT, "two"), mode=0o400)
    assert Access(path).admit(LIST, bearer("two")) == ROOT
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
        with pytest.raises(PermissionDenied, match="belong to this user"):
            Access(path)


SHA = "0" * 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[token]", "not TOML"),
        ("other = 1", "more than"),
        ("token = 1", "more than"),
        ("token = [1]", "table of strings"),
        (f'[[token]]\nname="x"\nrole="client"\nsha256="{SHA}"\ntenant=1', "table of strings"),
        (f'[[token]]\nname="x"\nrole="boss"\nsha256="{SHA}"', "not one of"),
        (f'[[token]]\nname="x"\nsha256="{SHA}"', "not one of"),
        (f'[[token]]\nname="a b"\nrole="client"\nsha256="{SHA}"', "a name has"),
        (f'[[token]]\nrole="client"\nsha256="{SHA}"', "a name has"),
        (f'[[token]]\nname="x"\nrole="admin"\ntenant="t"\nsha256="{SHA}"', "only clients"),
        ('[[token]]\nname="x"\nrole="client"\nsha256="secretsecret"', "64 hex"),
        (f'[[token]]\nname="x"\nrole="client"\ntoken="t"\nsha256="{SHA}"', "unknown keys token"),
        (f'[[token]]\nname="x"\nrole="client"\nsha256="{SHA}"\n' * 2, "name twice"),
        (
            f'[[token]]\nname="x"\nrole="client"\nsha256="{SHA}"\n'
            f'[[token]]\nname="y"\nrole="client"\nsha256="{SHA}"\n',
            "sha256 twice",
        ),
    ],
)
def test_malformed_files_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        access.parse_tokens(text, "tokens.toml")
    assert "secretsecret" not in caught.value.message


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    guard = Access(write(tmp_path / "t"))
    with pytest.raises(SplitpointError):
        guard.admit(LIST, bearer(""))
    with pytest.raises(Unauthenticated):
        guard.admit(LIST, bearer("x"))
