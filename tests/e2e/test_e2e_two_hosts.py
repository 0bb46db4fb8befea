"""Two hosts as five processes: a store and a worker each, one scheduler that finds all by Redis.

Every port is TCP with mutual TLS and tokens. The prefix that one host computed is
fetched by the other, whose answer must be the same.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from local_stack import ROOT, prompt_of, stop_process, wait_for_workers
from own_names import shared_memory_folder
from redis_server import RedisServer

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.service import READY_PREFIX
from splitpoint.transport.access import Caller, Role
from splitpoint.transport.tls import read_identity
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token

PROMPT = prompt_of(1500, seed=3, vocabulary=2000)
NEW_TOKENS = 8


@dataclass
class Hosts:
    client: AsyncClient
    processes: dict[str, asyncio.subprocess.Process]
    logs: Path

    async def generate(self, worker: str, prompt: list[int], salt: bytes = b"") -> Completion:
        return await self.client.generate(
            prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker=worker, cache_salt=salt
        ).complete()


@asynccontextmanager
async def two_hosts(folder: Path, model: Path, redis: RedisServer) -> AsyncIterator[Hosts]:
    certificates = folder / "certificates"
    make_certificates(certificates)
    tokens, token_file = folder / "tokens.toml", folder / "services.token"
    admin = add_token(tokens, Caller("admin", Role.ADMIN))
    token_file.touch(0o600)
    token_file.write_text(add_token(tokens, Caller("services", Role.WORKER)))
    shm = shared_memory_folder()
    shm.mkdir(mode=0o700)
    common = [
        # No certificate is for this address: they are known by a name, as where addresses
        # change with each start.
        *("--listen", "127.0.0.2:0", "--tls-server-name", "localhost"),
        *("--model", str(model), "--dtype", "float32"),
        *("--tls-cert", str(certificates / "server.pem")),
        *("--tls-key", str(certificates / "server-key.pem")),
        *("--tls-ca", str(certificates / "ca.pem")),
        *("--tokens", str(tokens), "--token-file", str(token_file)),
        *("--redis", redis.url),
    ]
    processes: dict[str, asyncio.subprocess.Process] = {}
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, shm)

        async def start(name: str, module: str, *arguments: str) -> str:
            with (folder / f"{name}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", module, *common, *arguments),
                    cwd=ROOT,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                )
            processes[name] = process
            cleanup.push_async_callback(stop_process, process)
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            assert line.startswith(READY_PREFIX), (folder / f"{name}.log").read_text()
            return line.removeprefix(READY_PREFIX).strip()

        async def start_host(host: str) -> None:
            store = await start(
                *(f"store {host}", "kvstore_service", "--arena", f"{shm}/{host}/arena"),
                *("--host-memory", "96MiB", "--chunk-tokens", "16"),
            )
            await start(
                *(f"worker {host}", "worker_service", "--kvstore", store, "--worker-id", host),
                *("--device", "cpu", "--threads", "1", "--device-memory", "192MiB"),
            )

        await asyncio.gather(start_host("a"), start_host("b"))
        scheduler = await start("scheduler", "scheduler_service", "--grace-seconds", "1")
        identity = read_identity(
            certificate=certificates / "client.pem",
            key=certificates / "client-key.pem",
            authorities=certificates / "ca.pem",
            token=admin,
            server_name="localhost",
        )
        client = await cleanup.enter_async_context(AsyncClient(scheduler, identity=identity))
        await wait_for_workers(client, 2)
        yield Hosts(client, processes, folder)


async def test_a_prefix_is_fetched_from_another_host(
    tmp_path: Path, bundled_model: Path, redis_server: RedisServer
) -> None:
    async with two_hosts(tmp_path, bundled_model, redis_server) as hosts:
        cold = await hosts.generate("b", PROMPT, salt=b"cold")
        assert cold.usage.cached_tokens == 0
        # The catalog learns of chunks in the background: each try has prefixes of its own.
        for attempt in range(8):
            salt = b"%d" % attempt
            first = await hosts.generate("a", PROMPT, salt)
            assert (first.usage.cached_tokens, first.token_ids) == (0, cold.token_ids)
            await asyncio.sleep(0.3 * (attempt + 1))
            fetched = await hosts.generate("b", PROMPT, salt)
            assert fetched.token_ids == first.token_ids
            assert fetched.plan is not None
            if fetched.plan.fetched_tokens:
                break
        assert fetched.plan is not None
        assert fetched.plan.fetched_tokens >= len(PROMPT) // 16 * 16, fetched.plan.reason
        assert fetched.usage.cached_tokens >= len(PROMPT) // 16 * 16
        assert "fetch" in fetched.plan.reason

        again = await hosts.generate("b", PROMPT, salt)
        assert again.token_ids == first.token_ids
        assert again.plan is not None
        assert again.plan.fetched_tokens == 0  # it is here now
        assert again.usage.cached_tokens == len(PROMPT) - 1

        # The other host dies: what it had is computed, and right.
        other = prompt_of(600, seed=4, vocabulary=2000)
        right = await hosts.generate("a", other)
        hosts.processes["store a"].send_signal(signal.SIGKILL)
        computed = await hosts.generate("b", other)
        assert computed.token_ids == right.token_ids
