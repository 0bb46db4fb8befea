"""`splitpoint certs` and `token`, services that refuse to be open, and the source itself."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from splitpoint.errors import AlreadyExists, InvalidArgument, PermissionDenied
from splitpoint.transport.access import Caller, Role, digest_of, find_caller, read_tokens
from splitpoint.transport.tls import client_identity
from splitpoint_cli.main import app
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token

ROOT = Path(__file__).resolve().parents[2]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_certs_makes_six_files_once(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    arguments = ["certs", str(folder), "--host", "gpu.example.org", "--host", "10.0.0.7"]
    done = CliRunner().invoke(app, [*arguments, "--days", "30"])
    assert done.exit_code == 0, done.output
    assert "--tls-cert" in done.output
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{n}{k}.pem" for n in ("ca", "server", "client") for k in ("", "-key")}
    assert {mode(path) for path in folder.glob("*-key.pem")} == {0o600}
    server = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["localhost", "gpu.example.org"]
    addresses = [str(a) for a in hosts.get_values_for_type(x509.IPAddress)]
    assert addresses == ["127.0.0.1", "::1", "10.0.0.7"]
    assert 29 <= (server.not_valid_after_utc - server.not_valid_before_utc).days <= 31

    before = (folder / "ca.pem").read_bytes()
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, AlreadyExists)
    assert (folder / "ca.pem").read_bytes() == before
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
    assert (folder / "ca.pem").read_bytes() != before
    with pytest.raises(InvalidArgument, match="neither a name nor an address"):
        make_certificates(tmp_path / "x", ["a" * 300])
    assert not (tmp_path / "x").exists()


def test_token_prints_once_and_stores_only_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    arguments = ["token", "--file", str(path), "--name", "alice", "--tenant", "research"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    token = done.stdout.strip()
    assert re.fullmatch(r"[A-Za-z0-9_-]{43,}", token)
    assert mode(path) == 0o600
    assert token not in path.read_text()
    assert digest_of(token).hex() in path.read_text()
    assert find_caller(read_tokens(path), token) == Caller("alice", Role.CLIENT, "research")

    path.write_text("# whose is whose\n" + path.read_text().rstrip("\n"))
    second = CliRunner().invoke(
        app, ["token", "--file", str(path), "--name", "ops", "--role", "admin"]
    )
    assert find_caller(read_tokens(path), second.stdout.strip()) == Caller("ops", Role.ADMIN)
    assert path.read_text().startswith("# whose is whose\n")
    assert second.stdout != done.stdout

    for more, kind in (
        (["--name", "alice"], AlreadyExists),
        (["--name", "a b"], InvalidArgument),
        (["--name", "w", "--role", "worker", "--tenant", "t"], InvalidArgument),
    ):
        before = path.read_text()
        refused = CliRunner().invoke(app, ["token", "--file", str(path), *more])
        assert isinstance(refused.exception, kind)
        assert path.read_text() == before
    path.chmod(0o644)
    refused = CliRunner().invoke(app, ["token", "--file", str(path), "--name", "new"])
    assert isinstance(refused.exception, PermissionDenied)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokens.toml"]


def test_token_goes_into_a_private_file_that_services_accept(tmp_path: Path) -> None:
    path, mine = tmp_path / "tokens.toml", tmp_path / "alice.token"
    arguments = ["token", "--file", str(path), "--name", "alice", "--out", str(mine)]
    umask = os.umask(0)
    try:
        done = CliRunner().invoke(app, arguments)
    finally:
        os.umask(umask)
    assert (done.exit_code, done.output) == (0, "")
    assert mode(mine) == 0o600
    identity = client_identity(token_file=mine, environment={})
    assert find_caller(read_tokens(path), identity.token) == Caller("alice", Role.CLIENT)

    before = path.read_text(), mine.read_text()
    for more in (["--name", "bob"], ["--name", "bob", "--out", str(path)]):
        refused = CliRunner().invoke(app, [*arguments, *more])
        assert isinstance(refused.exception, AlreadyExists)
    gone = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "no" / "such")])
    assert isinstance(gone.exception, InvalidArgument)
    # A name that is taken leaves no empty file behind.
    taken = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "again")])
    assert isinstance(taken.exception, AlreadyExists)
    assert (path.read_text(), mine.read_text()) == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"tokens.toml", "alice.token"}


def test_two_commands_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    threads = [
        threading.Thread(target=add_token, args=(path, Caller(f"c{n}", Role.CLIENT)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_tokens(path)) == 8


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("kvstore_service", ["--arena", "/dev/shm/none/arena", "--host-memory", "1MiB"]),
        ("worker_service", []),
        ("scheduler_service", ["--worker", "unix:/w"]),
    ],
)
def test_services_do_not_start_open(module: str, more: list[str], tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls = ["--tls-cert", f"{tmp_path}/server.pem", "--tls-key", f"{tmp_path}/server-key.pem"]
    refused = subprocess.run(
        [
            *(sys.executable, "-m", module, "--listen", "0.0.0.0:0", *tls, *more),
            *("--model", str(ROOT / "models" / "stdlib-llama")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode in (1, 2)
    assert "missing: --tokens" in refused.stderr
    assert "Traceback" not in refused.stderr


# -- the source -------------------------------------------------------------------------

PACKAGES = ("splitpoint", "kvstore_service", "worker_service", "scheduler_service")
# A word of each that is forbidden: few files have one, and only these are parsed.
WORDS = re.compile(r"\b(?:pickle|load|eval|exec|shell)\b")
FORBIDDEN = re.compile(
    r"\bpickle\b|torch\.load\(|(?<![\w.])eval\(|(?<![\w.])exec\(|yaml\.load\(|shell=True"
)


def test_the_source_runs_nothing_that_it_reads() -> None:
    found = []
    for package in (*PACKAGES, "splitpoint_cli", "tools", "benchmarks"):
        files = [p for p in (ROOT / package).rglob("*.py") if "/v1/" not in p.as_posix()]
        assert files or package == "benchmarks"
        for path in files:
            text = path.read_text()
            if not WORDS.search(text):
                continue
            # Without comments and strings: those may say what is not done.
            code = ast.unparse(_without_docstrings(ast.parse(text)))
            found += [f"{path.relative_to(ROOT)}: {match}" for match in FORBIDDEN.findall(code)]
    assert found == []


def test_the_search_finds_what_it_should() -> None:
    for line in ("import pickle", "torch.load(f)", "eval(x)", "exec(x)", "yaml.load(f)"):
        assert FORBIDDEN.search(line), line
        assert WORDS.search(line), line
    for pattern in (FORBIDDEN, WORDS):
        assert pattern.search("subprocess.run(c, shell=True)")
    assert not FORBIDDEN.search("model.eval()")


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return tree
