"""Runs a planned stack: started in order, kept alive, stopped, and every trace taken away."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from splitpoint import config
from splitpoint.client import AsyncClient
from splitpoint.errors import Cancelled
from splitpoint.tls import trusting_own_server
from splitpoint_cli.child import Service, ServiceExited, ServiceNotReady, ServiceNotStarted
from splitpoint_cli.instance import exclusive, predecessors_gone
from splitpoint_cli.keeper import Keeper
from splitpoint_cli.metrics_ports import check_free
from splitpoint_cli.restart_policy import RestartLimits
from splitpoint_cli.stack import Stack
from splitpoint_cli.stack_output import output_of, print_summary
from splitpoint_cli.supervisor import Supervisor

_SERVE_SECONDS = 60.0


class StackRunner:
    """Starts a planned stack, and takes every trace of it away again."""

    def __init__(self, stack: Stack, *, verbose: bool = False, quiet: bool = False) -> None:
        self._stack = stack
        self.output = output_of(stack.log_format, verbose=verbose, quiet=quiet)
        self.address = stack.listen
        # An arena that an earlier run kept is ours once our own store has served it.
        self._arena_is_ours = False

    @asynccontextmanager
    async def running(self, stop: asyncio.Event) -> AsyncIterator[Supervisor]:
        """The supervised stack, from the moment it serves.

        Raises Cancelled when `stop` is set before that, FailedPrecondition when the
        instance is not free, Unavailable when a port for metrics is taken, ServiceNotStarted,
        ServiceExited or ServiceNotReady when a service fails to start: a wrong argument must
        not be tried for ever. Once the block is left, `stop` being set (again) means: do not
        wait for anything.
        """
        runtime, instance = self._stack.runtime, self._stack.instance
        with exclusive(runtime, instance) as services:
            # Before anything is ours to clean up.
            await predecessors_gone(
                services, runtime, instance, stop=stop, say=self.output.progress
            )
            self._arena_is_ours = not self._stack.arena.exists()
            try:
                check_free(self._stack.metrics)
                async with Supervisor(sys.executable, self.output.line, [services]) as supervisor:
                    try:
                        await self._start_unless(supervisor, stop)
                        yield supervisor
                    finally:
                        stop.clear()
                        impatient = asyncio.create_task(_hurry_when(stop, supervisor))
                        await supervisor.stop()
                        impatient.cancel()
            finally:
                self.output.close()
                self._clean_up()

    async def keep(
        self, supervisor: Supervisor, stop: asyncio.Event, limits: RestartLimits | None
    ) -> None:
        """Start dead services again until `stop` is set. Raises ServiceExited when one is given up.

        Nothing starts any more once this has returned.
        """
        keeping = asyncio.create_task(Keeper(supervisor, limits, self.output.event).run())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((keeping, stopped), return_when=asyncio.FIRST_COMPLETED)
            given_up = keeping.result() if keeping.done() else None
        finally:
            for task in (keeping, stopped):
                task.cancel()
            await asyncio.gather(keeping, stopped, return_exceptions=True)
        if given_up is not None:
            raise given_up

    async def _start_unless(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        starting = asyncio.create_task(self._start(supervisor))
        death = asyncio.create_task(supervisor.next_exit())
        stopped = asyncio.create_task(stop.wait())
        tasks = (starting, death, stopped)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            has_died, has_started = death.done(), starting.done()
        finally:
            # Whatever ended the wait, nothing goes on starting processes.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if has_died:
            raise death.result().death()
        if not has_started:
            raise Cancelled("stopped while starting")
        starting.result()  # its error, if there is one

    async def _start(self, supervisor: Supervisor) -> None:
        stack = self._stack
        began = time.monotonic()
        store = await supervisor.start(stack.store)
        await self._await_ready(store, f"allocating {config.format_size(stack.host_memory_bytes)}")
        self._arena_is_ours = True
        workers = [await supervisor.start(command) for command in stack.workers]
        await asyncio.gather(
            *(
                self._await_ready(worker, f"loading {stack.name} on {device}")
                for worker, device in zip(workers, stack.devices, strict=True)
            )
        )
        scheduler = await supervisor.start(stack.scheduler)
        self.address = await self._await_ready(scheduler, "connecting")
        at, identity = config.reachable_address(self.address), trusting_own_server(stack.identity)
        async with AsyncClient(at, identity=identity) as client:
            await client.wait_ready(_SERVE_SECONDS)
        self.output.progress(f"all ready after {time.monotonic() - began:.1f} s")

    async def _await_ready(self, service: Service, doing: str) -> str:
        began = time.monotonic()
        self.output.progress(f"{doing} ...", service.name)
        address = await service.ready()
        self.output.progress(f"ready after {time.monotonic() - began:.1f} s", service.name)
        return address

    def _clean_up(self) -> None:
        """Sockets and shared memory, whatever state the services left them in."""
        config.remove_tree(self._stack.runtime)
        if self._arena_is_ours and not self._stack.keep_arena:
            config.remove_tree(self._stack.arena.parent)


async def _hurry_when(stop: asyncio.Event, supervisor: Supervisor) -> None:
    await stop.wait()
    supervisor.hurry()


async def run_stack(stack: Stack, *, verbose: bool, limits: RestartLimits | None) -> int:
    """Run a stack until a signal, or until a service is given up; returns the exit code.

    `limits` None: the first death of a service ends everything.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    runner = StackRunner(stack, verbose=verbose)
    try:
        async with runner.running(stop) as supervisor:
            print_summary(stack, runner.address)
            await runner.keep(supervisor, stop, limits)
            runner.output.progress("stopping (once more to stop at once) ...")
    except Cancelled:
        return 130
    except (ServiceExited, ServiceNotReady, ServiceNotStarted) as error:
        runner.output.failure(error)
        return 1
    return 0
