"""Services that die under a running `splitpoint up`: back after a pause, or given up."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from own_names import instance_name
from test_cli_supervisor import pids, wait_gone
from test_cli_up import SECONDS, assert_nothing_left, stack
from up_process import wait_until_up
from waiting import wait_until

from splitpoint.config import arena_path, make_private, remove_tree, runtime_path
from splitpoint.errors import Cancelled, FailedPrecondition, NotFound
from splitpoint_cli.stack.child import (
    ServiceCommand,
    ServiceExited,
    ServiceNotStarted,
    child_environment,
)
from splitpoint_cli.stack.down import stack_at
from splitpoint_cli.stack.instance import (
    RunningStack,
    exclusive,
    predecessors_gone,
    running_process,
)
from splitpoint_cli.stack.keeper import GiveUp, Keeper, RestartAfter, RestartLimits, RestartPolicy
from splitpoint_cli.stack.notes import read_given_up


def lives(log: Path, name: str) -> list[int]:
    """Process ids of every life of a service, first one first."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [int(line[2]) for line in lines if line[:2] == ["start", name]]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What was printed on stderr up to the line with `text`."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was never printed:\n{seen}")


# -- the policy, with a clock that is a list of numbers ---------------------------------


def delays(policy: RestartPolicy, times: list[float], served: float = 0.0) -> list[float]:
    decisions = [policy.died(at, served_seconds=served) for at in times]
    assert all(isinstance(decision, RestartAfter) for decision in decisions)
    return [decision.seconds for decision in decisions if isinstance(decision, RestartAfter)]


def test_pauses_double_up_to_the_longest() -> None:
    # A death every 40 s never makes 5 within 120 s.
    times = [40.0 * i for i in range(9)]
    assert delays(RestartPolicy(RestartLimits()), times) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_good_minute_starts_over() -> None:
    policy = RestartPolicy(RestartLimits())
    assert delays(policy, [0, 40, 80], served=30) == [0.5, 1, 2]
    assert delays(policy, [150], served=59.9) == [4]
    assert delays(policy, [220], served=60) == [0.5]
    assert delays(policy, [260], served=1) == [1]


def test_the_fifth_death_within_two_minutes_is_the_last() -> None:
    policy = RestartPolicy(RestartLimits())
    delays(policy, [0, 30, 60, 90])
    decision = policy.died(119.9, served_seconds=0)
    assert decision == GiveUp("given up after 5 deaths within 120 s", retry_seconds=300)


def test_one_that_was_given_up_is_tried_again_more_and_more_rarely() -> None:
    policy = RestartPolicy(RestartLimits())
    delays(policy, [0, 1, 2, 3])
    retries, at = [], 4.0
    decision = policy.died(at, served_seconds=0)
    for _ in range(4):
        assert isinstance(decision, GiveUp)
        retries.append(decision.retry_seconds)
        at += decision.retry_seconds
        decision = policy.died(at, served_seconds=59)
    assert retries == [300, 600, 1200, 1800]
    assert decision == GiveUp("given up again", retry_seconds=1800)
    # A good minute, and it is one like the others.
    assert policy.died(at + 70, served_seconds=60) == RestartAfter(0.5, recent_deaths=1)


def test_a_death_two_minutes_ago_does_not_count() -> None:
    policy = RestartPolicy(RestartLimits())
    delays(policy, [0, 30, 60, 90])
    decision = policy.died(120, served_seconds=0)
    assert decision == RestartAfter(8, recent_deaths=4)


def test_no_limits_means_no_restart() -> None:
    assert RestartPolicy(None).died(0, served_seconds=1e9) == GiveUp("")


def test_a_restarted_service_keeps_the_port_it_had() -> None:
    command = ServiceCommand("scheduler", ("-m", "x", "--listen", "127.0.0.1:0", "--worker", "y"))
    again = command.listening_on("127.0.0.1:4711")
    assert again.arguments == ("-m", "x", "--listen", "127.0.0.1:4711", "--worker", "y")
    assert ServiceCommand("fake", ("x",)).listening_on("unix:/y").arguments == ("x",)


# -- real children ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["store", "worker-1", "scheduler"])
def test_a_killed_service_comes_back(tmp_path: Path, name: str) -> None:
    log, instance = tmp_path / "log", instance_name(f"back-{name}")
    with stack(log, instance, pause="0.05") as process:
        wait_until_up(process)
        os.kill(lives(log, name)[0], signal.SIGKILL)
        printed = read_until(process, "ready again")
        assert f"{name.replace('-', ' ')} ended by SIGKILL; starts again in 0.05 s" in printed
        first, second = lives(log, name)
        assert first != second
        assert Path(f"/proc/{second}").exists()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    # The successor stands where the first one stood in the order of stopping.
    stops = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("stop")]
    assert len(stops) == 4
    assert (stops[0], stops[-1]) == ("scheduler", "store")
    assert_nothing_left(log, instance)


def test_a_worker_that_cannot_come_back_is_given_up_and_the_last_one_ends_the_stack(
    tmp_path: Path,
) -> None:
    log, instance = tmp_path / "log", instance_name("give-up")
    runtime = runtime_path(instance)
    with stack(log, instance, worker="crash-again", pause="0.02") as process:
        wait_until_up(process)
        os.kill(lives(log, "worker-0")[0], signal.SIGKILL)
        printed = read_until(process, "given up")
        assert "worker 0 ended with status 7 (death 4); starts again in 0.16 s" in printed
        assert (
            "worker 0 ended with status 7, given up after 5 deaths within 120 s; "
            "the stack serves without it, tries it again in 5 min"
        ) in printed
        # Shown when written, and not once more at the end; what was not shown, is now.
        assert printed.count("no luck today") == 4
        assert printed.count("fake: starting") == 1
        [address] = [f"unix:{path}" for path in told(runtime)]
        [given_up] = read_given_up([address]).values()
        assert "given up after 5 deaths" in given_up.why
        assert 200 < given_up.retry_seconds <= 300
        os.kill(lives(log, "worker-1")[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert [len(lives(log, name)) for name in ("worker-0", "worker-1")] == [5, 5]
    assert "worker 1 ended with status 7, given up after 5 deaths within 120 s\n" in errors
    assert_nothing_left(log, instance)


def test_a_stack_that_cannot_note_a_given_up_worker_goes_on(tmp_path: Path) -> None:
    log, instance = tmp_path / "log", instance_name("no-note")
    with stack(log, instance, worker="crash-again", pause="0.02") as process:
        wait_until_up(process)
        (runtime_path(instance) / "given-up.new").mkdir()
        os.kill(lives(log, "worker-0")[0], signal.SIGKILL)
        read_until(process, "the list of given-up workers cannot be written")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert_nothing_left(log, instance)


def told(runtime: Path) -> list[str]:
    """Socket files of the workers that `up` says to have given up, once it says so."""
    deadline = time.monotonic() + SECONDS
    while not (path := runtime / "given-up.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [worker["address"].removeprefix("unix:") for worker in json.loads(path.read_text())]


def test_a_worker_that_was_given_up_comes_back_later(tmp_path: Path) -> None:
    log, instance = tmp_path / "log", instance_name("later")
    with stack(log, instance, worker="crash-6-again", pause="0.02", retry="0.05") as process:
        wait_until_up(process)
        os.kill(lives(log, "worker-0")[0], signal.SIGKILL)
        printed = read_until(process, "ready again")
        assert printed.count("the stack serves without it") == 3
        assert "given up again; the stack serves without it, tries it again in" in printed
        assert len(lives(log, "worker-0")) == 8
        wait_until(lambda: not (runtime_path(instance) / "given-up.json").exists())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert_nothing_left(log, instance)


def test_a_store_that_cannot_come_back_ends_the_stack(tmp_path: Path) -> None:
    log, instance = tmp_path / "log", instance_name("no-store")
    with stack(log, instance, store="crash-again", pause="0.02") as process:
        wait_until_up(process)
        os.kill(lives(log, "store")[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "store ended with status 7, given up after 5 deaths within 120 s\n" in errors
    assert_nothing_left(log, instance)


def test_no_restart_ends_with_the_first_death(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("never"), pause="never") as process:
        wait_until_up(process)
        os.kill(lives(log, "store")[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert errors.endswith("splitpoint: UNAVAILABLE: store ended by SIGKILL\n")
    assert len(lives(log, "store")) == 1
    assert_nothing_left(log, instance_name("never"))


def test_ctrl_c_during_a_pause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("pause"), pause="3600") as process:
        wait_until_up(process)
        os.kill(lives(log, "store")[0], signal.SIGKILL)
        read_until(process, "starts again in 3600 s")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert len(lives(log, "store")) == 1
    assert_nothing_left(log, instance_name("pause"))


def test_ctrl_c_during_a_restart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("restart"), worker="never-ready-again", pause="0.02") as process:
        wait_until_up(process)
        os.kill(lives(log, "worker-0")[0], signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while len(lives(log, "worker-0")) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert len(lives(log, "worker-0")) == 2
    assert_nothing_left(log, instance_name("restart"))


def down(*options: str) -> subprocess.CompletedProcess[str]:
    """Run `splitpoint down` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "down", *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=child_environment({}),
        check=False,
    )


def test_down_clears_what_a_killed_up_left(tmp_path: Path) -> None:
    log, instance = tmp_path / "log", instance_name("down")

    with stack(log, instance) as process:
        wait_until_up(process)
        process.kill()
        process.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while (done := down("--instance", instance)).returncode == 1 and time.monotonic() < deadline:
        assert "still stop" in done.stderr
    try:
        assert done.returncode == 0, done.stderr
        assert f"splitpoint arena rm {instance}" in done.stderr
    finally:
        remove_tree(arena_path(instance).parent)
    again = down("--instance", instance)
    assert again.returncode == 2
    assert f"NOT_FOUND: no stack named {instance} is running" in again.stderr
    assert not runtime_path(instance).exists()


def test_down_finds_a_named_stack_by_its_address(tmp_path: Path) -> None:
    log, instance = tmp_path / "log", instance_name("found")

    with stack(log, instance) as process:
        wait_until_up(process)
        address = f"unix:{runtime_path(instance)}/public.sock"
        other = down("--address", "unix:/nothing/listens/here.sock")
        assert other.returncode == 2
        assert f"{instance} at {address}" in other.stderr
        assert process.poll() is None
        done = down("--address", address)
        assert done.returncode == 0, done.stderr
        assert f"stopping {instance} " in done.stderr
        process.communicate(timeout=SECONDS)
    assert_nothing_left(log, instance)
    assert instance not in down("--address", address).stderr


def test_down_compares_hosts_and_ports() -> None:
    mine = RunningStack("mine", 1, "127.0.0.1:50999")
    named = replace(mine, name="port-50999")
    other = replace(mine, name="other", address="127.0.0.2:50999")
    starting = replace(named, address="")
    assert stack_at("localhost:50999", [mine, other]) == mine
    assert stack_at("127.0.0.2:50999", [mine, other]) == other
    beside = replace(mine, address="[::1]:50999")
    assert stack_at("127.0.0.1:50999", [beside, mine]) == mine
    assert stack_at("unix:/a/public.sock", [mine, other]) is None
    assert stack_at("127.0.0.2:50998", [mine, other]) is None
    assert stack_at("127.0.0.2:50999", [mine]) is None
    everywhere = replace(mine, address="[::]:50999")
    assert stack_at("127.0.0.2:50999", [everywhere]) == everywhere
    assert stack_at("[::1]:50999", [mine, other]) == mine
    assert stack_at("127.0.0.2:50999", [starting]) is None
    with pytest.raises(NotFound, match=r"^no stack listens at 127.0.0.2:50999; .*port-50999 at"):
        stack_at("127.0.0.2:50999", [named])
    with pytest.raises(NotFound, match=r"^more than one stack listens at 0.0.0.0:50999; "):
        stack_at("0.0.0.0:50999", [mine, other])


class FailingSupervisor:
    """Cannot start anything, as a system without a process to spare."""

    def __init__(self, dead: object) -> None:
        self.dead: asyncio.Queue[object] = asyncio.Queue()
        self.dead.put_nowait(dead)

    async def next_exit(self) -> object:
        return await self.dead.get()

    async def start(self, command: ServiceCommand) -> object:
        raise ServiceNotStarted(command.name, "Resource temporarily unavailable")


class DeadService:
    name = "store"
    address = ""
    served_seconds = 0.0
    command = ServiceCommand("store", ())

    def death(self, and_then: str = "") -> ServiceExited:
        return ServiceExited("store", -9, (), and_then=and_then)


async def test_a_fork_that_fails_is_one_more_death() -> None:
    said: list[str] = []
    limits = RestartLimits(first_delay_seconds=0.01)
    keeper = Keeper(
        FailingSupervisor(DeadService()),  # type: ignore[arg-type]
        limits,
        lambda _, text: said.append(text),
        workers={},
        show_tail=lambda _: None,
    )
    async with asyncio.timeout(30):
        death = await keeper.run()
    assert "cannot be started" in death.message
    assert sum("cannot be started" in text for text in said) >= 2


# -- what a killed `up` leaves ----------------------------------------------------------


def sockets(instance: str) -> set[str]:
    return {path.name for path in runtime_path(instance).glob("*.sock")}


def test_the_next_up_waits_for_services_of_a_killed_one(tmp_path: Path) -> None:
    old, new, instance = tmp_path / "old", tmp_path / "new", instance_name("next")
    with stack(old, instance, worker="drain") as first:
        wait_until_up(first)
        first.kill()
        with stack(new, instance) as second:
            read_until(second, "its services still stop")
            assert not new.exists(), "nothing is started beside them"
            old.with_suffix(".drained").touch()
            wait_until_up(second)
            assert not wait_gone(pids(old), 0)
            wanted = {"store.sock", "worker-0.sock", "worker-1.sock", "scheduler.sock"}
            assert sockets(instance) >= wanted
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=SECONDS)
        assert second.returncode == 0
    assert_nothing_left(new, instance)


def test_ctrl_c_while_waiting_leaves_them_alone(tmp_path: Path) -> None:
    log, instance = tmp_path / "log", instance_name("wait")
    with stack(log, instance, worker="drain") as first:
        wait_until_up(first)
        first.kill()
        with stack(tmp_path / "new", instance) as second:
            read_until(second, "its services still stop")
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=SECONDS)
        assert second.returncode == 130
        assert sockets(instance) >= {"worker-0.sock", "worker-1.sock"}
        assert arena_path(instance).exists()
        log.with_suffix(".drained").touch()
    with stack(tmp_path / "last", instance) as third:
        wait_until_up(third)
        third.send_signal(signal.SIGINT)
        third.communicate(timeout=SECONDS)
    assert_nothing_left(tmp_path / "last", instance)


async def test_services_that_never_end_are_named(tmp_path: Path) -> None:
    def said(text: str) -> None:
        words.append(text)

    words: list[str] = []
    runtime = tmp_path / "run"
    with exclusive(runtime, "it") as held:
        await predecessors_gone(held.services, runtime, "it", stop=asyncio.Event(), say=said)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "input()"), stdin=subprocess.PIPE, pass_fds=(held.services,)
        )
    (runtime / "store.sock").touch()
    try:
        assert not words
        with exclusive(runtime, "it") as held:
            stop = asyncio.Event()
            with pytest.raises(FailedPrecondition, match=rf"killed.*processes {child.pid}\)"):
                await predecessors_gone(
                    held.services, runtime, "it", stop=stop, say=said, seconds=0.0
                )
            stop.set()
            with pytest.raises(Cancelled):
                await predecessors_gone(held.services, runtime, "it", stop=stop, say=said)
            assert (runtime / "store.sock").exists()
            await asyncio.wait_for(child.communicate(b"\n"), SECONDS)
            await predecessors_gone(held.services, runtime, "it", stop=stop, say=said)
            assert not (runtime / "store.sock").exists()
        assert len(words) == 2
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def test_down_between_taking_the_lock_and_writing_the_id(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    make_private(runtime)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with (runtime / "lock").open("w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert running_process(runtime, seconds=0.1) is None
        # The id that a killed `up` had written is that of no process.
        lock.write(f"{gone.pid:10}")
        lock.flush()
        assert running_process(runtime, seconds=0.1) is None
    with exclusive(runtime, "it"):
        assert running_process(runtime) == os.getpid()
    assert running_process(runtime) is None


# -- output without a reader -----------------------------------------------------------


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_reader_that_died_stops_neither_restarts_nor_the_end(
    tmp_path: Path, log_format: str
) -> None:
    log, instance = tmp_path / "log", instance_name(f"unread-{log_format}")
    with stack(log, instance, pause="0.1", log_format=log_format) as process:
        wait_until_up(process)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        for life in (1, 2):
            os.kill(lives(log, "scheduler")[-1], signal.SIGKILL)
            wait_until(lambda life=life: len(lives(log, "scheduler")) > life)  # type: ignore[misc]
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
        process.stdout = process.stderr = None  # nothing is left to read
    assert process.returncode == 0
    assert_nothing_left(log, instance)


def test_a_reader_that_stopped_reading_stops_neither(tmp_path: Path) -> None:
    """A full pipe blocks its writers."""
    log, instance = tmp_path / "log", instance_name("full")
    with stack(log, instance, pause="0.1") as process:
        wait_until_up(process)
        fill(process.pid)
        os.kill(lives(log, "scheduler")[-1], signal.SIGKILL)
        wait_until(lambda: len(lives(log, "scheduler")) > 1)
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
    assert process.returncode == 0
    assert_nothing_left(log, instance)


def fill(pid: int) -> None:
    """Fill the pipe that is the process's stderr."""
    pipe = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(pipe, bytes(1 << 12))
    except BlockingIOError:
        pass
    finally:
        os.close(pipe)
