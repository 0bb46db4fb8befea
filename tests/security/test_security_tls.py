"""Certificates and keys from files, TLS over real sockets, tokens that stay off the open wire."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitpoint import config
from splitpoint.client import AsyncClient, Client
from splitpoint.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PermissionDenied,
    SplitpointError,
    Unavailable,
)
from splitpoint.host.files import is_private
from splitpoint.options.option import parser_of
from splitpoint.options.service import COMMON
from splitpoint.transport import channels, servers, statuses
from splitpoint.transport.access import Access, Caller, Role, current_caller
from splitpoint.transport.tls import (
    PLAIN,
    Identity,
    client_identity,
    identity_of,
    read_identity,
    trusting_own_server,
)
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token

METHOD = "/splitpoint.v1.AdminService/GetQueue"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    make_certificates(made / "good", ["gpu.example.org", "10.1.2.3"])
    make_certificates(made / "other")
    make_certificates(made / "old", now=datetime.now(UTC) - timedelta(days=400))
    return made


def identity(folder: Path, name: str, *, ca: bool = True, token: str = "") -> Identity:
    return read_identity(
        certificate=folder / f"{name}.pem",
        key=folder / f"{name}-key.pem",
        authorities=folder / "ca.pem" if ca else None,
        token=token,
    )


@asynccontextmanager
async def serving(
    own: Identity, access: Access | None = None, address: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    async def who(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(0.05)
        return current_caller().name.encode()

    server = servers.create_server(access=access)
    handler: Any = grpc.unary_unary_rpc_method_handler(who)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("splitpoint.v1.AdminService", {"GetQueue": handler}),)
    )
    bound = servers.listen(server, address, own)
    await server.start()
    yield bound
    await server.stop(0)


async def ask(address: str, own: Identity) -> str:
    """Return the name that the server gives this client. Raises what the call raises."""
    async with channels.open_channel(address, own) as channel:
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
        try:
            answer = await send(b"", timeout=10)
        except grpc.RpcError as error:
            raise statuses.error_of(error) from error
    return answer.decode()


# -- connections ------------------------------------------------------------------------


async def test_mutual_tls_with_tokens_and_concurrent_callers(folder: Path, tmp_path: Path) -> None:
    names = [f"admin{n}" for n in range(20)]
    tokens = [add_token(tmp_path / "t", Caller(name, Role.ADMIN)) for name in names]
    good = folder / "good"
    async with serving(identity(good, "server"), Access(tmp_path / "t")) as address:
        answers = await asyncio.gather(
            *(ask(address, identity(good, "client", token=token)) for token in tokens)
        )
        assert answers == names

        def blocking() -> bytes:
            own = identity(good, "client", token=tokens[3])
            with channels.open_sync_channel(address, own) as channel:
                send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
                return send(b"", timeout=10)

        assert await asyncio.to_thread(blocking) == b"admin3"


async def test_an_expired_server_is_named(folder: Path) -> None:
    async with serving(identity(folder / "old", "server", ca=False)) as address:
        with pytest.raises(Unavailable, match="server's certificate has expired"):
            await ask(address, read_identity(authorities=folder / "old" / "ca.pem"))


async def test_an_expired_client_is_turned_away(folder: Path, tmp_path: Path) -> None:
    # The same authority, so that only the dates are wrong.
    old = folder / "old"
    server = Identity(
        (folder / "good" / "server.pem").read_bytes(),
        (folder / "good" / "server-key.pem").read_bytes(),
        (old / "ca.pem").read_bytes(),
    )
    client = Identity(
        (old / "client.pem").read_bytes(),
        (old / "client-key.pem").read_bytes(),
        (folder / "good" / "ca.pem").read_bytes(),
    )
    async with serving(server) as address:
        with pytest.raises(Unavailable, match="not expired"):
            await ask(address, client)


async def test_the_name_in_the_certificate_must_be_the_hosts(folder: Path) -> None:
    good = identity(folder / "good", "client")
    async with serving(identity(folder / "good", "server"), address="127.0.0.2:0") as address:
        with pytest.raises(Unavailable, match="not for the host that was called"):
            await ask(address, good)


async def test_a_name_can_be_expected_in_place_of_the_hosts(folder: Path) -> None:
    """As services say it that reach each other by addresses of the day."""
    good = folder / "good"
    arguments = parser_of("service", "", COMMON)
    files = ["--tls-cert", str(good / "client.pem"), "--tls-key", str(good / "client-key.pem")]
    given = ["--listen", "127.0.0.1:0", *files, "--tls-ca", str(good / "ca.pem")]
    named = identity_of(arguments.parse_args([*given, "--tls-server-name", "gpu.example.org"]))
    other = identity_of(arguments.parse_args([*given, "--tls-server-name", "not.example.org"]))
    async with serving(identity(good, "server"), address="127.0.0.2:0") as address:
        assert await ask(address, named) == ""
        with pytest.raises(Unavailable, match="not for the host that was called"):
            await ask(address, other)


async def test_a_client_of_tls_at_a_plain_server_is_told(folder: Path) -> None:
    async with serving(PLAIN) as address:
        with pytest.raises(Unavailable, match="speaks TLS, the server does not"):
            await ask(address, identity(folder / "good", "client"))


async def test_an_own_server_is_trusted_by_its_certificate_alone(folder: Path) -> None:
    own = identity(folder / "good", "server", ca=False)
    async with serving(own, address="127.0.0.2:0") as address:
        assert await ask(address, trusting_own_server(own)) == ""
        other = trusting_own_server(identity(folder / "other", "server"))
        with pytest.raises(Unavailable, match="no TLS connection"):
            await ask(address, other)
    assert trusting_own_server(PLAIN) == PLAIN


async def test_sockets_stay_plain_but_want_tokens(
    folder: Path, tmp_path: Path, socket_address: str
) -> None:
    token = add_token(tmp_path / "t", Caller("root", Role.ADMIN))
    own = identity(folder / "good", "server")
    async with serving(own, Access(tmp_path / "t"), socket_address):
        assert await ask(socket_address, Identity(token=token)) == "root"
        secured = identity(folder / "other", "client", token=token)
        assert await ask(socket_address, secured) == "root"
        with pytest.raises(SplitpointError) as caught:
            await ask(socket_address, PLAIN)
        assert caught.value.reason == "TOKEN_MISSING"


async def test_waiting_for_a_server_tells_why_in_the_end(folder: Path) -> None:
    async with (
        serving(identity(folder / "good", "server")) as address,
        AsyncClient(address, ca=folder / "other" / "ca.pem") as client,
    ):
        with pytest.raises(DeadlineExceeded, match="not of the authority"):
            await client.wait_ready(0.1)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "example.org:1", "0.0.0.0:1", "[fe80::1]:1"])
def test_a_token_is_not_sent_in_the_clear(address: str, folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="never sent") as caught:
        channels.open_sync_channel(address, Identity(token="canarytoken"))
    assert "canarytoken" not in caught.value.message
    with pytest.raises(InvalidArgument, match="never sent"):
        Client(address, token="canarytoken", ca=None)
    Client(address, token="canarytoken", ca=folder / "good" / "ca.pem").close()
    channels.open_sync_channel(address, PLAIN).close()


# -- files ------------------------------------------------------------------------------


def test_secrets_are_not_shown() -> None:
    shown = repr(Identity(b"certificate", b"secretkey", b"ca", "secrettoken"))
    assert "secret" not in shown


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_keys_and_token_files_open_to_others_are_refused(
    folder: Path, tmp_path: Path, mode: int
) -> None:
    key = tmp_path / "key"
    key.write_bytes((folder / "good" / "server-key.pem").read_bytes())
    key.chmod(mode)
    with pytest.raises(PermissionDenied, match=f"{mode:04o}"):
        read_identity(certificate=folder / "good" / "server.pem", key=key)
    token = tmp_path / "token"
    token.write_text("abc\n")
    token.chmod(mode)
    with pytest.raises(PermissionDenied, match=f"{mode:04o}"):
        read_identity(token_file=token)
    token.chmod(0o400)
    assert read_identity(token_file=token).token == "abc"


@pytest.mark.parametrize(
    ("mode", "owner", "group", "is_fine"),
    [
        (0o600, 1000, 1000, True),
        (0o400, 1000, 5, True),
        (0o440, 1000, 1000, False),  # the user's own file wants no group
        (0o440, 0, 1000, True),
        (0o640, 0, 1001, True),
        (0o440, 0, 5, False),  # root's, but for another group
        (0o660, 0, 1000, False),  # others of the group could change it
        (0o644, 0, 1000, False),
        (0o600, 1001, 1000, False),
        (0o440, 1001, 1000, False),
    ],
)
def test_who_may_hold_a_secret(mode: int, owner: int, group: int, is_fine: bool) -> None:
    found = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, group, 9, 0, 0, 0))
    assert is_private(found, user=1000, groups={1000, 1001}) is is_fine


def test_files_that_are_not_what_they_should_be(folder: Path, tmp_path: Path) -> None:
    good, other = folder / "good", folder / "other"
    empty = tmp_path / "empty"
    empty.touch(0o600)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"certificate": good / "server.pem"}, "together"),
        ({"key": good / "server-key.pem"}, "together"),
        ({"certificate": good / "server.pem", "key": other / "server-key.pem"}, "not a cert"),
        ({"certificate": tmp_path / "none", "key": good / "server-key.pem"}, "cannot be read"),
        ({"certificate": good / "server.pem", "key": tmp_path / "none"}, "cannot be read"),
        ({"certificate": empty, "key": good / "server-key.pem"}, "not a certificate"),
        ({"authorities": empty}, "no certificate"),
        ({"authorities": good / "ca-key.pem"}, "no certificate"),
        ({"token_file": empty}, "does not hold a token"),
    )
    for arguments, words in cases:
        with pytest.raises(InvalidArgument, match=words):
            read_identity(**arguments)


def test_certificates_near_their_end_are_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def served_with(certificates: Path) -> Identity:
        parser = parser_of("service", "", COMMON)
        files = ("--tls-cert", "server.pem"), ("--tls-key", "server-key.pem")
        paths = [word for option, name in files for word in (option, str(certificates / name))]
        return identity_of(parser.parse_args(["--listen", "127.0.0.1:0", *paths]))

    assert served_with(folder / "old") == identity(folder / "old", "server", ca=False)
    assert "has expired" in caplog.text
    make_certificates(tmp_path, days=3)
    served_with(tmp_path)
    assert "expires in 2 days" in caplog.text


def test_the_environment_of_clients(folder: Path, tmp_path: Path) -> None:
    good = folder / "good"
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("fromfile")
    environment = {
        "SPLITPOINT_CA": str(good / "ca.pem"),
        "SPLITPOINT_CERT": str(good / "client.pem"),
        "SPLITPOINT_KEY": str(good / "client-key.pem"),
        "SPLITPOINT_TOKEN_FILE": str(file),
    }
    found = client_identity(environment=environment)
    assert found == identity(good, "client", token="fromfile")
    environment["SPLITPOINT_TOKEN"] = "fromenvironment"
    assert client_identity(environment=environment).token == "fromenvironment"
    assert client_identity(token="given", environment=environment).token == "given"
    assert client_identity(token_file=file, environment=environment).token == "fromfile"
    assert client_identity(environment={}) == PLAIN
    environment["SPLITPOINT_SERVER_NAME"] = "splitpoint.internal"
    assert client_identity(environment=environment).server_name == "splitpoint.internal"


# -- where services listen --------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "192.168.1.2:1", "gpu.example.org:1"])
def test_open_interfaces_want_tls_and_tokens(address: str) -> None:
    for has_tls, has_tokens, missing in (
        (False, False, "--tls-cert and --tls-key .*--tokens"),
        (True, False, "missing: --tokens"),
        (False, True, "missing: --tls-cert and --tls-key"),
    ):
        with pytest.raises(InvalidArgument, match=missing):
            config.check_listen_address(address, has_tls=has_tls, has_tokens=has_tokens)
    assert config.check_listen_address(address, has_tls=True, has_tokens=True) == address


def test_how_a_host_reaches_itself() -> None:
    assert config.reachable_address("0.0.0.0:5") == "127.0.0.1:5"
    assert config.reachable_address("[::]:5") == "[::1]:5"
    assert config.reachable_address("10.0.0.1:5") == "10.0.0.1:5"
    assert config.reachable_address("unix:/a") == "unix:/a"
