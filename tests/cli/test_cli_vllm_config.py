"""`splitpoint vllm-config`: one line of JSON with the keys that vLLM reads, or of why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from splitpoint_command import splitpoint

from splitpoint.errors import InvalidArgument, PermissionDenied
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.vllm_config import transfer_config


def test_without_options_it_is_the_default_store() -> None:
    done = splitpoint("vllm-config")
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert json.loads(line) == {
        "kv_connector": "SplitpointConnector",
        "kv_connector_module_path": "splitpoint_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "SplitpointSpec",
            "spec_module_path": "splitpoint_vllm.spec",
            "store": "127.0.0.1:50051",
        },
    }
    assert " " not in line, "an unquoted $(...) is still one argument"


def extra(config: dict[str, object]) -> dict[str, object]:
    found = config["kv_connector_extra_config"]
    assert isinstance(found, dict)
    return found


def test_every_option_reaches_the_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path)
    (tmp_path / "engine.token").touch(0o600)
    (tmp_path / "engine.token").write_text("a token")
    monkeypatch.chdir(tmp_path)  # vLLM may be started in another folder
    found = extra(
        transfer_config(
            "unix:/run/splitpoint/store.sock",
            tls_ca=Path("ca.pem"),
            tls_cert=Path("client.pem"),
            tls_key=Path("client-key.pem"),
            token_file=Path("engine.token"),
            lookup_seconds=0.5,
            link_rate="184MB",
        )
    )
    assert {name: found[name] for name in found if not name.startswith("spec_")} == {
        "store": "unix:/run/splitpoint/store.sock",
        "tls_ca": str(tmp_path / "ca.pem"),
        "tls_certificate": str(tmp_path / "client.pem"),
        "tls_key": str(tmp_path / "client-key.pem"),
        "token_file": str(tmp_path / "engine.token"),
        "lookup_seconds": 0.5,
        "link_rate": 184_000_000,
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--store", "nonsense"), "'nonsense' is not an address"),
        (("--store", "unix:relative"), "a socket path is absolute"),
        (("--tls-ca", "/no/such.pem"), "/no/such.pem cannot be read"),
        (("--tls-cert", "a.pem", "--tls-key", "b.pem"), "--tls-cert needs --tls-ca"),
        (("--lookup-seconds", "0"), "--lookup-seconds is above 0 and at most 60, not 0"),
        (("--link-rate", "184"), "did you mean 184MB?"),
    ],
)
def test_wrong_arguments_are_one_line_and_no_json(words: tuple[str, ...], told: str) -> None:
    done = splitpoint("vllm-config", *words)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("splitpoint: INVALID_ARGUMENT: ")
    assert told in line


def test_files_that_cannot_be_used_are_refused_here_and_not_in_the_engine(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    authority = tmp_path / "ca.pem"
    with pytest.raises(InvalidArgument, match="together"):
        transfer_config(tls_ca=authority, tls_cert=tmp_path / "client.pem")
    (tmp_path / "client-key.pem").chmod(0o644)
    with pytest.raises(PermissionDenied, match="open to others"):
        transfer_config(
            tls_ca=authority, tls_cert=tmp_path / "client.pem", tls_key=tmp_path / "client-key.pem"
        )
