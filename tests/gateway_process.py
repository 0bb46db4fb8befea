"""`python -m gateway_service` as a child process: started, read until it is ready, ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from splitpoint.service import READY_PREFIX
from splitpoint_cli.stack.child import child_environment

_STOP_SECONDS = 30.0


@contextmanager
def gateway_process(scheduler: str, *options: str) -> Iterator[str]:
    """Yield the host:port of a gateway in front of these schedulers; its log goes to stderr."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gateway_service", "--listen", "127.0.0.1:0"),
            *("--scheduler", scheduler, *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment({}),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY_PREFIX), f"the gateway is not ready: {line!r}"
        yield line.removeprefix(READY_PREFIX).strip()
        process.terminate()
        assert process.wait(_STOP_SECONDS) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
