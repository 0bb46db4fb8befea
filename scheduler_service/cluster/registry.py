"""All workers: those given at the start, and those found in Redis; and how often each was lost.

Static addresses stay for good. A discovered one is dropped once Redis lists it no more
and its stream is down: the stream is the truth, Redis a hint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence

from scheduler_service.cluster.connection import WorkerConnection, WorkerListener
from scheduler_service.prefixes.stores import StoreCatalog
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.discovery.entries import ModelName, WorkerEntry
from splitpoint.errors import FailedPrecondition
from splitpoint.shapes import ModelShape
from splitpoint.transport.tls import PLAIN, Identity

# A lost worker that does not come back is forgotten after this long: operators have time
# to notice it, and the lists stay bounded.
_REMEMBER_SECONDS = 3600.0


class WorkerLosses:
    """Losses by worker id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Number of losses, and when the last one was.
        self._losses: dict[str, tuple[int, float]] = {}

    def note(self, worker_id: str, known: Collection[str]) -> None:
        """Count a loss now. The losses of `known` workers are never forgotten."""
        now = self._clock()
        self._losses[worker_id] = (self.count(worker_id) + 1, now)
        for name, (_, last) in list(self._losses.items()):
            if name not in known and now - last > _REMEMBER_SECONDS:
                del self._losses[name]

    def count(self, worker_id: str) -> int:
        return self._losses.get(worker_id, (0, 0.0))[0]

    def seconds_ago(self, worker_id: str) -> float | None:
        """Return the time since the worker was last lost; None if it never was."""
        found = self._losses.get(worker_id)
        return None if found is None else self._clock() - found[1]

    def counts(self) -> dict[str, int]:
        """Return the number of losses of the workers that were ever lost."""
        return {worker_id: count for worker_id, (count, _) in self._losses.items()}


_log = logging.getLogger(__name__)

# A discovered worker that was lost stays listed this long, so that operators notice.
_MISSED_SECONDS = 600.0


class Registry:
    """All connections. `start` them once there is a listener, `close` at the end."""

    def __init__(
        self,
        addresses: Sequence[str],
        model: ModelShape,
        stores: StoreCatalog,
        identity: Identity = PLAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.losses = WorkerLosses(clock)
        self.connections = [
            WorkerConnection(address, model, stores, identity) for address in addresses
        ]
        self.listener: WorkerListener
        self._model = model
        self._stores = stores
        self._identity = identity
        self._tasks: dict[WorkerConnection, asyncio.Task[None]] = {}
        self._dropped: set[asyncio.Task[None]] = set()

    def start(self, listener: WorkerListener) -> None:
        self.listener = listener
        for connection in self.connections:
            self._run(connection)

    async def close(self) -> None:
        """End every Run stream; the workers then cancel what came through it."""
        tasks = [*self._tasks.values(), *self._dropped]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                _log.error("a worker's connection failed", exc_info=result)

    # -- questions ----------------------------------------------------------------------

    def connected(self) -> list[WorkerFacts]:
        """Return the workers with an open stream, draining ones included."""
        return [c.ready.facts for c in self.connections if c.ready]

    def ready(self) -> list[WorkerConnection]:
        """Return the workers that take new requests."""
        return [c for c in self.connections if c.takes_requests]

    def find(self, worker_id: str) -> WorkerConnection | None:
        """Return the worker of this name, ready or not."""
        return next((c for c in self.connections if c.worker_id == worker_id), None)

    @property
    def all_names_known(self) -> bool:
        return all(connection.worker_id for connection in self.connections)

    # -- connections report -------------------------------------------------------------

    def note_loss(self, worker_id: str) -> None:
        """Count a worker whose stream broke without an announced drain."""
        self.losses.note(worker_id, {connection.worker_id for connection in self.connections})

    def claim_name(self, connection: WorkerConnection, worker_id: str) -> None:
        """Name a connection. Raises FailedPrecondition if another address has this name."""
        holder = self.find(worker_id)
        if holder is not None and holder is not connection:
            if holder.is_static or not holder.was_lost:
                raise FailedPrecondition(
                    f"worker id {worker_id} is already that of the worker at {holder.address}"
                )
            self._drop(holder)  # it came back at another address
        connection.worker_id = worker_id

    # -- discovery ----------------------------------------------------------------------

    def discovered(self, entries: Sequence[WorkerEntry]) -> None:
        """Connect to the workers that Redis lists now, and drop those it lists no more.

        Must not be called with the empty answer of a Redis that is away.
        """
        advertised = self._usable(entries)
        for connection in list(self.connections):
            is_listed = connection.is_static or connection.address in advertised
            if not is_listed and connection.ready is None and not self._is_missed(connection):
                self._drop(connection)
        known = {connection.address: connection for connection in self.connections}
        for address, entry in advertised.items():
            connection = known.get(address) or self._add(entry)
            connection.set_store_instance(entry.store_instance_id)

    def _usable(self, entries: Sequence[WorkerEntry]) -> dict[str, WorkerEntry]:
        """Return the entries of this model by address, without second addresses of a worker
        that was given at the start."""
        model = self._model
        ours = ModelName(
            model.layer_count, model.hidden_size, model.vocabulary_size, model.context_length
        )
        addresses = {c.address for c in self.connections if c.is_static}
        instances = {c.ready.info.instance_id for c in self.connections if c.ready and c.is_static}
        return {
            entry.address: entry
            for entry in entries
            if entry.model == ours
            and (entry.instance_id not in instances or entry.address in addresses)
        }

    def _is_missed(self, connection: WorkerConnection) -> bool:
        """Return True if the worker was lost a short while ago and has not come back."""
        if not connection.was_lost:
            return False
        ago = self.losses.seconds_ago(connection.worker_id)
        return ago is not None and ago < _MISSED_SECONDS

    def _add(self, entry: WorkerEntry) -> WorkerConnection:
        _log.info("found worker %s at %s", entry.worker_id, entry.address)
        connection = WorkerConnection(
            entry.address, self._model, self._stores, self._identity, is_static=False
        )
        self.connections.append(connection)
        self._run(connection)
        return connection

    def _run(self, connection: WorkerConnection) -> None:
        self._tasks[connection] = asyncio.create_task(
            connection.run(self), name=f"worker {connection.address}"
        )

    def _drop(self, connection: WorkerConnection) -> None:
        _log.info("worker %s at %s is gone", connection.worker_id or "?", connection.address)
        self.connections.remove(connection)
        task = self._tasks.pop(connection)
        self._dropped.add(task)
        task.add_done_callback(self._dropped.discard)
        task.cancel()
