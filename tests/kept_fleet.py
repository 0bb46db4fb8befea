"""A fleet whose services start again when a test kills them, as `splitpoint up` starts its own.

For tests whose subject is what two workers, a store and a scheduler answer, not `up`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet import Fleet, fleet
from fork_server import SECONDS

from splitpoint.client import AsyncClient, Client
from splitpoint_cli.request.observed import Status, read_status


@dataclass(frozen=True)
class KeptFleet:
    """Running services; `address` is their scheduler's."""

    fleet: Fleet
    address: str

    def kill_worker(self, worker_id: str) -> None:
        """kill -9, and the same command again."""
        self.fleet.workers[int(worker_id)].kill()
        self.fleet.start_worker(int(worker_id))

    async def kill_busiest_worker(self, client: AsyncClient) -> None:
        """Kill the worker with most requests. None ends before it is known which that is."""
        for each in self.fleet.workers.values():
            each.signal(signal.SIGSTOP)
        busiest = max(await client.list_workers(), key=lambda worker: worker.running_count)
        assert busiest.running_count > 0
        self.kill_worker(busiest.id)
        for each in self.fleet.workers.values():
            each.signal(signal.SIGCONT)

    def kill_store(self) -> None:
        """kill -9, and the same command again."""
        self.fleet.store.kill()
        self.fleet.start_store()

    def until(self, condition: Callable[[Status], bool]) -> Status:
        """Return the first status of which that is true."""
        deadline = time.monotonic() + SECONDS
        with Client(self.address) as client:
            while True:
                found = read_status(client)
                if condition(found):
                    return found
                assert time.monotonic() < deadline, found
                time.sleep(0.1)


@contextmanager
def kept_fleet(
    *worker_options: str,
    model: Path | None = None,
    store_options: Sequence[str] = ("--host-memory", "64MiB"),
    scheduler_options: Sequence[str] = (),
) -> Iterator[KeptFleet]:
    """Start two workers with these options more, a store and a scheduler, until all are ready."""
    with fleet(
        *(2, 1),
        model=model,
        store_options=("--lease-seconds", "30", *store_options),
        worker_options=worker_options,
        scheduler_options=scheduler_options,
    ) as running:
        kept = KeptFleet(running, running.addresses[0])
        kept.until(lambda found: found.ready_count == 2)
        yield kept
