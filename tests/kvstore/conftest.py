"""A store on an arena of eight slots: by itself, and served to a client with a session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kvstore_client import Service, serve
from kvstore_helpers import SLOTS, Bench


@pytest.fixture
def bench(shm_folder: Path) -> Iterator[Bench]:
    bench = Bench(shm_folder, SLOTS)
    yield bench
    bench.close()


@pytest.fixture
async def service(shm_folder: Path, socket_address: str) -> AsyncIterator[Service]:
    async with serve(Bench(shm_folder, SLOTS), socket_address) as service:
        yield service
