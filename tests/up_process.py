"""`splitpoint up` as a child process: started, read until it is up, never left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from splitpoint_cli.stack.child import child_environment


@contextmanager
def up_process(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start `up`; `environment` is added to that of this process."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(environment or {}),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until_up(process: subprocess.Popen[str]) -> str:
    """Everything printed on stdout up to the last line of the summary."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("Ctrl-C"):
            return printed
    assert process.stderr is not None
    raise AssertionError(f"up ended early:\n{printed}{process.stderr.read()}")
