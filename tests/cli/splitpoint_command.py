"""A `splitpoint` command as a process of its own, run to its end."""

from __future__ import annotations

import subprocess
import sys

from splitpoint_cli.stack.child import child_environment

SECONDS = 120.0


def splitpoint(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `splitpoint ARGUMENTS`; return its exit code and what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=child_environment({}),
        check=False,
    )
