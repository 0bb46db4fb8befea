"""Random writes, reads, faults, restarts and crashes of a disk tier against a dictionary."""

from __future__ import annotations

import asyncio
import errno
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from disk_tier_helpers import TierBench, bound_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitpoint.errors import Unavailable

Result = TypeVar("Result")
NUMBERS = st.integers(0, 60)
BOUND = bound_of(5, 4)


class DiskTierMachine(RuleBasedStateMachine):
    """One tier on one folder.

    Attributes:
        mirror: keys that the tier said it holds, by `on_change` and `holds`.
        certain: chunks that must be found: written, and nothing happened that may lose them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.bench = TierBench(self.root, BOUND)
        self.mirror: set[bytes] = set()
        self.certain: set[int] = set()
        self.evicted = 0
        self.next_number = 1000  # of a chunk that was never written

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    @initialize()
    def start(self) -> None:
        tier = self.wait(self.bench.start(pause_seconds=0.001))
        tier.on_change = self.told
        self.mirror = set(tier.keys())
        self.evicted = 0

    def told(self, keys: Sequence[bytes]) -> None:
        assert self.bench.tier is not None
        for key in keys:
            (self.mirror.add if self.bench.tier.holds(key) else self.mirror.discard)(key)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=8, unique=True))
    def write(self, numbers: list[int]) -> None:
        assert self.bench.tier is not None
        stored = self.wait(self.bench.write(*numbers))
        faulty = self.bench.files.write_error is not None or self.bench.files.room is not None
        if stored == len(numbers):
            self.certain.update(numbers)
        else:
            assert faulty or "pause" in self.bench.tier.stats.message
        if self.bench.tier.stats.evicted_chunk_count > self.evicted:
            self.evicted = self.bench.tier.stats.evicted_chunk_count
            held = set(self.bench.tier.keys())
            self.certain = {each for each in self.certain if self.bench.key(each) in held}

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def read(self, numbers: list[int]) -> None:
        found = self.wait(self.bench.check_read(*numbers))
        for number, is_found in zip(numbers, found, strict=True):
            assert is_found or number not in self.certain
            if is_found:
                assert self.bench.key(number) in self.mirror

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        assert self.bench.tier is not None
        self.wait(self.bench.tier.drop([self.bench.key(number)]))
        assert not self.bench.tier.holds(self.bench.key(number))
        self.certain.discard(number)

    @rule(error=st.sampled_from([errno.EIO, errno.EROFS, errno.ENOSPC]))
    def break_disk(self, error: int) -> None:
        self.bench.files.write_error = error

    @rule()
    def mend_disk(self) -> None:
        self.bench.files.write_error = None
        self.bench.now += 1

    @rule()
    def restart(self) -> None:
        self.wait(self.bench.close())
        self.start()

    @rule()
    def crash(self) -> None:
        """Start anew on the files as they are, without what closing them would write."""
        copied = self.root / "copied"
        shutil.copytree(self.bench.folder, copied)
        self.wait(self.bench.close())
        shutil.rmtree(self.bench.folder)
        copied.rename(self.bench.folder)
        self.start()

    @precondition(lambda self: self.bench.segments())
    @rule(place=st.integers(0, 1 << 30), file=st.integers(0, 100), bit=st.integers(0, 7))
    def flip(self, place: int, file: int, bit: int) -> None:
        paths = self.bench.segments()
        path = paths[file % len(paths)]
        block = bytearray(path.read_bytes())
        if block:
            block[place % len(block)] ^= 1 << bit
            with path.open("r+b") as opened:
                opened.write(block)
            self.certain.clear()

    @precondition(lambda self: self.bench.segments())
    @rule(file=st.integers(0, 100))
    def remove_file(self, file: int) -> None:
        paths = self.bench.segments()
        paths[file % len(paths)].unlink()
        self.certain.clear()

    @rule()
    def remove_folder(self) -> None:
        shutil.rmtree(self.bench.folder)
        self.certain.clear()
        assert self.bench.tier is not None
        tier = self.bench.tier

        async def come_back() -> None:
            with pytest.raises(Unavailable):
                await self.bench.write(self.next_number)
            while not tier.stats.is_up:
                await asyncio.sleep(0.001)

        self.mend_disk()
        self.wait(come_back())
        self.next_number += 1

    @invariant()
    def bound_is_held(self) -> None:
        if self.bench.tier is None:
            return
        stats = self.bench.tier.stats
        assert self.bench.disk_bytes() <= BOUND
        assert stats.used_bytes <= BOUND
        assert stats.chunk_count == len(set(self.bench.tier.keys()))
        assert self.mirror == set(self.bench.tier.keys())

    def teardown(self) -> None:
        self.wait(self.bench.close())
        self.loop.close()
        self.bench.remove()
        shutil.rmtree(self.root)


TestDiskTier = DiskTierMachine.TestCase
TestDiskTier.settings = settings(max_examples=40, stateful_step_count=30)
