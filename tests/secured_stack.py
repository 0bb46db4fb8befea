"""Store, worker and scheduler as processes: mutual TLS and tokens on every port."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from forked_service import ForkedService, start_forked
from own_names import shared_memory_folder
from small_model import small_model

from splitpoint.client import AsyncClient
from splitpoint.service import READY_PREFIX
from splitpoint.transport.access import Caller, Role
from splitpoint.transport.tls import Identity, read_identity
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token

ROOT = Path(__file__).resolve().parents[1]
TENANT_REQUESTS = 3
CALLERS = {
    "alice": Caller("alice", Role.CLIENT, "canarytenant-a"),
    "anna": Caller("anna", Role.CLIENT, "canarytenant-a"),
    "bob": Caller("bob", Role.CLIENT, "canarytenant-b"),
    "services": Caller("services", Role.WORKER),
    "root": Caller("root", Role.ADMIN),
}


@dataclass(frozen=True)
class SecuredStack:
    scheduler: str
    worker: str
    store: str
    tokens_file: Path
    certificates: Path
    # By caller, as `CALLERS` names them.
    tokens: dict[str, str]
    logs: dict[str, Path]

    def identity(self, caller: str = "", token: str = "") -> Identity:
        """A client with the right certificate, and the token of a caller or none."""
        return read_identity(
            certificate=self.certificates / "client.pem",
            key=self.certificates / "client-key.pem",
            authorities=self.certificates / "ca.pem",
            token=token or self.tokens.get(caller, ""),
        )

    def client(self, caller: str = "") -> AsyncClient:
        return AsyncClient(self.scheduler, identity=self.identity(caller))

    @property
    def addresses(self) -> dict[str, str]:
        """Where each service of the contract is served."""
        return {
            "InferenceService": self.scheduler,
            "AdminService": self.scheduler,
            "WorkerService": self.worker,
            "KvStoreService": self.store,
        }


@asynccontextmanager
async def secured_stack(
    folder: Path, *more: str, pythons: Mapping[str, Path] | None = None
) -> AsyncIterator[SecuredStack]:
    """With `more` arguments for each service, and by name an interpreter of its own."""
    certificates = folder / "certificates"
    make_certificates(certificates)
    tokens_file, token_file = folder / "tokens.toml", folder / "services.token"
    tokens = {name: add_token(tokens_file, caller) for name, caller in CALLERS.items()}
    token_file.touch(0o600)
    token_file.write_text(tokens["services"] + "\n")
    arena = shared_memory_folder() / "arena"
    logs = {name: folder / f"{name}.log" for name in ("store", "worker", "scheduler")}
    security = [
        *("--tls-cert", str(certificates / "server.pem")),
        *("--tls-key", str(certificates / "server-key.pem")),
        *("--tls-ca", str(certificates / "ca.pem")),
        *("--tokens", str(tokens_file), "--token-file", str(token_file)),
        *("--reflection", "--listen", "127.0.0.1:0", "--model", str(small_model())),
        *more,
    ]
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, arena.parent, ignore_errors=True)

        async def start(name: str, module: str, *arguments: str) -> str:
            if pythons is None:
                service, address = await start_forked(
                    module, *security, *arguments, errors=logs[name]
                )
                cleanup.push_async_callback(_stop, service)
                return address
            with logs[name].open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *(pythons.get(name, sys.executable), "-m", module),
                    *(*security, *arguments),
                    cwd=ROOT,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                )
            cleanup.push_async_callback(_stop, process)
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            assert line.startswith(READY_PREFIX), logs[name].read_text()
            return line.removeprefix(READY_PREFIX).strip()

        store = await start(
            *("store", "kvstore_service", "--arena", str(arena)),
            *("--host-memory", "48MiB", "--chunk-tokens", "16"),
        )
        worker = await start(
            *("worker", "worker_service", "--kvstore", store),
            *("--device", "cpu", "--threads", "1", "--device-memory", "192MiB"),
        )
        scheduler = await start(
            *("scheduler", "scheduler_service", "--worker", worker),
            *("--tenant-requests", str(TENANT_REQUESTS), "--grace-seconds", "1"),
        )
        stack = SecuredStack(scheduler, worker, store, tokens_file, certificates, tokens, logs)
        async with stack.client() as client:
            await client.wait_ready(30)
        yield stack


async def _stop(process: ForkedService | asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await asyncio.wait_for(process.wait(), 30)
