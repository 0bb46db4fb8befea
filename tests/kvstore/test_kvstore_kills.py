"""kill -9 of a store under load, again and again: no wrong byte, no lost chunk, one file.

    pytest -m chaos tests/kvstore/test_kvstore_kills.py    # 200 kills

The seed is printed; SPLITPOINT_CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvstore_helpers import (
    LAYOUT,
    assert_payloads,
    granted_slots,
    pieces_of,
    write_chunks,
)
from test_kvstore_process import StoreProcess

from splitpoint.arena.mapping import Arena
from splitpoint.transport.channels import open_sync_channel
from splitpoint.transport.convert import to_message
from splitpoint.transport.local_session import mapped_arena
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

SIZE = LAYOUT.chunk_tokens
WRITERS = 2


class Writer:
    """A client that survives the stores: writes sequences, and records what was sealed.

    Attributes:
        sealed: sequences whose seal was acknowledged.
        errors: what went wrong that no kill explains.
    """

    def __init__(self, name: int, address: str, rng: random.Random) -> None:
        self.name = name
        self.sealed: list[list[int]] = []
        self.errors: list[BaseException] = []
        self._address = address
        self._rng = rng
        self._count = 0
        self._session = b""
        self._requests = 0

    def run(self) -> None:
        """Run until the store dies."""
        try:
            with open_sync_channel(self._address) as channel:
                self._work(kvstore_pb2_grpc.KvStoreServiceStub(channel))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                self.errors.append(error)
        except BaseException as error:
            self.errors.append(error)

    def attach(self, stub: Any) -> tuple[pb.AttachResponse, Arena]:
        answer = stub.Attach(
            pb.AttachRequest(
                client_name=f"writer {self.name}",
                process_id=os.getpid(),
                process_start_ticks=1,
                previous_session_id=self._session,
            ),
            timeout=10,
        )
        self._session = answer.session_id
        return answer, mapped_arena(answer)

    def _work(self, stub: Any) -> None:
        with self.attached(stub) as arena:
            while True:
                self._store_one(stub, arena)
                if self.sealed and self._rng.random() < 0.3:
                    self.check(stub, arena, self._rng.choice(self.sealed))

    @contextmanager
    def attached(self, stub: Any) -> Iterator[Arena]:
        """Return a session that is kept alive, and its arena."""
        answer, arena = self.attach(stub)
        over = threading.Event()

        def beats() -> Iterator[pb.KeepAliveRequest]:
            while not over.is_set():
                yield pb.KeepAliveRequest(session_id=answer.session_id)
                over.wait(0.3)

        stream = stub.KeepAlive(beats())
        try:
            yield arena
        finally:
            over.set()
            stream.cancel()
            arena.close()

    def _store_one(self, stub: Any, arena: Arena) -> None:
        self._count += 1
        length = self._rng.randint(1, 3 * SIZE)
        tokens = [self.name, self._count, *(self._rng.randrange(99) for _ in range(length))]
        pieces = pieces_of(tokens)
        granted = stub.Reserve(
            pb.ReserveRequest(
                session_id=self._session, request_id=self._id(), slot_count=len(pieces)
            ),
            timeout=10,
        )
        if self._rng.random() < 0.1:
            return  # forgotten: quarantined by the kill, freed by the next attach
        written = write_chunks(arena, granted_slots(granted.runs), pieces)
        request = pb.SealRequest(
            session_id=self._session,
            request_id=self._id(),
            chunks=[to_message(pb.SealChunk, each, page_key=b"") for each in written],
            keep_leased=True,
        )
        lease_id = stub.Seal(request, timeout=10).lease_id
        assert stub.Seal(request, timeout=10).lease_id == lease_id  # retried: the same answer
        self.sealed.append(tokens)
        stub.Release(
            pb.ReleaseRequest(
                session_id=self._session, request_id=self._id(), lease_ids=[lease_id]
            ),
            timeout=10,
        )

    def check(self, stub: Any, arena: Arena, tokens: list[int]) -> None:
        """Check every byte of the sequence."""
        found = stub.Match(
            pb.MatchRequest(session_id=self._session, request_id=self._id(), token_ids=tokens),
            timeout=10,
        )
        assert found.cached_tokens == len(tokens), f"lost: {tokens}"
        slots = [chunk.slot for chunk in found.chunks]
        assert assert_payloads(arena, slots, tokens) == list(found.chunk_keys)
        assert arena.is_current(slots, [chunk.generation for chunk in found.chunks])
        stub.Release(
            pb.ReleaseRequest(
                session_id=self._session, request_id=self._id(), lease_ids=[found.lease_id]
            ),
            timeout=10,
        )

    def _id(self) -> bytes:
        self._requests += 1
        return b"%d" % self._requests


def kill_again_and_again(folder: Path, address: str, kills: int, seed: int) -> None:
    with ExitStack() as cleanup:
        _kill_again_and_again(folder, address, kills, seed, cleanup)


def held() -> tuple[int, int]:
    """Return the descriptors and threads of this process, the stores' client."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _kill_again_and_again(
    folder: Path, address: str, kills: int, seed: int, cleanup: ExitStack
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = folder / "store" / "arena"
    writers = [Writer(name, address, random.Random(seed + name)) for name in range(WRITERS)]
    recoveries = []
    for kill in range(kills + 1):
        store = StoreProcess(path, address, "--host-memory", "48MiB")
        cleanup.callback(store.end, signal.SIGKILL)
        assert store.address == address, store.end()
        with open_sync_channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            stats = stub.GetStats(pb.GetStatsRequest(check_integrity=True), timeout=10)
            assert list(stats.integrity_violations) == []
            assert stats.epoch == kill + 1
            assert stats.refused_chunk_count == 0
            assert sum(map(len, (w.sealed for w in writers))) <= stats.adopted_chunk_count
            recoveries.append(stats.recovery_seconds)
            if kill == kills:
                finish(stub, writers)
                break
            threads = [threading.Thread(target=writer.run) for writer in writers]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0.02, 0.3))
            store.end(signal.SIGKILL)
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
        for writer in writers:
            assert not writer.errors, writer.errors
        if kill == 0:
            before = held()  # gRPC keeps some of its own from the first use on
        for now, then in zip(held(), before, strict=True):
            assert now <= then + 2
        assert {entry.name for entry in path.parent.iterdir()} == {"arena", "arena.lock"}
    assert store.end()[0] == 0
    assert not path.parent.exists()
    print(
        f"{kills} kills, {sum(len(w.sealed) for w in writers)} sequences sealed and found, "
        f"recovery {statistics.median(recoveries):.3f} s in the median, {max(recoveries):.3f} s "
        f"at most"
    )


def finish(stub: Any, writers: list[Writer]) -> None:
    """Check that every sealed chunk is there, and that no session holds anything."""
    for writer in writers:
        with writer.attached(stub) as arena:
            for tokens in writer.sealed:
                writer.check(stub, arena, tokens)
    deadline = time.monotonic() + 60
    while stub.GetStats(pb.GetStatsRequest()).session_count and time.monotonic() < deadline:
        time.sleep(0.05)
    stats = stub.GetStats(pb.GetStatsRequest(check_integrity=True), timeout=10)
    assert list(stats.integrity_violations) == []
    assert stats.checksum_failure_count == 0
    assert (stats.lease_count, stats.writing_slot_count, stats.quarantined_slot_count) == (0, 0, 0)


def test_a_few_kills(shm_folder: Path, socket_address: str) -> None:
    kill_again_and_again(shm_folder, socket_address, kills=4, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_two_hundred_kills(shm_folder: Path, socket_address: str) -> None:
    seed = int(os.environ.get("SPLITPOINT_CHAOS_SEED", "0")) or random.randrange(1 << 30)
    kill_again_and_again(shm_folder, socket_address, kills=200, seed=seed)
