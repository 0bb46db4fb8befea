"""`splitpoint up` with fakes:

    fake_stack.py INSTANCE LOG STORE WORKER SCHEDULER PAUSE [METRICS [LOG_FORMAT [RETRY]]]

STORE, WORKER and SCHEDULER name behaviours of fake_service.py; PAUSE is the
first pause before a restart in seconds, or "never"; METRICS is the port of
`--metrics` or "", LOG_FORMAT text or json, RETRY the first pause after a worker was
given up. Everything but the services is the real
command: planning, locks, signals, restarts, clean-up, exit code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

from splitpoint.observe.logs import LogFormat
from splitpoint_cli.stack.child import ServiceCommand
from splitpoint_cli.stack.keeper import RestartLimits
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from splitpoint_cli.stack.runner import run_stack

FAKE = str(Path(__file__).parent / "fake_service.py")


def main(
    instance: str,
    log: str,
    store: str,
    worker: str,
    scheduler: str,
    pause: str,
    metrics: str = "",
    log_format: str = "text",
    retry: str = "300",
) -> int:
    options = StackOptions(
        instance=instance,
        workers=2,
        device="cpu",
        host_memory="1MiB",
        listen="127.0.0.1:0",
        metrics=int(metrics) if metrics else None,
        log_format=LogFormat(log_format),
    )
    stack = plan_stack(options)
    if store != "crash":
        stack.arena.parent.mkdir(mode=0o700, exist_ok=True)
        stack.arena.touch()  # as a store would

    def fake(name: str, behave: str, *more: str) -> ServiceCommand:
        arguments = (FAKE, "--name", name.replace(" ", "-"), "--behave", behave, "--log", log)
        socket = stack.runtime / f"{name.replace(' ', '-')}.sock"
        return ServiceCommand(
            name, (*arguments, "--socket", str(socket), *more), stop_seconds=120, socket=socket
        )

    stack = dataclasses.replace(
        stack,
        worker_addresses=tuple(f"unix:{stack.runtime}/worker-{i}.sock" for i in range(2)),
        store=fake("store", store),
        workers=tuple(fake(f"worker {i}", worker) for i in range(2)),
        schedulers=(fake("scheduler", scheduler, "--health", f"unix:{stack.runtime}/public.sock"),),
    )
    limits = (
        RestartLimits(first_delay_seconds=float(pause), first_retry_seconds=float(retry))
        if pause != "never"
        else None
    )
    return asyncio.run(run_stack(stack, verbose=False, limits=limits))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
