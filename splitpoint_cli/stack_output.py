"""What `splitpoint up` prints: lines of services, what becomes of them, the summary."""

from __future__ import annotations

from rich.markup import escape

from splitpoint import config
from splitpoint_cli.child import LogLine, ServiceExited, ServiceNotReady, ServiceNotStarted
from splitpoint_cli.output import err, out, print_error
from splitpoint_cli.stack import Stack

_COLOURS = {"store": "cyan", "worker": "green", "scheduler": "magenta"}


class StackOutput:
    """Everything about a stack on stderr.

    `verbose` shows every line of a service, not only warnings; `quiet` hides
    progress, never a warning.
    """

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self._verbose = verbose
        self._quiet = quiet

    def line(self, line: LogLine) -> None:
        """What a service wrote."""
        if self._is_shown(line):
            self.event(line.service, line.text)

    def event(self, service: str, text: str) -> None:
        """What becomes of a service."""
        err.print(f"{_prefix(service)} {escape(text)}")

    def progress(self, text: str, service: str = "") -> None:
        if not self._quiet:
            err.print(f"{_prefix(service)} {escape(text)}" if service else f"[dim]{text}[/dim]")

    def failure(self, error: ServiceExited | ServiceNotReady | ServiceNotStarted) -> None:
        """The error, after those of the service's last lines that were not shown when written."""
        unseen = [line for line in error.tail if not self._is_shown(line)]
        if unseen:
            err.print(f"last lines of {error.service}, beside what it warned of above:")
            for line in unseen:
                self.event(line.service, line.text)
        print_error(error)

    def _is_shown(self, line: LogLine) -> bool:
        return line.important or self._verbose


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
        out.print("  export SPLITPOINT_TOKEN_FILE=... SPLITPOINT_CA=...  (docs/security.md)")
    out.print(f'  splitpoint generate "def fibonacci(n):" --max-tokens 48{where}')
    out.print("Ctrl-C stops everything.")
    out.file.flush()
