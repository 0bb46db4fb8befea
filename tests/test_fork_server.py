"""Forked programs are what `python -m` would start: their environment, streams and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
    parent = Parent(["first", "second"])
    try:
        log = tmp_path / "log"
        child = parent.fork("second", (), log, errors=log)
        child.wait_ended()
        assert parent.code_of(child.process_id) == 3
        child.close()
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
    # What `splitpoint` itself uses is not told to it by variables.
    assert all(other == first for other in others) or family[1:] == ("splitpoint_cli",)
    assert bool(first) == ("kvstore_service" not in family)


# -- what tests start by `python -m` ------------------------------------------------------------

COMMAND = (sys.executable, "-m", "splitpoint_cli")


def is_forked(process_id: int) -> bool:
    """Whether it has the libraries of a worker, which `splitpoint` itself never loads."""
    return "libtorch" in Path(f"/proc/{process_id}/maps").read_text()


def test_a_command_is_forked_as_a_child_of_its_own(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody"
    command = [*COMMAND, "generate", "--address", address, "--retry-seconds", "60", "-"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        assert not is_forked(process.pid)
        process.kill()
