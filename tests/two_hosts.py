"""Two hosts as five processes: a store and a worker each, and one scheduler.

Every port is TCP with mutual TLS and tokens. The hosts are network namespaces with a cable between
them where this process may make some, else two addresses of the loopback.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fleet import until
from flipped_bits import ArenaFile
from forked_service import ForkedService, start_forked
from local_stack import ROOT, stop_process, wait_for_workers
from own_names import shared_memory_folder
from redis_server import RedisServer

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.service import READY_PREFIX
from splitpoint.transport.access import Caller, Role
from splitpoint.transport.tls import Identity, read_identity
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token

NEW_TOKENS = 8
CHUNK = 16  # tokens


@dataclass(frozen=True)
class Network:
    """Where the hosts "a" and "b" are.

    Attributes:
        addresses: of each host.
        enter: the beginning of a command that runs on a host.
        interface: the interface of these addresses.
    """

    addresses: Mapping[str, str]
    enter: Mapping[str, Sequence[str]]
    interface: str


# No certificate is for these addresses: servers are known by a name, as where addresses change
# with each start.
LOOPBACK = Network({"a": "127.0.0.2", "b": "127.0.0.2"}, {"a": (), "b": ()}, "lo")


@contextmanager
def namespaces() -> Iterator[Network]:
    """Make two network namespaces with a cable; the loopback if this process may not."""
    names = {host: f"splitpoint-{os.getpid()}-{host}" for host in "ab"}
    if os.geteuid() != 0 or shutil.which("ip") is None or not _ip("netns", "add", names["a"]):
        yield LOOPBACK
        return
    try:
        assert _ip("netns", "add", names["b"])
        made = _ip(
            *("link", "add", "cable", "netns", names["a"], "type", "veth"),
            *("peer", "name", "cable", "netns", names["b"]),
        )
        assert made, "namespaces, but no cable between them"
        for number, name in enumerate(names.values(), start=1):
            assert _ip("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                assert _ip("-n", name, "link", "set", interface, "up")
        yield Network(
            {"a": "10.213.7.1", "b": "10.213.7.2"},
            {host: ("ip", "netns", "exec", name) for host, name in names.items()},
            "cable",
        )
    finally:
        for name in names.values():
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, timeout=30, check=False)
    return done.returncode == 0


@dataclass
class Hosts:
    """Running processes by name: "store a", "worker a", and so on.

    Attributes:
        logs: folder with the log of each process.
        arenas: folder with the arena of each host.
        identity: of an administrator.
        addresses: of the processes.
    """

    client: AsyncClient
    logs: Path
    arenas: Path
    identity: Identity
    processes: dict[str, ForkedService | asyncio.subprocess.Process] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    async def generate(self, worker: str, prompt: list[int], salt: bytes = b"") -> Completion:
        return await self.client.generate(
            prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker=worker, cache_salt=salt
        ).complete()

    async def generate_stored(self, worker: str, prompt: list[int], salt: bytes) -> Completion:
        """Generate a new text, and return once the store of its host has sealed the prompt.

        Chunks are written back in the background: a text's end does not mean that all are there.
        """
        arena = ArenaFile(self.arenas / worker / "arena")
        wanted = len(arena.sealed()) + len(prompt) // CHUNK
        completion = await self.generate(worker, prompt, salt)
        await until(lambda: len(arena.sealed()) >= wanted)
        arena.close()
        return completion

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()


async def _entered(
    enter: Sequence[str], errors: Path, module: str, *arguments: str
) -> tuple[asyncio.subprocess.Process, str]:
    """Start a service on a host that is entered by a command; return it with its address."""
    with errors.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(*enter, sys.executable, "-m", module, *arguments),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    if not line.startswith(READY_PREFIX):
        await stop_process(process)
        raise AssertionError(errors.read_text())
    return process, line.removeprefix(READY_PREFIX).strip()


@asynccontextmanager
async def two_hosts(
    folder: Path,
    model: Path,
    network: Network = LOOPBACK,
    redis: RedisServer | None = None,
    store_arguments: Sequence[str] = (),
) -> AsyncIterator[Hosts]:
    """Start the processes; the scheduler finds the workers by Redis if there is one."""
    certificates = folder / "certificates"
    make_certificates(certificates)
    tokens, token_file = folder / "tokens.toml", folder / "services.token"
    admin = add_token(tokens, Caller("admin", Role.ADMIN))
    token_file.touch(0o600)
    token_file.write_text(add_token(tokens, Caller("services", Role.WORKER)))
    shm = shared_memory_folder()
    shm.mkdir(mode=0o700)
    common = [
        *("--tls-server-name", "localhost", "--model", str(model), "--dtype", "float32"),
        *("--tls-cert", str(certificates / "server.pem")),
        *("--tls-key", str(certificates / "server-key.pem")),
        *("--tls-ca", str(certificates / "ca.pem")),
        *("--tokens", str(tokens), "--token-file", str(token_file)),
        *(("--redis", redis.url) if redis is not None else ()),
    ]
    identity = read_identity(
        certificate=certificates / "client.pem",
        key=certificates / "client-key.pem",
        authorities=certificates / "ca.pem",
        token=admin,
        server_name="localhost",
    )
    processes: dict[str, ForkedService | asyncio.subprocess.Process] = {}
    addresses: dict[str, str] = {}
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, shm)

        async def start(name: str, module: str, *arguments: str) -> str:
            host = name.rpartition(" ")[2]
            log = folder / f"{name}.log"
            process: ForkedService | asyncio.subprocess.Process
            if enter := network.enter.get(host, network.enter["a"]):
                process, line = await _entered(enter, log, module, *common, *arguments)
            else:
                process, line = await start_forked(module, *common, *arguments, errors=log)
            processes[name] = process
            cleanup.push_async_callback(stop_process, process)
            addresses[name] = line
            return line

        async def start_host(host: str) -> str:
            listen = ("--listen", f"{network.addresses[host]}:0")
            store = await start(
                *(f"store {host}", "kvstore_service", *listen, "--arena", f"{shm}/{host}/arena"),
                *("--host-memory", "96MiB", "--chunk-tokens", str(CHUNK), *store_arguments),
            )
            return await start(
                *(f"worker {host}", "worker_service", *listen),
                *("--kvstore", store, "--worker-id", host),
                *("--device", "cpu", "--threads", "1", "--device-memory", "192MiB"),
            )

        workers = await asyncio.gather(start_host("a"), start_host("b"))
        scheduler = await start(
            *("scheduler", "scheduler_service", "--grace-seconds", "1"),
            # A socket file is reached from everywhere on this machine.
            *("--listen", f"unix:{folder}/s"),
            *(() if redis is not None else [f"--worker={each}" for each in workers]),
        )
        client = await cleanup.enter_async_context(AsyncClient(scheduler, identity=identity))
        await wait_for_workers(client, 2)
        yield Hosts(client, folder, shm, identity, processes, addresses)
