"""Forked programs are what `python -m` would start: their environment, streams and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
from fork_server import FAMILIES, ROOT, Parent

# Ends when its main thread and another one have ended.
PROGRAM = """
import atexit, os, sys, threading, time
os.environ.setdefault("OF_THIS_PROGRAM", "1")
os.environ.setdefault("OF_THE_TEST", "1")

def main():
    if "refuse" in sys.argv:
        raise SystemExit("refused")
    print(os.environ["OF_THIS_PROGRAM"], os.environ["OF_THE_TEST"], flush=True)
    atexit.register(print, "at the end", flush=True)
    threading.Thread(target=lambda: (time.sleep(0.3), print("in a thread", flush=True))).start()
    return 3
"""


def test_a_forked_program_is_as_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(PROGRAM.replace("OF_THIS", f"OF_{name}"))
    (tmp_path / "splitpoint").symlink_to(ROOT / "splitpoint")
    monkeypatch.setattr(fork_server, "ROOT", tmp_path)
    monkeypatch.setenv("OF_THE_TEST", "2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    parent = Parent(["first", "second"])
    try:
        log = tmp_path / "log"
        child = parent.fork("second", (), log, errors=log)
        child.wait_ended()
        assert parent.code_of(child.process_id) == 3
        child.close()
        # `forked_python` compares it: else a forked `splitpoint up` would fork no service. It is
        # empty while the process starts.
        given = Path(f"/proc/{parent.process_id}/environ").read_bytes().split(b"\0")
        assert f"PYTHONPATH={tmp_path}{os.pathsep}{tmp_path / 'more'}".encode() in given
        # One that ends before anything else is asked.
        refused = parent.fork("first", ("refuse",), log, errors=tmp_path / "refused")
        assert parent.code_of(refused.process_id) == 1
        assert not refused.is_running
        refused.close()
    finally:
        parent.close()
    assert log.read_text() == "1 2\nin a thread\nat the end\n"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_programs_of_one_parent_have_one_environment(family: tuple[str, ...]) -> None:
    """Libraries read some variables when they are imported, and a parent imports them once."""
    told = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import json, os, sys\n"
            "from fork_server import Program\n"
            "before = dict(os.environ)\n"
            "found = [Program.load(name).environment for name in sys.argv[1:]]\n"
            "assert os.environ == before\n"
            "print(json.dumps(found))",
            *family,
        ],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    first, *others = json.loads(told.stdout)
    for name, other in zip(family[1:], others, strict=True):
        # What `splitpoint` itself uses is not told to it by variables. What is imported already
        # sets none again.
        assert other in ({}, first) or name == "splitpoint_cli"
    assert bool(first) == ("kvstore_service" not in family)


# -- what tests start by `python -m` ------------------------------------------------------------

COMMAND = (sys.executable, "-m", "splitpoint_cli")


def is_forked(process_id: int) -> bool:
    """Whether it began as another program, with the variables of that."""
    variables = Path(f"/proc/{process_id}/environ")
    deadline = time.monotonic() + 60
    # For a moment a new program has none.
    while not (found := variables.read_bytes()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return b"OF_THIS_TEST=" not in found


def test_a_command_is_forked_as_a_child_of_its_own(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody"
    command = [*COMMAND, "generate", "--address", address, "--retry-seconds", "60", "-"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "OF_THIS_TEST": "1"},
        process_group=0,
        text=True,
    ) as process:
        assert is_forked(process.pid)
        assert os.getpgid(process.pid) == process.pid
        about = Path(f"/proc/{process.pid}")
        assert f"PPid:\t{os.getpid()}\n" in (about / "status").read_text()
        shown = (about / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
        assert shown == command
        assert (about / "cwd").readlink() == tmp_path
        os.killpg(process.pid, signal.SIGKILL)
        assert process.communicate() == ("", "")
        assert process.returncode == -signal.SIGKILL


def test_a_forked_command_reads_prints_and_ends_as_one_of_its_own() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Usage: python -m splitpoint_cli [OPTIONS]" in done.stdout
    wrong = subprocess.run([*COMMAND, "generate", "--nothing"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--nothing" in wrong.stderr


def test_a_program_of_the_tests_is_forked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb") as ours:
        program = ROOT / "tests" / "cli" / "fake_service.py"
        options = ("--log", log, "--name", "one", "--parent-fd", str(reading))
        with subprocess.Popen(
            [sys.executable, program, *options],
            stdout=subprocess.PIPE,
            pass_fds=[reading],
            env={**os.environ, "OF_THIS_TEST": "1"},
            text=True,
        ) as process:
            assert is_forked(process.pid)
            assert process.stdout is not None
            assert process.stdout.readline() == "READY unix:/fake/one\n"
            ours.close()
            assert process.wait(60) == 0
    assert log.read_text() == f"start one {process.pid}\nstop one {process.pid}\n"


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (("-W", "error"), {}),
        ((), {"OMP_NUM_THREADS": "2"}),
        ((), {"PYTHONPATH": "/nowhere"}),
        ((), {"PYTHONHASHSEED": "1"}),
    ],
)
def test_what_changes_imports_starts_a_new_interpreter(
    options: tuple[str, ...], more: dict[str, str]
) -> None:
    command = [sys.executable, *options, *COMMAND[1:], "generate", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OF_THIS_TEST": "1", **more}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        assert not is_forked(process.pid)
        process.kill()
