"""Look-ups, loads and stores over a real store process, without vLLM: what is loaded is what was
stored, every job ends once, and a store that fails costs pages and nothing else."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
import torch
from forked_service import ForkedService, start_forked
from own_names import free_ports, shared_memory_folder
from waiting import wait_until

from splitpoint.arena.mapping import Arena
from splitpoint.config import remove_tree
from splitpoint_vllm import worker as worker_module
from splitpoint_vllm.copies import HostCopier, Part, Parts
from splitpoint_vllm.plan import Reason
from splitpoint_vllm.store import Answer, PageFinder, PageWriter, StoreSettings
from splitpoint_vllm.worker import Ended, LoadJob, Transfers

BLOCKS = 40
BLOCK_BYTES = 150_000
NAMESPACE = b"n" * 32
GROUPS = (4, 2)  # blocks of each group in the jobs here


class Processes:
    """A store process that can be killed and started again."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_ports(1)}"
        self.folder = shared_memory_folder()
        self.folder.mkdir(mode=0o700)
        self.service: ForkedService | None = None

    def start(self, *, memory: str = "8MiB", page_size: str = "auto") -> None:
        async def start() -> ForkedService:
            options = ["--host-memory", memory, "--page-size", page_size, "--lease-seconds", "2"]
            arena = ["--arena", str(self.folder / "arena"), "--keep-arena", "--huge-pages", "never"]
            listen = ["--listen", self.address]
            return (await start_forked("kvstore_service", *listen, *arena, *options))[0]

        self.service = asyncio.run(start())

    def signal(self, number: int) -> None:
        assert self.service is not None
        self.service.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        wait_until(lambda: self.service is None or self.service.returncode is not None)


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    if found.service is not None:
        found.signal(signal.SIGCONT)
        found.kill()
    remove_tree(found.folder)


class Rank:
    """One rank's cache of two groups, with its transfers, and a scheduler's session."""

    def __init__(self, address: str, seed: int, link_rate: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.cache = torch.randint(
            -128, 127, (BLOCKS, BLOCK_BYTES), dtype=torch.int8, generator=generator
        )
        parts = Parts([[Part(self.cache, BLOCK_BYTES)], [Part(self.cache, BLOCK_BYTES - 7)]])
        settings = StoreSettings(address, "test", BLOCK_BYTES)
        self.writer, self.finder = PageWriter(settings), PageFinder(settings)
        self.transfers = Transfers(self.writer, parts, HostCopier(), 0, link_rate)
        self._jobs = 0

    def wait_connected(self) -> None:
        assert self.writer.wait_connected(20.0)
        assert self.finder.wait_connected(20.0)

    def look_up(self, keys: list[bytes], seconds: float = 20.0) -> Answer:
        lookup = self.finder.look_up(NAMESPACE, keys, 1, seconds)
        wait_until(lambda: lookup.answer() is not None)
        answer = lookup.answer()
        assert answer is not None
        return answer

    def submit_store(self, keys: list[bytes], blocks: list[int]) -> int:
        self._jobs += 1
        self.transfers.submit_store(
            self._jobs, GROUPS, np.array(blocks, dtype=np.int32), NAMESPACE, keys
        )
        return self._jobs

    def submit_load(self, answer: Answer, keys: list[bytes], blocks: list[int]) -> int:
        assert answer.connection is not None
        self._jobs += 1
        pages = [answer.pages[key][0] for key in keys]
        self.transfers.submit_load(
            self._jobs,
            GROUPS,
            np.array(blocks, dtype=np.int32),
            pages,
            answer.connection.arena_name,
        )
        return self._jobs

    def ended(self, job: int) -> Ended:
        """Wait for a job as vLLM does."""
        found: list[Ended] = []

        def has_ended() -> bool:
            found.extend(self.transfers.finished())
            return bool(found)

        wait_until(has_ended)
        (one,) = found
        assert one.job_id == job
        return one

    def store(self, keys: list[bytes], blocks: list[int]) -> Ended:
        return self.ended(self.submit_store(keys, blocks))

    def load(self, answer: Answer, keys: list[bytes], blocks: list[int]) -> Ended:
        return self.ended(self.submit_load(answer, keys, blocks))

    def close(self) -> None:
        self.transfers.close(5.0)
        self.finder.close()


@pytest.fixture
def rank_of(processes: Processes) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(seed: int, link_rate: float = 0.0) -> Rank:
        ranks.append(Rank(processes.address, seed, link_rate))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def keys_from(number: int) -> list[bytes]:
    """Six keys of blocks, the last two of the second group."""
    hashes = [bytes([number]) * 31 + bytes([index]) for index in range(sum(GROUPS))]
    groups = [0] * GROUPS[0] + [1] * GROUPS[1]
    return [each + group.to_bytes(4, "big") for each, group in zip(hashes, groups, strict=True)]


FROM, TO = [3, 9, 1, 22, 7, 30], [0, 2, 4, 6, 8, 39]


def check_loaded(to: Rank, source: Rank, before: torch.Tensor) -> None:
    """Check that blocks TO have what FROM of the source have, and all others what they had."""
    expected = before.clone()
    for number, (target, block) in enumerate(zip(TO, FROM, strict=True)):
        size = BLOCK_BYTES if number < GROUPS[0] else BLOCK_BYTES - 7
        expected[target, :size] = source.cache[block, :size]
    assert torch.equal(to.cache, expected)


def test_what_one_rank_stored_another_one_loads(
    processes: Processes, rank_of: Callable[..., Rank]
) -> None:
    processes.start()
    first, second = rank_of(1), rank_of(2)
    first.wait_connected()
    second.wait_connected()
    keys = keys_from(1)
    assert second.look_up(keys).pages == {}
    ended = first.store(keys, FROM)
    assert (ended.problem, ended.unstored) == ("", frozenset())
    assert ended.byte_count == 6 * BLOCK_BYTES - 2 * 7
    answer = second.look_up([*keys, *keys_from(2)])
    assert list(answer.pages) == keys
    assert answer.reason is None
    before = second.cache.clone()
    loaded = second.load(answer, keys, TO)
    assert (loaded.is_load, loaded.problem) == (True, "")
    check_loaded(second, first, before)
    second.finder.release(answer)
    # Another namespace has none of them, and one rank's pages are not the blocks of two.
    other = second.finder.look_up(b"o" * 32, keys, 1, 20.0)
    wait_until(lambda: other.answer() is not None)
    both = second.finder.look_up(NAMESPACE, keys, 2, 20.0)
    wait_until(lambda: both.answer() is not None)
    assert [lookup.answer().pages for lookup in (other, both)] == [{}, {}]  # type: ignore[union-attr]


def test_a_damaged_page_fails_its_load_and_is_dropped(
    processes: Processes, rank_of: Callable[..., Rank]
) -> None:
    processes.start()
    rank = rank_of(1)
    rank.wait_connected()
    keys = keys_from(1)
    rank.store(keys, FROM)
    answer = rank.look_up(keys)
    connection = rank.writer.connection
    assert connection is not None
    (plane,) = connection.arena.geometry.planes
    (page,) = answer.pages[keys[2]]
    connection.arena.plane(plane.layer, plane.tensor)[page.slot, 9] ^= 4
    assert "1 of its 6 pages are damaged" in rank.load(answer, keys, TO).problem
    wait_until(lambda: len(rank.look_up(keys).pages) == 5)
    # What is computed instead is stored again.
    assert rank.store(keys, FROM).unstored == frozenset()
    assert len(rank.look_up(keys).pages) == 6


def test_a_store_that_started_again_fails_loads_and_serves_the_next(
    processes: Processes, rank_of: Callable[..., Rank]
) -> None:
    processes.start()
    first, second = rank_of(1), rank_of(2)
    first.wait_connected()
    second.wait_connected()
    keys = keys_from(1)
    first.store(keys, FROM)
    answer = second.look_up(keys)
    processes.kill()
    wait_until(lambda: second.writer.connection is None and second.finder.connection is None)
    wait_until(lambda: first.writer.connection is None)
    assert second.load(answer, keys, TO).problem == "the store was lost"
    assert second.look_up(keys).reason is Reason.AWAY
    assert first.store(keys_from(2), FROM).problem == "no store takes it"
    processes.start()
    first.wait_connected()
    second.wait_connected()
    # The arena was kept, in another epoch: a handle of the one before means nothing in it.
    assert second.load(answer, keys, TO).problem == "the store was lost"
    before = second.cache.clone()
    assert second.load(second.look_up(keys), keys, TO).problem == ""
    check_loaded(second, first, before)


def test_a_frozen_store_delays_nothing_for_longer_than_was_said(
    processes: Processes, rank_of: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CALL_SECONDS", 0.5)
    processes.start()
    rank = rank_of(1)
    rank.wait_connected()
    keys = keys_from(1)
    rank.store(keys, FROM)
    processes.signal(signal.SIGSTOP)
    for limit in (0.2 + 0.1, 0.2 + 0.1, 0.1):  # after two late answers no one waits
        started = time.monotonic()
        assert rank.look_up(keys, 0.2).reason is Reason.LATE
        assert time.monotonic() - started < limit + 0.3
    job = rank.submit_store(keys_from(2), FROM)
    started = time.monotonic()
    rank.transfers.wait({job})
    assert time.monotonic() - started < worker_module.FLUSH_SECONDS + 0.3
    assert rank.ended(job).unstored == frozenset(keys_from(2))
    processes.signal(signal.SIGCONT)
    wait_until(lambda: rank.look_up(keys, 1.0).reason is None)
    assert len(rank.look_up(keys).pages) == 6
    # What was granted and found too late was given back.
    wait_until(lambda: rank.store(keys_from(3), FROM).unstored == frozenset())


def test_a_full_store_takes_no_page_and_keeps_what_is_leased(
    processes: Processes, rank_of: Callable[..., Rank]
) -> None:
    processes.start(memory="4MiB")
    rank = rank_of(1)
    rank.wait_connected()
    held = [keys_from(1), keys_from(2)]
    for keys in held:
        assert rank.store(keys, FROM).problem == ""
    answers = [rank.look_up(keys) for keys in held]
    assert rank.store(keys_from(3), FROM).problem == "full"
    assert rank.load(answers[0], held[0], TO).problem == ""
    for answer in answers:
        rank.finder.release(answer)
    wait_until(lambda: rank.store(keys_from(3), FROM).problem == "")


def test_pages_that_do_not_fit_are_said_and_the_engine_goes_on(
    processes: Processes, rank_of: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    processes.start(page_size="4096")
    rank = rank_of(1)
    wait_until(lambda: rank.finder.refusal is Reason.PAGES_DO_NOT_FIT)
    assert rank.look_up(keys_from(1)).reason is Reason.PAGES_DO_NOT_FIT
    assert rank.store(keys_from(1), FROM).problem == "no store takes it"
    time.sleep(1.0)  # it tries again, and says so no more
    said = [
        each.getMessage() for each in caplog.records if f"{BLOCK_BYTES} bytes" in each.getMessage()
    ]
    assert len(said) == 2  # the scheduler's session and the worker's
    assert all("4096" in each or "4 KiB" in each or "4,096" in each for each in said)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_fails_its_load_and_the_next_is_loaded(
    processes: Processes, rank_of: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.start()
    rank = rank_of(1)
    rank.wait_connected()
    keys = keys_from(1)
    rank.store(keys, FROM)
    answer = rank.look_up(keys)
    copy = Transfers._copy_load

    def die(self: Transfers, job: LoadJob) -> tuple[int, str]:
        monkeypatch.setattr(Transfers, "_copy_load", copy)
        raise SystemExit

    monkeypatch.setattr(Transfers, "_copy_load", die)
    assert rank.load(answer, keys, TO).problem == "its thread died"
    before = rank.cache.clone()
    assert rank.load(answer, keys, TO).problem == ""
    check_loaded(rank, rank, before)


def test_a_thread_that_hangs_fails_its_load_and_never_writes(
    processes: Processes, rank_of: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.start()
    rank = rank_of(1)
    rank.wait_connected()
    keys = keys_from(1)
    rank.store(keys, FROM)
    answer = rank.look_up(keys)
    hanging = threading.Event()
    ended = threading.Event()
    copy = Transfers._copy_load

    def hang(self: Transfers, job: LoadJob) -> tuple[int, str]:
        monkeypatch.setattr(Transfers, "_copy_load", copy)
        hanging.wait(60.0)
        try:
            return copy(self, job)
        finally:
            ended.set()

    monkeypatch.setattr(Transfers, "_copy_load", hang)
    before = rank.cache.clone()
    assert rank.load(answer, keys, TO).problem == "its thread hangs"
    assert rank.load(answer, keys, [each + 1 for each in TO[:-1]] + [38]).problem == ""
    after = rank.cache.clone()
    hanging.set()
    assert ended.wait(20.0)
    assert torch.equal(rank.cache, after)
    assert not torch.equal(before, after)
    assert rank.transfers.finished() == []


def test_a_slow_link_delays_a_load_and_a_flush_gives_it_up(
    processes: Processes, rank_of: Callable[..., Rank]
) -> None:
    processes.start()
    rank = rank_of(1, link_rate=1_800_000.0)
    rank.wait_connected()
    keys = keys_from(1)
    rank.store(keys, FROM)
    answer = rank.look_up(keys)
    ended = rank.load(answer, keys, TO)
    assert ended.problem == ""
    assert 0.49 <= ended.seconds < 5.0
    job = rank.submit_load(answer, keys, TO)
    rank.transfers.wait({job})
    assert rank.ended(job).problem == "its blocks were wanted"


def test_a_lease_that_is_answered_late_is_released(
    processes: Processes, rank_of: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.start(memory="4MiB")
    rank = rank_of(1)
    rank.wait_connected()
    for number in (1, 2):
        rank.store(keys_from(number), FROM)
    processes.signal(signal.SIGSTOP)
    assert rank.look_up([*keys_from(1), *keys_from(2)], 0.1).reason is Reason.LATE
    processes.signal(signal.SIGCONT)
    # All pages were leased by that look-up: while they are, there is no room.
    wait_until(lambda: rank.store(keys_from(3), FROM).problem == "")


def test_a_seal_that_fails_leaves_no_slot_granted(
    processes: Processes, rank_of: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.start(memory="4MiB")
    rank = rank_of(1)
    rank.wait_connected()
    checksum, numbers = Arena.checksum, count()
    monkeypatch.setattr(
        Arena, "checksum", lambda arena, slot: checksum(arena, slot) + (next(numbers) == 3)
    )
    ended = rank.store(keys_from(1), FROM)
    assert ended.problem == "away"
    monkeypatch.undo()
    # 13 slots in all: those of the failed call are needed again.
    wait_until(lambda: rank.store(keys_from(2), FROM).unstored == frozenset())
    answer = rank.look_up(keys_from(2))
    assert rank.store(keys_from(3), FROM).problem == ""
    assert len(answer.pages) == len(rank.look_up(keys_from(3)).pages) == 6


def test_the_front_of_a_long_prompt_is_evicted_last(
    processes: Processes, rank_of: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "BATCH_PAGES", 2)
    processes.start(memory="4MiB")  # 13 slots
    rank = rank_of(1)
    rank.wait_connected()
    for number in (1, 2, 3):
        assert rank.store(keys_from(number), FROM).unstored == frozenset()
    # Only a prompt's beginning is of use without the rest.
    left = list(rank.look_up(keys_from(1)).pages)
    assert left == keys_from(1)[: len(left)]
    assert len(left) == 1
