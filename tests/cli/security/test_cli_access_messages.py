"""What commands say of TLS that does not come about, and of a token of the wrong role."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_scheduler import fake_scheduler

from splitpoint.transport.access import Access, Caller, Role
from splitpoint.transport.tls import read_identity
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token
from splitpoint_cli.stack.child import child_environment

COMMAND = [sys.executable, "-m", "splitpoint_cli"]


def failing(*arguments: str) -> tuple[int, str]:
    """Exit code and the one line of a command that fails."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment({}),
        check=False,
    )
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()  # none of gRPC's own beside it
    return done.returncode, line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    make_certificates(made / "good")
    make_certificates(made / "other")
    return made


def test_a_connection_that_is_not_made_says_why(folder: Path) -> None:
    good = folder / "good"
    own = read_identity(certificate=good / "server.pem", key=good / "server-key.pem")
    ca, wrong = ("--ca", f"{good}/ca.pem"), ("--ca", f"{folder}/other/ca.pem")
    reason = "splitpoint: UNAVAILABLE: no TLS connection: "
    # The certificate is for 127.0.0.1, not for every address of this host.
    with fake_scheduler("127.0.0.1:0", own) as script, fake_scheduler("127.0.0.2:0", own) as named:
        for arguments, why in (
            (("--address", script.address, *wrong), "the server's certificate is not of the auth"),
            (("--address", named.address, *ca), "the server's certificate is not for the host"),
            (("--address", script.address), "the server closed the connection at once; most lik"),
        ):
            code, line = failing("generate", "a", *arguments)
            assert (code, line[: len(reason + why)]) == (3, reason + why)
            assert "ipv4:" not in line
        code, line = failing("status", "--address", script.address)
        assert (code, "give --ca" in line) == (3, True)
        assert script.requests == named.requests == []
    with fake_scheduler("127.0.0.1:0") as plain:
        code, line = failing("generate", "a", "--address", plain.address, *ca)
        assert (code, line) == (3, f"{reason}this client speaks TLS, the server does not")


def test_a_token_of_the_wrong_role_is_told_which_is_needed(
    tmp_path: Path, socket_address: str
) -> None:
    tokens, mine = tmp_path / "tokens.toml", tmp_path / "alice.token"
    mine.touch(mode=0o600)
    mine.write_text(add_token(tokens, Caller("alice", Role.CLIENT)))
    with fake_scheduler(socket_address, access=Access(tokens)) as script:
        for command in (("status",), ("top", "--once")):
            code, line = failing(*command, "--address", script.address, "--token-file", str(mine))
            assert code == 1
            assert line.startswith("splitpoint: PERMISSION_DENIED: ")
            assert line.endswith("with a token of the role admin; this one has the role client")


def test_down_is_for_the_host_of_the_stack_whatever_token_there_is() -> None:
    code, line = failing("down", "--address", "gpu.invalid:50050")
    assert code == 2
    assert line.startswith("splitpoint: INVALID_ARGUMENT: gpu.invalid:50050 is not an address of")
    assert "as the user that runs the stack (a token does not stop it)" in line
