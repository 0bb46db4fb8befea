"""`splitpoint up` on every interface, with TLS and tokens, as a user runs it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from own_names import free_ports, instance_name
from small_model import small_model
from up_process import up_process, wait_until_up

from splitpoint.transport.access import Caller, Role
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token
from splitpoint_cli.stack.child import child_environment

COMMAND = [sys.executable, "-m", "splitpoint_cli"]
CANARY = "canaryprompt_51de"
SALT = "canarysalt_0f2b"


def splitpoint(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**child_environment({}), **environment},
        check=False,
    )


def test_up_beyond_loopback(tmp_path: Path, free_port: int) -> None:
    certificates, tokens = tmp_path / "certificates", tmp_path / "tokens.toml"
    make_certificates(certificates)
    metrics = free_ports(5)
    http_port = metrics + 4
    alice = add_token(tokens, Caller("alice", Role.CLIENT, "a"))
    root = add_token(tokens, Caller("root", Role.ADMIN))
    token_file = tmp_path / "root.token"
    token_file.touch(0o600)
    token_file.write_text(root)
    tls = [
        *("--tls-cert", f"{certificates}/server.pem"),
        *("--tls-key", f"{certificates}/server-key.pem"),
    ]
    base = ["up", "--listen", f"0.0.0.0:{free_port}", "--instance", instance_name("tls")]

    refused = splitpoint(*base, *tls)
    assert refused.returncode == 2
    assert "missing: --tokens" in refused.stderr

    command = [
        *(*COMMAND, *base, *tls, "--tokens", str(tokens), "--verbose"),
        *("--tls-ca", f"{certificates}/ca.pem"),
        *("--model", str(small_model()), "--device", "cpu", "--workers", "1", "--threads", "1"),
        *("--host-memory", "64MiB", "--device-memory", "192MiB"),
        *("--metrics", str(metrics), "--http", f"0.0.0.0:{http_port}"),
    ]
    with up_process(command) as process:
        printed = wait_until_up(process)
        assert f"--address 127.0.0.1:{free_port}" in printed
        who = {
            "SPLITPOINT_ADDRESS": f"localhost:{free_port}",
            "SPLITPOINT_CA": f"{certificates}/ca.pem",
            "SPLITPOINT_CERT": f"{certificates}/client.pem",
            "SPLITPOINT_KEY": f"{certificates}/client-key.pem",
        }
        ask = ["generate", CANARY, "--max-tokens", "4", "--cache-salt", SALT]
        done = splitpoint(*ask, SPLITPOINT_TOKEN=alice, **who)
        assert done.returncode == 0, done.stderr

        anonymous = splitpoint(*ask, **who)
        assert anonymous.returncode == 1
        assert "UNAUTHENTICATED" in anonymous.stderr
        plain = splitpoint(*ask, SPLITPOINT_ADDRESS=f"127.0.0.1:{free_port}")
        assert plain.returncode == 3
        assert "most likely it speaks TLS" in plain.stderr

        client = splitpoint("status", SPLITPOINT_TOKEN=alice, **who)
        assert "PERMISSION_DENIED" in client.stderr
        ca = who.pop("SPLITPOINT_CA")
        admin = splitpoint("status", "--token-file", str(token_file), "--ca", ca, **who)
        assert admin.returncode == 0, admin.stderr
        assert "slots sealed" in admin.stdout  # the store's own answer, over its socket

        assert f"https://127.0.0.1:{metrics}/metrics (scheduler)" in printed
        assert (
            f"http://127.0.0.1:{metrics + 1}/metrics (store), {metrics + 2} (worker 0)" in printed
        )
        assert f"https://127.0.0.1:{http_port}/v1 (OpenAI)" in printed
        check_http(http_port, certificates, alice)
        assert f"https://127.0.0.1:{metrics + 3}/metrics (gateway)" in printed
        check_metrics(metrics, certificates)

        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    for service in ("kvstore", "worker-0", "scheduler", "gateway"):
        assert f"{service}:" in log
    for secret in (CANARY, SALT, alice, root):
        assert secret not in log


def test_names_a_bound_and_a_key(tmp_path: Path, free_port: int) -> None:
    """`up --http` with vLLM's options, by the client of OpenAI."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(f"{CANARY}\n")
    http_port = free_ports(1)
    command = [
        *(*COMMAND, "up", "--listen", f"127.0.0.1:{free_port}", "--verbose"),
        *("--instance", instance_name("named"), "--http", f"127.0.0.1:{http_port}"),
        *("--model", str(small_model()), "--device", "cpu", "--workers", "1", "--threads", "1"),
        *("--host-memory", "64MiB", "--device-memory", "192MiB"),
        *("--api-key-file", str(key), "--served-model-name", "first,second"),
        *("--max-model-len", "40"),
    ]
    with up_process(command) as process:
        wait_until_up(process)
        url = f"http://127.0.0.1:{http_port}/v1"
        with openai.OpenAI(base_url=url, api_key=CANARY, max_retries=0) as client:
            models = {each.id: each.model_dump() for each in client.models.list()}
            assert [*models] == ["first", "second"]
            assert {each["max_model_len"] for each in models.values()} == {40}
            assert client.models.retrieve("second").id == "second"
            body: dict[str, Any] = {"prompt": "import os", "temperature": 0}
            texts = [
                client.completions.create(model=name, max_tokens=8, **body).choices[0].text
                for name in models
            ]
            assert len(set(texts)) == 1
            with pytest.raises(openai.NotFoundError, match="'first', 'second' are served"):
                client.completions.create(model="small-llama", **body)
            with pytest.raises(openai.BadRequestError, match="40") as refused:
                client.completions.create(model="first", prompt=[5] * 40)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="40"):
                client.completions.create(model="first", max_tokens=40, **body)
        stranger = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert CANARY not in log


def check_metrics(port: int, certificates: Path) -> None:
    """The scheduler's are for who has a certificate, the others' for this host."""
    stranger = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    known = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    known.load_cert_chain(certificates / "client.pem", certificates / "client-key.pem")
    with pytest.raises((OSError, http.client.HTTPException)):
        read(f"https://127.0.0.1:{port}/metrics", stranger)
    texts = [read(f"https://127.0.0.1:{port}/metrics", known)]
    texts += [read(f"http://127.0.0.1:{port + more}/metrics") for more in (1, 2)]
    # A browser has no certificate, so the gateway asks for none, nor do its metrics.
    texts.append(read(f"https://127.0.0.1:{port + 3}/metrics", stranger))
    services = ("scheduler", "kvstore", "worker", "gateway")
    for text, service in zip(texts, services, strict=True):
        assert f'splitpoint_build_info{{service="{service}"' in text
        assert CANARY not in text
        assert SALT not in text
        assert "alice" not in text


def read(url: str, tls: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=20, context=tls) as answer:
        text: str = answer.read().decode()
        return text


def test_nothing_listens_after_a_refusal(free_port: int) -> None:
    refused = splitpoint("up", "--listen", f"0.0.0.0:{free_port}")
    assert refused.returncode == 2
    assert "--tls-cert" in refused.stderr
    assert "--tokens" in refused.stderr
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", free_port)) != 0


def check_http(port: int, certificates: Path, token: str) -> None:
    """HTTPS without a client's certificate, by the key alone."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    body = json.dumps(
        {"model": "small-llama", "prompt": CANARY, "max_tokens": 4, "cache_salt": SALT}
    ).encode()
    request = urllib.request.Request(f"https://127.0.0.1:{port}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=30, context=context)
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30, context=context) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 4
    with pytest.raises((OSError, http.client.HTTPException)):
        read(f"http://127.0.0.1:{port}/v1/models")
    server = certificates / "server.pem"
    for path, status in (("/health", 0), ("/health/live", 0), ("/v1/models", 1)):
        url = f"https://127.0.0.1:{port}{path}"
        probe = splitpoint("probe", url, "--server-cert", str(server))
        assert probe.returncode == status, probe.stderr
    assert "answers 401" in probe.stderr
