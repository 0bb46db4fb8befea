"""The life of a service process."""

from __future__ import annotations

import asyncio
import os

from splitpoint.service import watch_parent


async def test_the_end_of_the_parents_pipe_stops() -> None:
    read, write = os.pipe()
    stop = asyncio.Event()
    watch_parent(read, stop)
    os.write(write, b"data is not the end")
    await asyncio.sleep(0.01)
    assert not stop.is_set()
    os.close(write)
    await asyncio.wait_for(stop.wait(), 60)
    os.close(read)
