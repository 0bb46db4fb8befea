"""Forked services are what `python -m` would start: their environment, and their end."""

from __future__ import annotations

import json
import os
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
    assert all(other == first for other in others)
    assert bool(first) == ("kvstore_service" not in family)
