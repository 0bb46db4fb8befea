"""The supervisor against real child processes: start, death, order of stopping, no survivors."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from splitpoint_cli.stack.child import (
    LogLine,
    ServiceCommand,
    ServiceExited,
    ServiceNotReady,
    ServiceNotStarted,
    child_environment,
)
from splitpoint_cli.stack.supervisor import Supervisor

FAKE = str(Path(__file__).parents[1] / "fake_service.py")


def fake(name: str, behave: str, log: Path, **bounds: Any) -> ServiceCommand:
    arguments = (FAKE, "--name", name.replace(" ", "-"), "--behave", behave, "--log", str(log))
    return ServiceCommand(name, arguments, **bounds)


def events(log: Path) -> list[str]:
    """What happened, without process ids."""
    return [line.rpartition(" ")[0] for line in log.read_text().splitlines()]


def pids(log: Path) -> list[int]:
    lines = log.read_text().splitlines()
    return [int(line.split()[-1]) for line in lines if line.startswith("start ")]


async def until_written(log: Path) -> None:
    """A fake that does not get ready has begun: before that it has no log."""
    await until(lambda: log.exists() and log.read_text().endswith("\n"))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_gone(processes: list[int], seconds: float = 60.0) -> list[int]:
    """Those still alive after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in processes if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing, which is what a start needs first."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    lowest_free = next(number for number in count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_start_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Supervisor(sys.executable, lambda _: None) as supervisor:
        with no_descriptor_left(), pytest.raises(ServiceNotStarted) as caught:
            await supervisor.start(fake("store", "serve", log))
        assert caught.value.message == "store cannot be started: Too many open files"
        again = await supervisor.start(fake("store", "serve", log))
        assert await again.ready()
    assert events(log) == ["start store", "stop store"]


async def test_ready_addresses_logs_and_order_of_stopping(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines: list[LogLine] = []
    async with Supervisor(sys.executable, lines.append) as supervisor:
        for name in ("store", "worker 0", "worker 1", "scheduler"):
            service = await supervisor.start(fake(name, "serve", log))
            address = await service.ready()
            assert address == f"unix:/fake/{name.replace(' ', '-')}"
    assert not wait_gone(pids(log), 0)
    stopped = [event for event in events(log) if event.startswith("stop")]
    assert stopped[0] == "stop scheduler"
    assert sorted(stopped[1:3]) == ["stop worker-0", "stop worker-1"]
    assert stopped[3] == "stop store"
    assert {line.service for line in lines} == {"store", "worker 0", "worker 1", "scheduler"}
    assert not any(line.important for line in lines), "INFO records are not important"


async def test_services_that_wait_for_the_same_requests_stop_together(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Supervisor(sys.executable, lambda _: None) as supervisor:
        for name in ("worker 0", "scheduler"):
            await (await supervisor.start(fake(name, "serve", log))).ready()
        gateway = fake("gateway", "stubborn", log, stop_seconds=3600, stops_with="scheduler")
        service = await supervisor.start(gateway)
        await service.ready()
        stopping = asyncio.create_task(supervisor.stop())
        await until(lambda: "stop scheduler" in events(log))
        # The scheduler did not wait for the gateway's end; the worker waits for both.
        assert service.process.returncode is None
        assert "stop worker-0" not in events(log)
        supervisor.hurry()
        await asyncio.wait_for(stopping, 60)


async def test_a_crash_before_ready_names_the_service_and_its_last_lines(tmp_path: Path) -> None:
    async with Supervisor(sys.executable, lambda _: None) as supervisor:
        service = await supervisor.start(fake("store", "crash", tmp_path / "log"))
        with pytest.raises(ServiceExited, match="store ended with status 7") as caught:
            await service.ready()
    assert "no luck today" in caught.value.tail[-1].text


async def test_a_service_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Supervisor(sys.executable, lambda _: None) as supervisor:
        service = await supervisor.start(fake("worker 0", "never-ready", log, ready_seconds=0.5))
        await until_written(log)
        with pytest.raises(ServiceNotReady, match=r"worker 0 was not ready after 0\.5 s"):
            await service.ready()
    assert not wait_gone(pids(log), 0)


async def test_a_death_is_reported_with_its_signal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Supervisor(sys.executable, lambda _: None) as supervisor:
        await (await supervisor.start(fake("store", "serve", log))).ready()
        await (await supervisor.start(fake("worker 0", "die-later", log))).ready()
        death = (await asyncio.wait_for(supervisor.next_exit(), 60)).death()
    assert death.service == "worker 0"
    assert "SIGKILL" in death.message
    assert not wait_gone(pids(log), 0)


async def test_sigterm_ignored_is_followed_by_sigkill(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines: list[LogLine] = []
    async with Supervisor(sys.executable, lines.append) as supervisor:
        service = await supervisor.start(fake("worker 0", "stubborn", log, stop_seconds=0.3))
        await service.ready()
    assert service.process.returncode == -signal.SIGKILL
    assert any("killed" in line.text for line in lines)


async def test_hurry_does_not_wait_for_the_bound(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Supervisor(sys.executable, lambda _: None) as supervisor:
        service = await supervisor.start(fake("worker 0", "stubborn", log, stop_seconds=3600))
        await service.ready()
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        supervisor.hurry()
        await asyncio.wait_for(stopping, 60)
    assert not wait_gone(pids(log), 0)


async def test_a_killed_child_takes_its_own_children_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Supervisor(sys.executable, lambda _: None) as supervisor:
        service = await supervisor.start(fake("worker 0", "parent-of-one", log))
        await service.ready()
        service.process.kill()
        await asyncio.wait_for(supervisor.next_exit(), 60)
    assert len(pids(log)) == 2
    assert not wait_gone(pids(log))


_PARENT = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {folders!r}
from test_cli_supervisor import fake
from splitpoint_cli.stack.supervisor import Supervisor

async def main():
    async with Supervisor(sys.executable, lambda line: None) as supervisor:
        for name in ("store", "worker 0", "scheduler"):
            behave = "stubborn" if name == "worker 0" else "serve"
            await (await supervisor.start(fake(name, behave, Path({log!r})))).ready()
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    here = Path(__file__).parent
    # `waiting` is in the folder of all tests.
    script = _PARENT.format(folders=[str(here), str(here.parents[1])], log=str(log))
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=child_environment({}),
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        children = pids(log)
        assert len(children) == 3
        assert all(is_alive(pid) for pid in children)
        parent.kill()
    assert not wait_gone(children)


def test_children_lead_their_own_process_groups(tmp_path: Path) -> None:
    """So a Ctrl-C in the terminal reaches the supervisor alone."""

    async def groups() -> set[int]:
        async with Supervisor(sys.executable, lambda _: None) as supervisor:
            service = await supervisor.start(fake("store", "serve", tmp_path / "log"))
            await service.ready()
            return {os.getpgid(service.process.pid), os.getpgid(0)}

    assert len(asyncio.run(groups())) == 2
