"""`python -m gateway_service`: its arguments, its addresses, TLS and keys, and its stop."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from fake_scheduler import Script, fake_scheduler
from running_gateway import request_bytes

from splitpoint.service import READY_PREFIX
from splitpoint.transport.access import Access, Caller, Role
from splitpoint.transport.tls import read_identity
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30
BODY = {"model": "tiny", "prompt": [65, 66, 67], "max_tokens": 3}


def command(*options: str | Path) -> list[str]:
    return [sys.executable, "-m", "gateway_service", *map(str, options)]


def refusal(*options: str | Path) -> str:
    """Why it does not start with these options."""
    ended = subprocess.run(
        command(*options), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


@contextmanager
def serving(
    *options: str | Path, pass_fds: Sequence[int] = (), log: IO[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        command(*options),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        pass_fds=pass_fds,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY_PREFIX)
        yield process, line.removeprefix(READY_PREFIX).strip()
    finally:
        process.kill()
        process.communicate()


def test_what_it_does_not_start_with(tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    pem, key = certificates / "server.pem", certificates / "server-key.pem"
    assert "--tls-cert" in refusal("--listen", "0.0.0.0:0")
    assert "--tokens" in refusal("--listen", "0.0.0.0:0", "--tls-cert", pem, "--tls-key", key)
    assert "never sent there unencrypted" in refusal(
        "--listen", "127.0.0.1:0", "--scheduler", "127.0.0.1:1,example.org:50050"
    )
    ca = certificates / "ca.pem"
    assert "not both" in refusal("--listen", "127.0.0.1:0", "--ca", ca, "--scheduler-cert", pem)
    assert "not a size" in refusal("--listen", "127.0.0.1:0", "--max-body", "large")
    for size in ("0", "1023"):
        assert "at least 1KiB" in refusal("--listen", "127.0.0.1:0", "--max-body", size)
    assert "--max-requests" in refusal("--listen", "127.0.0.1:0", "--max-requests", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run(
            command("--listen", address), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
        )
    assert ended.returncode == 3
    assert f"cannot listen on {address}" in ended.stderr


@pytest.fixture
def scheduler() -> Iterator[Script]:
    with fake_scheduler("127.0.0.1:0") as script:
        yield script


def completed(connection: http.client.HTTPConnection, key: str = "") -> tuple[int, bytes]:
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def health(address: str) -> int:
    with closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status


def test_a_stop_and_the_end_of_its_parent(scheduler: Script) -> None:
    own, alive = os.pipe()
    options = ("--listen", "127.0.0.1:0", "--scheduler", scheduler.address)
    with serving(*options) as (process, address):
        with closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
            status, body = completed(connection)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "ABC")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    with serving(*options, "--parent-fd", str(own), pass_fds=[own]) as (process, _):
        os.close(alive)
        assert process.wait(SECONDS) == 0
    os.close(own)


def test_a_stop_tells_load_balancers_before_it_refuses(scheduler: Script) -> None:
    options = ("--scheduler", scheduler.address, "--drain-seconds", "4")
    with serving("--listen", "127.0.0.1:0", *options) as (process, address):
        assert health(address) == 200
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + SECONDS
        while health(address) != 503:
            assert time.monotonic() < deadline
        # A client whose balancer does not know it yet.
        with closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
            assert completed(connection)[0] == 200
        assert process.wait(SECONDS) == 0
        with pytest.raises(ConnectionRefusedError):
            health(address)


def test_a_stop_ends_a_stream_that_goes_on_for_too_long(scheduler: Script) -> None:
    scheduler.endless = True
    options = ("--scheduler", scheduler.address, "--grace-seconds", "0.3")
    with serving("--listen", "127.0.0.1:0", *options) as (process, address):
        with closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
            body, headers = (
                json.dumps({**BODY, "stream": True}),
                {"content-type": "application/json"},
            )
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            assert answer.readline().startswith(b"data: {")
            process.send_signal(signal.SIGTERM)
            *_, last = (line for line in answer.read().split(b"\n\n") if line)
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
        assert process.wait(SECONDS) == 0
    assert scheduler.cancelled.wait(SECONDS)


@pytest.mark.parametrize("leaves", [True, False])
def test_bytes_behind_a_request(scheduler: Script, tmp_path: Path, leaves: bool) -> None:
    """On the real event loop, which refuses to write to a closed connection."""
    scheduler.endless = leaves
    log = tmp_path / "log"
    request = request_bytes("POST", "/v1/completions", BODY)
    options = ("--listen", "127.0.0.1:0", "--scheduler", scheduler.address)
    with log.open("w") as file, serving(*options, log=file) as (process, address):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), SECONDS) as client:
            client.sendall(request + request + b"BROKEN\r\n\r\n")
            if not leaves:
                answer = b"".join(iter(lambda: client.recv(65536), b""))
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                assert answer.count(b"HTTP/1.1 ") == 1
            else:
                while not scheduler.requests:
                    time.sleep(0.01)
        if leaves:
            assert scheduler.cancelled.wait(SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert len(scheduler.requests) == 1
    text = log.read_text()
    assert text.count(f"status={499 if leaves else 200}") == 1
    assert "Traceback" not in text
    assert "incident" not in text


def test_what_is_no_request_is_in_no_log(scheduler: Script, tmp_path: Path) -> None:
    certificates, log = tmp_path / "certificates", tmp_path / "log"
    make_certificates(certificates)
    pem, key = certificates / "server.pem", certificates / "server-key.pem"
    options: list[str | Path] = ["--listen", "127.0.0.1:0", "--scheduler", scheduler.address]
    encrypted: list[str | Path] = ["--tls-cert", pem, "--tls-key", key]
    for more in ([], encrypted):
        with log.open("w") as file, serving(*options, *more, log=file) as (process, address):
            before = len(log.read_text().splitlines())
            host, _, port = address.rpartition(":")
            for _ in range(10):
                with socket.create_connection((host, int(port)), SECONDS) as client:
                    client.sendall(b"GET nothing HTTP/9.9\r\n\r\n")
                    with suppress(ConnectionError):
                        while client.recv(65536):
                            pass
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
        # The stop alone.
        assert len(log.read_text().splitlines()) <= before + 2, log.read_text()


def test_a_scheduler_that_is_absent_at_the_start_is_told_once(
    scheduler: Script, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    for address, count in (("127.0.0.1:9", 1), (scheduler.address, 0)):
        options = ("--listen", "127.0.0.1:0", "--scheduler", address)
        with log.open("w") as file, serving(*options, log=file) as (process, own):
            # Asked behind the first call, on the same connection.
            assert health(own) == (503 if count else 200)
            deadline = time.monotonic() + SECONDS
            while log.read_text().count("WARNING") < count:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
        told = [line for line in log.read_text().splitlines() if "WARNING" in line]
        assert len(told) == count
        assert all(f"no scheduler answers at {address}" in line for line in told)


def test_grpc_knows_the_setting_of_its_event_engine() -> None:
    """Without it a token costs more (docs/gateway.md), and an update may drop its name."""

    def stderr(**more: str) -> str:
        code = "import gateway_service.__main__, grpc; grpc.insecure_channel('127.0.0.1:1')"
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "GRPC_VERBOSITY": "ERROR", **more},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    assert "Unknown experiment" not in stderr()
    # A setting of the operator's own is kept, and gRPC says which name it does not know.
    assert "Unknown experiment: of_no_release" in stderr(GRPC_EXPERIMENTS="-of_no_release")


def test_a_socket_file(scheduler: Script, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    options = ("--listen", f"unix:{path}", "--scheduler", scheduler.address)
    with serving(*options) as (_, address), socket.socket(socket.AF_UNIX) as client:
        assert address == f"unix:{path}"
        client.connect(str(path))
        connection = http.client.HTTPConnection("localhost", timeout=SECONDS)
        connection.sock = client
        assert completed(connection)[0] == 200


@pytest.mark.parametrize("trust", ["ca", "scheduler-cert"])
def test_tls_on_both_sides(tmp_path: Path, trust: str) -> None:
    """HTTPS in front, mutual TLS behind: the gateway shows the scheduler its own certificate."""
    certificates, tokens = tmp_path / "certificates", tmp_path / "tokens.toml"
    make_certificates(certificates)
    pem, private = certificates / "server.pem", certificates / "server-key.pem"
    authority = certificates / "ca.pem"
    key = add_token(tokens, Caller("alice", Role.CLIENT))
    identity = read_identity(certificate=pem, key=private, authorities=authority)
    with fake_scheduler("127.0.0.1:0", identity, Access(tokens)) as behind:
        options: list[str | Path] = [
            *("--listen", "127.0.0.1:0", "--scheduler", behind.address, "--tokens", tokens),
            *("--tls-cert", pem, "--tls-key", private),
            *(f"--{trust}", authority if trust == "ca" else pem),
        ]
        with serving(*options) as (_, address):
            context = ssl.create_default_context(cafile=str(authority))
            host, _, port = address.rpartition(":")
            for given, status in (("", 401), ("wrong", 401), (key, 200)):
                connection = http.client.HTTPSConnection(
                    host, int(port), context=context, timeout=SECONDS
                )
                with closing(connection):
                    assert completed(connection, given)[0] == status
            plain = http.client.HTTPConnection(address, timeout=SECONDS)
            with closing(plain), pytest.raises((http.client.HTTPException, OSError)):
                completed(plain, key)
    assert len(behind.requests) == 1
