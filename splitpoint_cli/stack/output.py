"""What `splitpoint up` prints: lines of services, what becomes of them, the summary.

As text each line is named by its service. As JSON every line of stderr is one object: the
services' own as they wrote them, what is not a record (a crash of the interpreter, a
library's print) wrapped into one, and what `up` itself has to say as service "up".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich.markup import escape

from splitpoint import config
from splitpoint.errors import SplitpointError
from splitpoint.observe.logs import LogFormat, json_line, level_of
from splitpoint.progress import Progress
from splitpoint_cli.output import code_name, err, out, print_error
from splitpoint_cli.stack.bars import LoadingBars
from splitpoint_cli.stack.child import LogLine, ServiceExited, ServiceNotReady, ServiceNotStarted
from splitpoint_cli.stack.plan import Stack

_COLOURS = {"store": "cyan", "worker": "green", "scheduler": "magenta"}
# Between two lines of one service that tell how far it is, where there are no bars.
_PROGRESS_SECONDS = 2.0

StartFailure = ServiceExited | ServiceNotReady | ServiceNotStarted


def cause_of(error: StartFailure) -> SplitpointError:
    """What the service said of its end, else how it ended."""
    said = error.failure if isinstance(error, ServiceExited) else None
    return said or error


def end_of(error: StartFailure) -> int:
    """Exit code of a stack that ends so: a service's own where it said why, else the error's."""
    if isinstance(error, ServiceExited) and error.failure is not None and error.status > 0:
        return error.status
    return error.exit_code


class Output(Protocol):
    """Everything about a stack on stderr."""

    def line(self, line: LogLine) -> None:
        """What a service wrote."""

    def event(self, service: str, text: str) -> None:
        """What becomes of a service: a warning."""

    def progress(self, text: str, service: str = "") -> None:
        """What goes as it should."""

    def show_tail(self, error: StartFailure) -> None:
        """The service's last lines that were not shown when written."""

    def failure(self, error: StartFailure) -> None:
        """The error, after those of the service's last lines that were not shown when written."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def output_of(log_format: LogFormat, *, verbose: bool = False, quiet: bool = False) -> Output:
    """`verbose` shows every line of a service, not only warnings; `quiet` hides progress,
    never a warning."""
    if log_format is LogFormat.JSON:
        return JsonOutput(verbose=verbose, quiet=quiet)
    return StackOutput(verbose=verbose, quiet=quiet)


class StackOutput:
    """For people."""

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
            self._bars.remove(service)  # whatever it did, it does no longer
        self._print(service, text)

    def progress(self, text: str, service: str = "") -> None:
        if self._quiet:
            return
        if service:
            self._print(service, text)
        else:
            err.print(f"[dim]{text}[/dim]")

    def failure(self, error: StartFailure) -> None:
        self.close()
        self.show_tail(error)
        print_error(cause_of(error))

    def show_tail(self, error: StartFailure) -> None:
        unseen = [line for line in error.tail if not _is_shown(line, self._verbose)]
        if unseen:
            err.print(f"last lines of {error.service}, beside what it warned of above:")
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
    """For programs: one object a line, as `splitpoint.observe.logs` writes them."""

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

    def show_tail(self, error: StartFailure) -> None:
        for line in error.tail:
            if not _is_shown(line, self._verbose):
                self._write(as_record(line))

    def failure(self, error: StartFailure) -> None:
        self.show_tail(error)
        cause = cause_of(error)
        self._say("ERROR", f"{code_name(cause)}: {cause.message}")

    def close(self) -> None:
        """There is nothing to restore."""

    def _say(self, level: str, text: str) -> None:
        self._write(json_line("up", level, text, logger="splitpoint_cli"))

    def _write(self, text: str) -> None:
        # Not through a console, which would wrap and colour it.
        print(text, file=sys.stderr, flush=True)


class _Pace:
    """Lets what a service says of its progress through now and then, and its end always."""

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
    """Like "loading: 1.5 GiB of 15 GiB (10%)"."""
    done, total = (config.format_size(n) for n in (progress.done_bytes, progress.total_bytes))
    share = progress.done_bytes / max(1, progress.total_bytes)
    return f"{progress.what}: {done} of {total} ({share:.0%})"


def as_record(line: LogLine) -> str:
    """A child's line, if it is a JSON record; else a record that holds it."""
    if line.text.startswith("{") and level_of(line.text) is not None:
        return line.text
    return json_line(line.service, "WARNING", line.text, logger="output")


def _is_shown(line: LogLine, verbose: bool) -> bool:
    return line.important or verbose


def _prefix(service: str) -> str:
    colour = _COLOURS.get(service.split()[0], "white")
    return f"[{colour}]{service:>9}[/{colour}] │"


def _print_metrics(stack: Stack) -> None:
    # The scheduler alone has the certificate: the others are for this host.
    scheme = "https" if stack.identity.serves_tls else "http"
    scheduler, store, *workers = stack.metrics
    first, last = (address.rpartition(":")[2] for address in (workers[0], workers[-1]))
    ports = f"{first} (worker 0)" if first == last else f"{first} to {last} (workers)"
    out.print(f"  metrics    {scheme}://{scheduler}/metrics (scheduler)")
    out.print(f"             http://{store}/metrics (store), {ports}")


def print_summary(stack: Stack, address: str) -> None:
    """Where everything is and what to try; on stdout."""
    shape = stack.shape
    kept = " (kept on exit)" if stack.keep_arena else ""
    memory = config.format_size(stack.host_memory_bytes)
    out.print(f"Splitpoint serves {escape(stack.name)} ({shape.data_type.value}):")
    out.print(f"  scheduler  {address}")
    for i, (device, worker) in enumerate(zip(stack.devices, stack.worker_addresses, strict=True)):
        out.print(f"  worker {i}   {worker} on {device}")
    out.print(f"  store      {stack.store_address}")
    out.print(f"  arena      {stack.arena}, {memory}{kept}")
    if stack.metrics:
        _print_metrics(stack)
    address = config.reachable_address(address)
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
