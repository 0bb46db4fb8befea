"""`splitpoint up`: the whole stack on one host, until Ctrl-C."""

from __future__ import annotations

import asyncio
import enum
import fcntl
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated

import typer
from rich.markup import escape

from splitpoint import config
from splitpoint.client import AsyncClient
from splitpoint.errors import Cancelled, FailedPrecondition
from splitpoint.tls import trusting_own_server
from splitpoint_cli.output import err, out, print_error
from splitpoint_cli.stack import Stack, StackOptions, plan_stack
from splitpoint_cli.supervisor import (
    LogLine,
    Service,
    ServiceExited,
    ServiceNotReady,
    Supervisor,
)

_COLOURS = {"store": "cyan", "worker": "green", "scheduler": "magenta"}
_SERVE_SECONDS = 60.0


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ResidencyChoice(enum.StrEnum):
    AUTO = "auto"
    RESIDENT = "resident"
    STREAMED = "streamed"


class Activations(enum.StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class StackRunner:
    """Starts a planned stack, and takes every trace of it away again."""

    def __init__(self, stack: Stack, *, verbose: bool = False, quiet: bool = False) -> None:
        self._stack = stack
        self._verbose = verbose
        self._quiet = quiet
        self.address = stack.listen

    @asynccontextmanager
    async def running(self, stop: asyncio.Event) -> AsyncIterator[Supervisor]:
        """The supervised stack, from the moment it serves.

        Raises Cancelled when `stop` is set before that, ServiceExited or
        ServiceNotReady when a service fails to start. Once the block is left,
        `stop` being set (again) means: do not wait for anything.
        """
        with exclusive(self._stack):
            try:
                async with Supervisor(sys.executable, self._show) as supervisor:
                    try:
                        await self._start_unless(supervisor, stop)
                        yield supervisor
                    finally:
                        stop.clear()
                        impatient = asyncio.create_task(_hurry_when(stop, supervisor))
                        await supervisor.stop()
                        impatient.cancel()
            finally:
                self._clean_up()

    async def _start_unless(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        starting = asyncio.create_task(self._start(supervisor))
        death = asyncio.create_task(supervisor.first_exit())
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
            raise death.result()
        if not has_started:
            raise Cancelled("stopped while starting")
        starting.result()  # its error, if there is one

    async def _start(self, supervisor: Supervisor) -> None:
        stack = self._stack
        began = time.monotonic()
        store = await supervisor.start(stack.store)
        await self._await_ready(
            supervisor, store, f"allocating {config.format_size(stack.host_memory_bytes)}"
        )
        workers = [await supervisor.start(command) for command in stack.workers]
        await asyncio.gather(
            *(
                self._await_ready(supervisor, worker, f"loading {stack.name} on {device}")
                for worker, device in zip(workers, stack.devices, strict=True)
            )
        )
        scheduler = await supervisor.start(stack.scheduler)
        self.address = await self._await_ready(supervisor, scheduler, "connecting")
        at, identity = config.reachable_address(self.address), trusting_own_server(stack.identity)
        async with AsyncClient(at, identity=identity) as client:
            await client.wait_ready(_SERVE_SECONDS)
        self._say(f"[dim]all ready after {time.monotonic() - began:.1f} s[/dim]")

    async def _await_ready(self, supervisor: Supervisor, service: Service, doing: str) -> str:
        began = time.monotonic()
        self._say(f"{_prefix(service.name)} {escape(doing)} ...")
        address = await supervisor.ready(service)
        self._say(f"{_prefix(service.name)} ready after {time.monotonic() - began:.1f} s")
        return address

    def _show(self, line: LogLine) -> None:
        if line.important or self._verbose:
            err.print(f"{_prefix(line.service)} {escape(line.text)}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            err.print(text)

    def _clean_up(self) -> None:
        """Sockets and shared memory, whatever state the services left them in."""
        config.remove_tree(self._stack.runtime)
        if not self._stack.keep_arena:
            config.remove_tree(self._stack.arena.parent)


@contextmanager
def exclusive(stack: Stack) -> Iterator[None]:
    """Hold the instance's lock. Raises FailedPrecondition when another `up` has it.

    Sockets that a killed predecessor left behind are removed.
    """
    config.make_private(stack.runtime)
    lock = os.open(stack.runtime / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(
                f"a stack named {stack.instance} is already running "
                "(choose another --listen port or --instance)"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())  # for `splitpoint down`
        for stale in stack.runtime.glob("*.sock"):
            stale.unlink()
        yield
    finally:
        os.close(lock)


async def _hurry_when(stop: asyncio.Event, supervisor: Supervisor) -> None:
    await stop.wait()
    supervisor.hurry()


def _prefix(service: str) -> str:
    colour = _COLOURS.get(service.split()[0], "white")
    return f"[{colour}]{service:>9}[/{colour}] │"


async def run(stack: Stack, *, verbose: bool) -> int:
    """Run a stack until a signal or a death; returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    runner = StackRunner(stack, verbose=verbose)
    try:
        async with runner.running(stop) as supervisor:
            _print_summary(stack, runner.address)
            death = asyncio.create_task(supervisor.first_exit())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((death, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if death.done():
                raise death.result()
            death.cancel()
            err.print("stopping (once more to stop at once) ...")
    except Cancelled:
        return 130
    except (ServiceExited, ServiceNotReady) as error:
        if error.tail and not verbose:
            err.print(f"last lines of {error.service}:")
            for line in error.tail:
                err.print(f"{_prefix(error.service)} {escape(line)}")
        print_error(error)
        return 1
    return 0


def _print_summary(stack: Stack, address: str) -> None:
    shape = stack.shape
    kept = " (kept on exit)" if stack.keep_arena else ""
    memory = config.format_size(stack.host_memory_bytes)
    out.print(f"Splitpoint serves {escape(stack.name)} ({shape.data_type.value}):")
    out.print(f"  scheduler  {address}")
    for i, (device, worker) in enumerate(zip(stack.devices, stack.worker_addresses, strict=True)):
        out.print(f"  worker {i}   {worker} on {device}")
    out.print(f"  store      {stack.store_address}")
    out.print(f"  arena      {stack.arena}, {memory}{kept}")
    address = config.reachable_address(address)
    where = "" if address == config.DEFAULT_ADDRESS else f" --address {address}"
    out.print("Try:")
    if stack.identity.serves_tls or stack.has_tokens:
        out.print("  export SPLITPOINT_TOKEN_FILE=... SPLITPOINT_CA=...  (docs/security.md)")
    out.print(f'  splitpoint generate "def fibonacci(n):" --max-tokens 48{where}')
    out.print("Ctrl-C stops everything.")
    out.file.flush()


def up(
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder, or a name on the Hugging Face hub (owner/name[@revision]); "
            "absent: the bundled model.",
            metavar="DIR|NAME",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Workers to start; absent: one per GPU, or one on the CPU.", min=1),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cuda spreads workers over the GPUs in turn.")
    ] = Device.AUTO,
    dtype: Annotated[
        Dtype, typer.Option(help="Element type of weights and cache; auto: the checkpoint's.")
    ] = Dtype.AUTO,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Budget of each worker for weights and caches; absent: the worker decides.",
            metavar="SIZE",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Size of the store's arena; absent: a quarter of the available memory, "
            "at most 8 GiB and half of what /dev/shm has free.",
            metavar="SIZE",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens per chunk of the store.", min=1, max=4096)
    ] = 64,
    listen: Annotated[
        str,
        typer.Option(
            help="Where clients connect: loopback or unix:/path; any interface with TLS and tokens."
        ),
    ] = config.DEFAULT_ADDRESS,
    residency: Annotated[
        ResidencyChoice,
        typer.Option(help="For requests that do not say; auto: resident when it fits."),
    ] = ResidencyChoice.AUTO,
    activations: Annotated[
        Activations,
        typer.Option(help="Whether the store keeps layer inputs; auto: when they can pay."),
    ] = Activations.AUTO,
    keep_arena: Annotated[
        bool, typer.Option("--keep-arena", help="Leave the shared-memory file on exit.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads per worker; absent: cores / CPU workers.", min=1),
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Most prompt tokens in one engine step.", min=1)
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most requests in one engine step.", min=1)
    ] = None,
    grace: Annotated[
        float,
        typer.Option(help="Seconds that running requests may go on after Ctrl-C.", min=0),
    ] = 30.0,
    queue_capacity: Annotated[
        int | None, typer.Option(help="Most requests that may wait.", min=1)
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(help="Name of this stack's sockets and arena; absent: from the port."),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(help="Certificate chain (PEM) of the scheduler; serve TLS.", metavar="PATH"),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(help="Its private key, mode 0600.", metavar="PATH")
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(help="Demand a certificate of this authority from clients.", metavar="PATH"),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Who may call (see `splitpoint token`), mode 0600.", metavar="FILE"),
    ] = None,
    tenant_requests: Annotated[
        int | None, typer.Option(help="Most requests of one tenant that may run or wait.", min=1)
    ] = None,
    reflection: Annotated[
        bool, typer.Option("--reflection", help="Serve gRPC reflection (for grpcurl).")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every log line, not only warnings.")
    ] = False,
) -> None:
    """Start store, workers and scheduler on this host; Ctrl-C stops them.

    Running requests may finish first, for --grace seconds; a second Ctrl-C ends
    everything at once.
    Nothing is left behind: no process, no socket, no shared memory. When a
    service dies, its last lines are shown and everything stops with exit
    code 1.
    """
    options = StackOptions(
        model=model,
        workers=workers,
        device=device.value,
        dtype=dtype.value,
        device_memory=device_memory,
        host_memory=host_memory,
        chunk_tokens=chunk_tokens,
        listen=listen,
        residency=residency.value,
        activations=activations.value,
        keep_arena=keep_arena,
        threads=threads,
        prefill_chunk=prefill_chunk,
        max_batch=max_batch,
        queue_capacity=queue_capacity,
        grace_seconds=grace,
        reflection=reflection,
        instance=instance,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        tokens=tokens,
        tenant_requests=tenant_requests,
    )
    raise typer.Exit(asyncio.run(run(plan_stack(options), verbose=verbose)))
