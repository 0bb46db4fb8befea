"""Two hosts with a network between them: 1,500 tokens come by direct reads, and the same text."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_stack import prompt_of
from transfer_engine import child_of, direct_arguments, needs_engine
from two_hosts import Hosts, Network, namespaces, two_hosts

from splitpoint.arena.mapping import Arena
from splitpoint.client.answers import Completion
from splitpoint.tiers import ChunkSource, Transfer

pytestmark = needs_engine

PROMPT = prompt_of(1500, seed=3, vocabulary=2000)
FULL_TOKENS = len(PROMPT) // 16 * 16
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"


@pytest.fixture
def network() -> Iterator[Network]:
    with namespaces() as found:
        yield found


def can_connect(network: Network, host: str, address: str, port: str) -> bool:
    """Return True if a process on a host reaches a port."""
    command = [*network.enter[host], sys.executable, "-c", CONNECT, address, port]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def engine_port(hosts: Hosts, host: str) -> tuple[str, str]:
    """Return address and port of a host's engine, from the store's log."""
    marker = "other stores can read the arena at "
    lines = [line for line in hosts.log(f"store {host}").splitlines() if marker in line]
    address, _, port = lines[-1].partition(marker)[2].strip().strip('"').rpartition(":")
    return address, port


async def computed_by_a(hosts: Hosts, salt: bytes) -> Completion:
    first = await hosts.generate_stored("a", PROMPT, salt)
    assert first.usage.cached_tokens == 0
    return first


async def test_1500_tokens_come_by_direct_reads(
    tmp_path: Path, bundled_model: Path, network: Network
) -> None:
    arguments = (*direct_arguments(network.interface), "--trusted-network")
    async with two_hosts(tmp_path, bundled_model, network, store_arguments=arguments) as hosts:
        first = await computed_by_a(hosts, b"one")
        fetched = await hosts.generate("b", PROMPT, b"one")
        assert fetched.token_ids == first.token_ids
        assert fetched.text == first.text
        assert fetched.plan is not None
        assert fetched.plan.fetched_tokens >= FULL_TOKENS, fetched.plan.reason_details
        assert fetched.usage.cached_tokens >= FULL_TOKENS
        assert await direct_rate(hosts) > 0

        address, port = engine_port(hosts, "a")
        assert address == ("127.0.0.1" if network.interface == "lo" else network.addresses["a"])
        assert can_connect(network, "b", address, port)
        if network.interface != "lo":
            # By another interface of the same host nothing gets in.
            assert not can_connect(network, "a", "127.0.0.1", port)

        # Every chunk of a is corrupted, behind the back of its store.
        right = await computed_by_a(hosts, b"two")
        flip_a_byte_of_every_slot(hosts.arenas / "a" / "arena")
        computed = await hosts.generate("b", PROMPT, b"two")
        assert computed.token_ids == right.token_ids == first.token_ids
        again = await hosts.generate("b", PROMPT, b"two")  # from what b has sealed
        assert again.token_ids == right.token_ids

        # Host a dies while its engine is being read.
        right = await computed_by_a(hosts, b"three")
        store = hosts.processes["store a"]
        os.kill(child_of(store.pid), signal.SIGSTOP)
        answer = asyncio.create_task(hosts.generate("b", PROMPT, b"three"))
        await asyncio.sleep(1.0)
        store.kill()
        computed = await answer
        assert computed.token_ids == right.token_ids
        again = await hosts.generate("b", PROMPT, b"three")
        assert again.token_ids == right.token_ids


async def direct_rate(hosts: Hosts) -> float:
    """Return the bytes per second that worker b measured for loads from store a."""
    key = ChunkSource(hosts.addresses["store a"]).rate_key(Transfer.DIRECT)
    async with asyncio.timeout(60):
        while True:
            for worker in await hosts.client.list_workers():
                if worker.id == "b" and worker.profile is not None:
                    rates = worker.profile.remote_bytes_per_second
                    if key in rates:
                        return rates[key]
            await asyncio.sleep(0.1)


def flip_a_byte_of_every_slot(path: Path) -> None:
    arena = Arena.attach_read_only(path)
    plane = arena.geometry.planes[1]
    with path.open("r+b", buffering=0) as file:
        for slot in range(arena.slot_count):
            at = plane.offset + slot * plane.slot_bytes + 5
            before = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([before[0] ^ 1]), at)
    arena.close()
