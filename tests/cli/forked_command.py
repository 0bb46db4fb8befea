"""`splitpoint` commands that start in a few hundredths of a second, so that a file can run many.

A process of its own imports the commands once and then forks: each child runs `main` as
`python -m splitpoint_cli` would, with its own process id, arguments, standard streams and end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitpoint_cli.stack.child import child_environment

SECONDS = 60.0


class ForkedCommands:
    """Runs commands one after the other."""

    def __init__(self, parent: subprocess.Popen[str], folder: Path) -> None:
        self._parent, self._folder = parent, folder

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run `splitpoint ARGUMENTS` to its end; return its exit code and what it printed."""
        files = [self._folder / name for name in ("stdin", "stdout", "stderr")]
        for file in files:
            file.write_text(stdin if file is files[0] else "")
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        order = {"arguments": arguments, "files": [*map(str, files)]}
        print(json.dumps(order), file=self._parent.stdin, flush=True)
        line = self._parent.stdout.readline()
        assert line, "the process that forks has ended"
        stdout, stderr = (file.read_text() for file in files[1:])
        return subprocess.CompletedProcess(arguments, json.loads(line), stdout, stderr)


@contextmanager
def forked_commands() -> Iterator[ForkedCommands]:
    """Start the process that forks; end it, and with it a command that did not end."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment({}),
        ) as parent,
    ):
        yield ForkedCommands(parent, Path(folder))


# -- the process that forks -------------------------------------------------------------------


def main() -> None:
    import importlib

    from splitpoint_cli.main import COMMANDS
    from splitpoint_cli.main import main as run_command

    for place in COMMANDS.values():
        importlib.import_module(place.partition(":")[0])
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            _become(order)
            run_command()
            return
        print(_exit_code(child), flush=True)


def _become(order: dict[str, list[str]]) -> None:
    """Give this process the standard streams and arguments of a command."""
    for descriptor, path in enumerate(order["files"]):
        file = os.open(path, os.O_WRONLY if descriptor else os.O_RDONLY)
        os.dup2(file, descriptor)
        os.close(file)
    # The parent may have read ahead.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = ["splitpoint", *order["arguments"]]


def _exit_code(child: int) -> int:
    """Wait for the end of a command, and end it if it takes too long."""
    descriptor = os.pidfd_open(child)
    if not select.select([descriptor], [], [], SECONDS)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
