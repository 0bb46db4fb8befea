"""The scheduler process: arguments, READY line, key files, signals."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scheduler_doubles import MODEL_FOLDER, ROOT, WorkerDouble, answer

from scheduler_service.__main__ import read_server_key
from splitpoint.client import AsyncClient
from splitpoint.errors import InvalidArgument, PermissionDenied


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scheduler_service",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def test_a_process_serves_and_drains(tmp_path: Path) -> None:
    worker = WorkerDouble()
    worker_address = await worker.start()
    address = f"unix:{tmp_path}/s"
    arguments = ["--listen", address, "--worker", worker_address, "--model", str(MODEL_FOLDER)]
    key = tmp_path / "key"
    async with process(*arguments, "--server-key-file", str(key)) as scheduler:
        assert scheduler.stdout is not None
        assert scheduler.stderr is not None
        line = await asyncio.wait_for(scheduler.stdout.readline(), 30)
        assert line.decode() == f"READY {address}\n"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        async with AsyncClient(address) as client:
            await client.wait_ready(20)
            made = await client.generate([5], max_tokens=4).complete()
            assert list(made.token_ids) == answer([5], 4)
        scheduler.terminate()
        assert await asyncio.wait_for(scheduler.wait(), 20) == 0
        log = (await scheduler.stderr.read()).decode()
        assert "draining" in log
        assert "Traceback" not in log
    await worker.kill()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--listen", "0.0.0.0:0"], "loopback"),
        (["--listen", "nonsense"], "not an address"),
        (["--listen", "127.0.0.1:0", "--worker", "nonsense"], "not an address"),
        (["--listen", "127.0.0.1:0", "--worker", "unix:/w"], "given twice"),
        (["--listen", "127.0.0.1:0", "--queue-capacity", "-1"], "at least 0"),
        (["--listen", "127.0.0.1:0", "--server-key-file", "/nowhere/key"], "cannot be made"),
    ],
)
async def test_wrong_arguments_are_refused(arguments: list[str], word: str) -> None:
    base = ["--worker", "unix:/w", "--model", str(MODEL_FOLDER)]
    async with process(*base, *arguments) as refused:
        _, log = await asyncio.wait_for(refused.communicate(), 30)
        assert refused.returncode == 2
        assert word in log.decode()
        assert "Traceback" not in log.decode()


def test_a_key_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill between any two steps of creating a key, the next start has one."""
    path = tmp_path / "key"

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("os.link", die)
        with pytest.raises(Killed):
            read_server_key(str(path))
    assert not path.exists()
    # An unfinished key file of a killed process with the same id.
    (tmp_path / f"key.{os.getpid()}.new").touch(0o600)
    key = read_server_key(str(path))
    assert len(key) == 32
    assert read_server_key(str(path)) == key


def test_server_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = read_server_key(str(path))
    assert len(made) == 32
    assert read_server_key(str(path)) == made
    assert read_server_key(None) != read_server_key(None)
    path.chmod(0o644)
    with pytest.raises(PermissionDenied, match="0644"):
        read_server_key(str(path))
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="5 bytes"):
        read_server_key(str(path))
    os.unlink(path)
    path.mkdir()
    path.chmod(0o700)
    with pytest.raises(InvalidArgument, match="is not a file"):
        read_server_key(str(path))
