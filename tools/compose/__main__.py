"""Tries docker-compose.yml for real: builds, starts, asks, kills, looks, and takes it all down.

    python -m tools.compose [--only node|cluster] [--no-build] [--keep]     (or: make compose-test)

Needs a Docker engine, Compose (v2, or v1.29 as docker-compose), and this project
installed for the Python it runs with. Project names, ports and volumes of its own keep
it away from a stack that runs already. Exit code 0: everything was as it should be.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tools.compose import cluster, node
from tools.compose.stack import (
    HEALTHY_SECONDS,
    Failed,
    Said,
    Stack,
    compose_command,
    free_port,
    until,
)

PARTS = {"node": node, "cluster": cluster}
PUBLISHED = (
    "SPLITPOINT_PUBLISH",
    "SPLITPOINT_HTTP_PUBLISH",
    "PROMETHEUS_PUBLISH",
    "GRAFANA_PUBLISH",
)


def try_out(name: str, options: argparse.Namespace, said: Said) -> Failed | None:
    """Build, start, check and take down the stack of a part. Return what was wrong."""
    part = PARTS[name]
    os.environ.update(part.ENVIRONMENT)
    stack = Stack(part.PROFILES, part.services(said))
    said(f"{name}: {' '.join(compose_command())}, project {stack.name}")
    failure: Failed | None = None
    with tempfile.TemporaryDirectory() as folder:
        access = Path(folder)
        access.chmod(0o700)
        try:
            if not options.no_build:
                stack.compose("build", *part.BUILT)
                said("images built")
            began = time.monotonic()
            stack.compose("up", "-d", *stack.services)
            # Some storage drivers copy a whole image for each container that is made.
            said(f"containers made and started in {time.monotonic() - began:.1f} s")
            until(stack.unhealthy, HEALTHY_SECONDS)
            healthy = time.monotonic() - began
            said(f"all {len(stack.services)} healthy {healthy:.1f} s after `up`")
            part.check(stack, access, said)
        except (Failed, OSError) as error:
            failure = error if isinstance(error, Failed) else Failed(str(error))
            said(f"FAILED: {failure}")
            show(stack)
        if failure is None or not options.keep:
            failure = take_down(stack, said) or failure
    return failure


def show(stack: Stack) -> None:
    """Print the containers and the last lines of their logs."""
    try:
        print(stack.compose("ps"), stack.compose("logs", "--no-color", "--tail", "40"), sep="\n")
    except Failed as error:
        print(error)


def take_down(stack: Stack, said: Said) -> Failed | None:
    """Stop and remove everything. Return what is left."""
    try:
        stack.compose("down", "-v", "--timeout", "45")
    except Failed as error:
        said(f"down FAILED: {error}")
    left = stack.left_overs()
    said(f"down: LEFT BEHIND {left}" if left else "down: nothing is left")
    return Failed("something is left behind") if left else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compose",
        description="Try docker-compose.yml for real: build, start, ask, kill, take down.",
    )
    parser.add_argument("--only", choices=PARTS, help="try this part; absent: all of them")
    parser.add_argument("--no-build", action="store_true", help="use the images that are there")
    parser.add_argument("--keep", action="store_true", help="leave the stack of a failure running")
    options = parser.parse_args()
    start = time.monotonic()

    def said(text: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {text}", flush=True)

    os.environ.update({name: f"127.0.0.1:{free_port()}" for name in PUBLISHED})
    # Seconds of v1 for each call: a storage driver that copies whole images can take minutes.
    os.environ.setdefault("COMPOSE_HTTP_TIMEOUT", "600")
    for name in [options.only] if options.only else list(PARTS):
        if try_out(name, options, said) is not None:
            said("failed")
            return 1
    said("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
