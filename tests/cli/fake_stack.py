"""`splitpoint up` with fake services: python fake_stack.py INSTANCE LOG STORE WORKER SCHEDULER

The last three name behaviours of fake_service.py. Everything but the services
is the real command: planning, locks, signals, clean-up, exit code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

from splitpoint_cli.stack import StackOptions, plan_stack
from splitpoint_cli.supervisor import ServiceCommand
from splitpoint_cli.up import run

FAKE = str(Path(__file__).parent / "fake_service.py")


def main(instance: str, log: str, store: str, worker: str, scheduler: str) -> int:
    options = StackOptions(
        instance=instance, workers=2, device="cpu", host_memory="1MiB", listen="127.0.0.1:0"
    )
    stack = plan_stack(options)
    stack.arena.parent.mkdir(mode=0o700, exist_ok=True)
    stack.arena.touch()  # as a store would

    def fake(name: str, behave: str, *more: str) -> ServiceCommand:
        arguments = (FAKE, "--name", name.replace(" ", "-"), "--behave", behave, "--log", log)
        return ServiceCommand(name, (*arguments, *more), stop_seconds=120)

    stack = dataclasses.replace(
        stack,
        store=fake("store", store),
        workers=tuple(fake(f"worker {i}", worker) for i in range(2)),
        scheduler=fake("scheduler", scheduler, "--health", f"unix:{stack.runtime}/public.sock"),
    )
    return asyncio.run(run(stack, verbose=False))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
