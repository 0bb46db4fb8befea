"""Runs a planned stack: starts it in order, keeps it alive, stops it, and removes its files."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from splitpoint import config
from splitpoint.client import AsyncClient
from splitpoint.errors import Cancelled
from splitpoint.transport.tls import trusting_own_server
from splitpoint_cli.files import share_secret
from splitpoint_cli.spool import spooled_output
from splitpoint_cli.stack.child import (
    LogLine,
    Service,
    ServiceExited,
    ServiceNotReady,
    ServiceNotStarted,
)
from splitpoint_cli.stack.instance import Held, exclusive, predecessors_gone
from splitpoint_cli.stack.keeper import Keeper, RestartLimits
from splitpoint_cli.stack.notes import GatewayNote, forget_notes, write_gateway, write_given_up
from splitpoint_cli.stack.output import end_of, output_of, print_summary
from splitpoint_cli.stack.plan import Stack
from splitpoint_cli.stack.preflight import check_machine, check_secret
from splitpoint_cli.stack.supervisor import Supervisor

_SERVE_SECONDS = 60.0
# A service that takes longer to start is asked for its last line, again and again.
_SLOW_SECONDS = 3.0


class StackRunner:
    """A planned stack, from its start until its files are removed."""

    def __init__(self, stack: Stack, *, verbose: bool = False, quiet: bool = False) -> None:
        self._stack = stack
        self.output = output_of(stack.log_format, verbose=verbose, quiet=quiet)
        # Where the schedulers listen, once they do.
        self.addresses = stack.listens
        # Where the gateway listens, once it does; None: there is none.
        self.http = stack.http
        # An arena that an earlier run kept is ours once our store has opened it.
        self._arena_is_ours = False
        self._held: Held | None = None

    @asynccontextmanager
    async def running(self, stop: asyncio.Event) -> AsyncIterator[Supervisor]:
        """Yield the supervised stack once it serves; stop it at the end of the block.

        If `stop` is set again while the stack stops, every process is killed.
        Raises Cancelled if `stop` is set before the stack serves, FailedPrecondition if the
        instance is not free, the errors of `check_machine`, and ServiceNotStarted,
        ServiceExited or ServiceNotReady if a service fails to start for the first time.
        """
        runtime, instance = self._stack.runtime, self._stack.instance
        with spooled_output(), exclusive(runtime, instance) as held:
            # Before there are files of this stack to clean up.
            await predecessors_gone(
                held.services, runtime, instance, stop=stop, say=self.output.progress
            )
            forget_notes(runtime)
            self._held = held
            self._arena_is_ours = not self._stack.arena.exists()
            try:
                check_machine(self._stack, self.output.event)
                async with Supervisor(
                    sys.executable, self.output.line, [held.services]
                ) as supervisor:
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
            if supervisor.is_hurried:
                self.output.progress(self._remains())

    async def keep(
        self, supervisor: Supervisor, stop: asyncio.Event, limits: RestartLimits | None
    ) -> None:
        """Start dead services again until `stop` is set.

        Raises ServiceExited if a service is given up that the stack needs. No service starts
        after the return.
        """
        stack = self._stack
        names = [worker.name for worker in stack.workers]
        keeper = Keeper(
            supervisor,
            limits,
            self.output.event,
            workers=dict(zip(names, stack.worker_addresses, strict=True)),
            schedulers=[scheduler.name for scheduler in stack.schedulers],
            show_tail=self.output.show_tail,
        )
        keeper.on_given_up = lambda: self._note_given_up(keeper)
        keeping = asyncio.create_task(keeper.run())
        tasks: list[asyncio.Task[Any]] = [keeping, asyncio.create_task(stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            deaths = [task.result() for task in done]  # raises what ended one of them
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for death in deaths:
            if isinstance(death, ServiceExited):
                raise death

    def _note_given_up(self, keeper: Keeper) -> None:
        """Write the given-up workers for `status`; the stack goes on if that fails."""
        try:
            write_given_up(self._stack.runtime, keeper.given_up())
        except OSError as error:
            self.output.event("up", f"the list of given-up workers cannot be written: {error}")

    def _note_gateway(self) -> None:
        """Write where the gateway is for `status`; the stack goes on if that fails."""
        stack = self._stack
        if stack.gateway is None or self.http is None:
            return
        scheme = "https" if stack.identity.serves_tls else "http"
        url = f"{scheme}://{config.reachable_address(self.http)}"
        try:
            write_gateway(
                stack.runtime,
                GatewayNote(url, stack.identity.certificate.decode("ascii", "ignore")),
            )
        except OSError as error:
            self.output.event("up", f"the note of the gateway cannot be written: {error}")

    async def _start_unless(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        starting = asyncio.create_task(self._start(supervisor))
        death = asyncio.create_task(supervisor.next_exit())
        stopped = asyncio.create_task(stop.wait())
        tasks = (starting, death, stopped)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            has_died, has_started = death.done(), starting.done()
        finally:
            # However the wait ended, no further process starts.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if has_died:
            raise death.result().death()
        if not has_started:
            raise Cancelled("stopped while starting")
        starting.result()  # raises its error, if any

    async def _start(self, supervisor: Supervisor) -> None:
        stack = self._stack
        began = time.monotonic()
        check_secret(stack, self.output.event)
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
        # Before a scheduler answers: `status --wait` waits for the gateway, too.
        self._note_gateway()
        addresses = []
        share_secret(stack.key, stack.other_keys)  # one that is there is used
        for command in stack.schedulers:
            # One after the other: the first makes the key that all of them read.
            scheduler = await supervisor.start(command)
            addresses.append(await self._await_ready(scheduler, "connecting"))
        for other in share_secret(stack.key, stack.other_keys):
            self.output.event(
                "up",
                f"{other} has another secret than {stack.key}: the kept arena is of no use",
            )
        self.addresses = tuple(addresses)
        if self._held is not None:
            self._held.listens_at(",".join(self.addresses))
        identity = trusting_own_server(stack.identity)
        for address in map(config.reachable_address, self.addresses):
            async with AsyncClient(address, identity=identity) as client:
                await client.wait_ready(_SERVE_SECONDS)
        if stack.gateway is not None:
            reachable = [config.reachable_address(address) for address in self.addresses]
            if stack.api_key is not None:
                stack.api_key.write()
            gateway = await supervisor.start(stack.gateway.asking(reachable))
            self.http = await self._await_ready(gateway, "connecting")
            self._note_gateway()
        self.output.progress(f"all ready after {time.monotonic() - began:.1f} s")

    async def _await_ready(self, service: Service, doing: str) -> str:
        began = time.monotonic()
        self.output.progress(f"{doing} ...", service.name)
        telling = asyncio.create_task(self._tell_what_takes_long(service))
        try:
            address = await service.ready()
        finally:
            telling.cancel()
        self.output.progress(f"ready after {time.monotonic() - began:.1f} s", service.name)
        return address

    async def _tell_what_takes_long(self, service: Service) -> None:
        """Show the last line of a service now and then; kernels that are compiled, for one."""
        told: LogLine | None = None
        while True:
            await asyncio.sleep(_SLOW_SECONDS)
            if service.tail and service.tail[-1] is not told:
                told = service.tail[-1]
                self.output.slow(told)

    def _remains(self) -> str:
        """Return what a stack leaves whose services were killed."""
        arena = self._stack.arena
        text = f"killed: requests that still ran are lost; removed {self._stack.runtime}"
        if arena.exists():
            return f"{text}; the arena is kept at {arena}"
        return f"{text} and {arena.parent}: nothing is left"

    def _clean_up(self) -> None:
        """Remove sockets and shared memory, in whatever state the services left them."""
        config.remove_tree(self._stack.runtime)
        if self._arena_is_ours and not self._stack.keep_arena:
            config.remove_tree(self._stack.arena.parent)


async def _hurry_when(stop: asyncio.Event, supervisor: Supervisor) -> None:
    await stop.wait()
    supervisor.hurry()


async def run_stack(stack: Stack, *, verbose: bool, limits: RestartLimits | None) -> int:
    """Run a stack until a signal, or until a needed service is given up; return the exit code.

    With `limits` None the first death of a service ends the stack. Output without a
    reader is dropped and stops neither supervision nor the end.
    """
    with spooled_output():
        return await _run_stack(stack, verbose=verbose, limits=limits)


async def _run_stack(stack: Stack, *, verbose: bool, limits: RestartLimits | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    runner = StackRunner(stack, verbose=verbose)
    try:
        async with runner.running(stop) as supervisor:
            print_summary(stack, runner.addresses, runner.http)
            await runner.keep(supervisor, stop, limits)
            runner.output.progress("stopping (once more to stop at once) ...")
    except Cancelled:
        return 130
    except (ServiceExited, ServiceNotReady, ServiceNotStarted) as error:
        runner.output.failure(error)
        return end_of(error)
    return 0
