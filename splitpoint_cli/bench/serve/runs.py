"""One run of a load: connect, warm up, send, and read what the server counted meanwhile."""

from __future__ import annotations

import gc
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from splitpoint_cli.bench.serve.backends import Backend, Counters, ServedModel
from splitpoint_cli.bench.serve.load import Load, Record, run_load
from splitpoint_cli.bench.serve.requests import Requests
from splitpoint_cli.bench.shared.progress import Progress


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run gave. `work`: what the server did meanwhile; None: it does not say."""

    backend: str
    model: ServedModel
    records: list[Record]
    work: Counters | None


async def measured(
    connected: AbstractAsyncContextManager[Backend],
    requests: Requests,
    max_concurrency: int | None,
    progress: Progress,
) -> Measured:
    """Run the load on a backend."""
    async with connected as backend:
        model = await backend.served()
        samples, warmups, due = requests.samples(model), requests.warmups(model), requests.due()
        await Load(backend, 1).run(warmups, [0.0] * len(warmups))
        before = await backend.counters()
        # What exists by now is no garbage: looking through it would delay requests.
        gc.collect()
        gc.freeze()
        try:
            records = await run_load(backend, samples, due, max_concurrency, progress)
        finally:
            gc.unfreeze()
        after = await backend.counters()
    work = None if before is None or after is None else after - before
    return Measured(backend.name, model, records, work)
