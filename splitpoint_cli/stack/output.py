"""The output of `splitpoint up`: lines of services, events, the summary, progress bars below them.

Text lines begin with the name of their service. With JSON every line of stderr is one object:
records of services unchanged, other lines of services (a crash of the interpreter, a library's
print) wrapped into a record, and messages of `up` as service "up".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from splitpoint import config
from splitpoint.config import counted
from splitpoint.errors import SplitpointError
from splitpoint.observe.logs import LogFormat, json_line, level_of, message_of
from splitpoint.progress import Progress
from splitpoint_cli.output import code_name, err, out, print_error
from splitpoint_cli.stack.child import LogLine, ServiceExited, ServiceNotReady, ServiceNotStarted
from splitpoint_cli.stack.plan import Stack


class LoadingBars:
    """Bars on a terminal, shown while a service loads. Call `close` at the end."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description:>18}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, service: str, progress: Progress) -> None:
        if progress.is_complete:
            self.remove(service)
            return
        if service not in self._tasks:
            self._bars.start()  # without effect on bars that are shown already
            what = f"{service} {progress.what}"
            self._tasks[service] = self._bars.add_task(what, total=progress.total_bytes)
        self._bars.update(
            self._tasks[service], total=progress.total_bytes, completed=progress.done_bytes
        )

    def remove(self, service: str) -> None:
        task = self._tasks.pop(service, None)
        if task is not None:
            self._bars.remove_task(task)
        if not self._tasks:
            self.close()

    def close(self) -> None:
        self._bars.stop()


_COLOURS = {"store": "cyan", "worker": "green", "scheduler": "magenta", "gateway": "blue"}
# Interval of a service's progress lines where there are no bars.
_PROGRESS_SECONDS = 2.0

StartFailure = ServiceExited | ServiceNotReady | ServiceNotStarted


def cause_of(error: StartFailure) -> SplitpointError:
    """Return the error that the service reported, else how it ended."""
    said = error.failure if isinstance(error, ServiceExited) else None
    return said or error


def end_of(error: StartFailure) -> int:
    """Return the exit code: the service's own if it reported an error, else that of `error`."""
    if isinstance(error, ServiceExited) and error.failure is not None and error.status > 0:
        return error.status
    return error.exit_code


class Output(Protocol):
    """Messages about a stack on stderr."""

    def line(self, line: LogLine) -> None:
        """Show a line that a service wrote."""

    def event(self, service: str, text: str) -> None:
        """Show a warning about a service."""

    def progress(self, text: str, service: str = "") -> None:
        """Show progress that needs no attention."""

    def slow(self, line: LogLine) -> None:
        """Show the last line of a service that takes long to start, unless it was shown before."""

    def show_tail(self, error: StartFailure) -> None:
        """Show the service's last lines, except those shown when written."""

    def failure(self, error: StartFailure) -> None:
        """Show the service's last lines as above, then the error."""

    def close(self) -> None:
        """Restore the terminal."""


def output_of(log_format: LogFormat, *, verbose: bool = False, quiet: bool = False) -> Output:
    """Return the output in this format.

    `verbose` shows every line of a service, not only warnings; `quiet` hides progress only.
    """
    if log_format is LogFormat.JSON:
        return JsonOutput(verbose=verbose, quiet=quiet)
    return StackOutput(verbose=verbose, quiet=quiet)


class StackOutput:
    """Output as text."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self._verbose = verbose
        self._quiet = quiet
        self._bars = LoadingBars(err) if err.is_terminal else None
        self._pace = _Pace()

    def line(self, line: LogLine) -> None:
        if line.progress is not None:
            self._loading(line.service, line.progress)
        elif _is_shown(line, self._verbose):
            self._print(line.service, line.text)

    def event(self, service: str, text: str) -> None:
        if self._bars is not None:
            self._bars.remove(service)  # it no longer loads
        self._print(service, text)

    def progress(self, text: str, service: str = "") -> None:
        if self._quiet:
            return
        if service:
            self._print(service, text)
        else:
            err.print(f"[dim]{text}[/dim]")

    def slow(self, line: LogLine) -> None:
        if not _is_shown(line, self._verbose):
            self.progress(f"{message_of(line.text)} ...", line.service)

    def failure(self, error: StartFailure) -> None:
        self.close()
        self.show_tail(error)
        print_error(cause_of(error))

    def show_tail(self, error: StartFailure) -> None:
        unseen = [line for line in error.tail if not _is_shown(line, self._verbose)]
        if unseen:
            err.print(f"last lines of {error.service}, in addition to its warnings above:")
            for line in unseen:
                self._print(line.service, line.text)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.close()

    def _loading(self, service: str, progress: Progress) -> None:
        if self._quiet:
            return
        if self._bars is not None:
            self._bars.show(service, progress)
        elif self._pace.is_due(service, progress):
            self._print(service, progress_text(progress))

    def _print(self, service: str, text: str) -> None:
        err.print(f"{_prefix(service)} {escape(text)}")


class JsonOutput:
    """Output as JSON: one object a line, as `splitpoint.observe.logs` writes them."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self._verbose = verbose
        self._quiet = quiet
        self._pace = _Pace()

    def line(self, line: LogLine) -> None:
        if line.progress is not None:
            if self._pace.is_due(line.service, line.progress):
                self.progress(progress_text(line.progress), line.service)
        elif _is_shown(line, self._verbose):
            self._write(as_record(line))

    def event(self, service: str, text: str) -> None:
        self._say("WARNING", f"{service}: {text}")

    def progress(self, text: str, service: str = "") -> None:
        if not self._quiet:
            self._say("INFO", f"{service}: {text}" if service else text)

    def slow(self, line: LogLine) -> None:
        if not _is_shown(line, self._verbose):
            self.progress(message_of(line.text), line.service)

    def show_tail(self, error: StartFailure) -> None:
        for line in error.tail:
            if not _is_shown(line, self._verbose):
                self._write(as_record(line))

    def failure(self, error: StartFailure) -> None:
        self.show_tail(error)
        cause = cause_of(error)
        self._say("ERROR", f"{code_name(cause)}: {cause.message}")

    def close(self) -> None:
        """Do nothing: there is no terminal to restore."""

    def _say(self, level: str, text: str) -> None:
        self._write(json_line("up", level, text, logger="splitpoint_cli"))

    def _write(self, text: str) -> None:
        # Not through a console, which would wrap and colour it.
        print(text, file=sys.stderr, flush=True)


class _Pace:
    """A rate limit for progress lines; the last line of a service always passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def is_due(self, service: str, progress: Progress) -> bool:
        now = self._clock()
        last = self._last.get(service)
        if last is not None and now - last < _PROGRESS_SECONDS and not progress.is_complete:
            return False
        self._last[service] = now
        return True


def progress_text(progress: Progress) -> str:
    """Return a text such as "loading: 1.5 GiB of 15 GiB (10%)"."""
    done, total = (config.format_size(n) for n in (progress.done_bytes, progress.total_bytes))
    share = progress.done_bytes / max(1, progress.total_bytes)
    return f"{progress.what}: {done} of {total} ({share:.0%})"


def as_record(line: LogLine) -> str:
    """Return a child's line if it is a JSON record, else a record that contains it."""
    if line.text.startswith("{") and level_of(line.text) is not None:
        return line.text
    return json_line(line.service, "WARNING", line.text, logger="output")


def _is_shown(line: LogLine, verbose: bool) -> bool:
    return line.important or verbose


def _prefix(service: str) -> str:
    colour = _COLOURS.get(service.split()[0], "white")
    return f"[{colour}]{service:>9}[/{colour}] │"


def _print_metrics(stack: Stack) -> None:
    # Only scheduler and gateway have the certificate; the other services are for this host.
    scheme = "https" if stack.identity.serves_tls else "http"
    scheduler, store, *rest = stack.metrics
    workers, others = rest[: len(stack.workers)], rest[len(stack.workers) :]
    gateways = [others.pop()] if stack.gateway is not None else []
    first, last = (address.rpartition(":")[2] for address in (workers[0], workers[-1]))
    ports = f"{first} (worker 0)" if first == last else f"{first} to {last} (workers)"
    out.print(f"  metrics    {scheme}://{scheduler}/metrics (scheduler)")
    out.print(f"             http://{store}/metrics (store), {ports}")
    for number, other in enumerate(others, start=1):
        out.print(f"             {scheme}://{other}/metrics (scheduler {number})")
    for gateway in gateways:
        out.print(f"             {scheme}://{gateway}/metrics (gateway)")


def print_summary(stack: Stack, addresses: Sequence[str], http: str | None = None) -> None:
    """Print the addresses and files of the stack, and commands to try, on stdout.

    `addresses`: where the schedulers listen. `http`: where the gateway listens; None: there is
    none.
    """
    shape = stack.shape
    kept = " (kept on exit)" if stack.keep_arena else ""
    memory = config.format_size(stack.host_memory_bytes)
    out.print(f"Splitpoint serves {escape(stack.name)} ({shape.data_type.value}):")
    if stack.weights.is_lossy:
        out.print(f"  weights    {stack.weights.value}: answers are approximate (docs/memory.md)")
    for address in addresses:
        out.print(f"  scheduler  {address}")
    if http is not None:
        scheme = "https" if stack.identity.serves_tls else "http"
        reachable = config.reachable_address(http)
        out.print(
            f"  gateway    {scheme}://{reachable}/v1 (OpenAI), {scheme}://{reachable}/ (page)"
        )
    for i, (device, worker) in enumerate(zip(stack.devices, stack.worker_addresses, strict=True)):
        out.print(f"  worker {i}   {worker} on {device}")
    out.print(f"  store      {stack.store_address}")
    out.print(f"  arena      {stack.arena}, {memory}{kept}")
    if stack.tier_disk is not None:
        folder, size = stack.tier_disk
        out.print(f"  disk tier  {escape(str(folder))}, at most {config.format_size(size)}")
    if stack.tier_pool is not None:
        out.print(f"  pool       master {stack.tier_pool}")
    if stack.pages.reason:
        out.print(f"  pages      {counted(stack.pages.tokens, 'token')}: {stack.pages.reason}")
    if stack.metrics:
        _print_metrics(stack)
    address = ",".join(map(config.reachable_address, addresses))
    where = "" if address == config.DEFAULT_ADDRESS else f" --address {address}"
    out.print("Try:")
    if stack.identity.serves_tls or stack.has_tokens:
        wanted = [
            *(["SPLITPOINT_TOKEN_FILE=..."] if stack.has_tokens else []),
            *(["SPLITPOINT_CA=..."] if stack.identity.serves_tls else []),
            *(["SPLITPOINT_CERT=... SPLITPOINT_KEY=..."] if stack.identity.authorities else []),
        ]
        out.print(f"  export {' '.join(wanted)}  (docs/security.md)")
    out.print(f'  splitpoint generate "def fibonacci(n):" --max-tokens 48{where}')
    out.print("Ctrl-C stops everything.")
    out.file.flush()
