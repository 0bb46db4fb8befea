"""`splitpoint up` under load while its arena is removed or truncated, and its sockets vanish.

Every answer is the right one, or an error that says to try again; the stack heals by itself.
A request that both workers died under is refused for good: it might be the cause.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from own_names import instance_name
from small_model import small_model
from test_e2e_cli import assert_nothing_left
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint.config import arena_path
from splitpoint.errors import Internal, Retryable, SplitpointError
from splitpoint.planning.plan import Residency
from splitpoint_cli.request.observed import Status, read_status

SECONDS = 90.0
PROMPTS = [f"class Queue{number}:\n    def __init__(self):\n" * 12 for number in range(3)]
TOKENS = 24
SUSPECT = "2 workers were lost while this request ran; it is not tried again"


@dataclass
class Load:
    """What clients saw that ask all the time."""

    address: str
    expected: list[list[int]]
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        with Client(self.address) as client:
            while not self.stop.is_set():
                which = chance.randrange(len(PROMPTS))
                residency = chance.choice([Residency.RESIDENT, Residency.STREAMED])
                try:
                    done = client.generate(
                        PROMPTS[which], max_tokens=TOKENS, ignore_eos=True, residency=residency
                    ).complete()
                except Retryable as error:
                    self.errors[error.message] += 1
                    self.stop.wait(0.1)
                except SplitpointError as error:
                    if isinstance(error, Internal) and error.message == SUSPECT:
                        self.errors[error.message] += 1
                        continue
                    self.wrong.append(f"{type(error).__name__}: {error.message}")
                else:
                    self.answers += 1
                    self.stop.wait(0.05)  # services that start again need processors, too
                    if list(done.token_ids) != self.expected[which]:
                        self.wrong.append(f"prompt {which} {residency}: {done.token_ids}")


@dataclass(frozen=True)
class Up:
    """A running `splitpoint up`; `said` grows with what it writes on stderr."""

    process: subprocess.Popen[str]
    address: str
    instance: str
    said: list[str]

    def ask(self, which: int) -> list[int]:
        with Client(self.address) as client:
            done = client.generate(PROMPTS[which], max_tokens=TOKENS, ignore_eos=True).complete()
        return list(done.token_ids)

    def until(self, condition: Callable[[Status], bool]) -> Status:
        """The first status of which that is true."""
        deadline = time.monotonic() + SECONDS
        with Client(self.address) as client:
            while True:
                found = read_status(client)
                if condition(found):
                    return found
                assert time.monotonic() < deadline, (found, self.said)
                time.sleep(0.1)


@contextmanager
def up(
    instance: str, *more: str, host_memory: str = "64MiB", device_memory: str = "128MiB"
) -> Iterator[Up]:
    """Two CPU workers with these options more; nothing of the stack is left behind."""
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--workers", "2"),
        *("--model", str(small_model()), "--threads", "1", "--host-memory", host_memory),
        *("--device-memory", device_memory, "--listen", "127.0.0.1:0", "--instance", instance),
        *more,
    ]
    with up_process(command) as process:
        printed = wait_until_up(process)
        address = printed.partition("scheduler  ")[2].splitlines()[0]
        said: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=said.extend, args=(process.stderr,))
        reader.start()
        yield Up(process, address, instance, said)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0, said
        reader.join()
    assert_nothing_left(instance)


@contextmanager
def load_on(stack: Up) -> Iterator[Load]:
    load = Load(stack.address, [stack.ask(which) for which in range(len(PROMPTS))])
    threads = [threading.Thread(target=load.run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()


def remove_arena(stack: Up) -> None:
    arena_path(stack.instance).unlink()


def remove_arena_folder(stack: Up) -> None:
    shutil.rmtree(arena_path(stack.instance).parent)


def halve_arena(stack: Up) -> None:
    path = arena_path(stack.instance)
    os.truncate(path, path.stat().st_size // 2)


def empty_arena(stack: Up) -> None:
    os.truncate(arena_path(stack.instance), 0)


HARMS: dict[Callable[[Up], None], str] = {
    remove_arena: "removed",
    halve_arena: "truncated",
    remove_arena_folder: "removed",
    empty_arena: "truncated",
}


def harm_and_heal(stack: Up, load: Load, harm: Callable[[Up], None]) -> None:
    """Until a store of another arena serves both workers, and requests succeed again."""

    def stores(found: Status) -> list[bytes]:
        return [store.stats.instance_id for store in found.stores if store.stats is not None]

    before = stores(stack.until(lambda found: found.is_complete and bool(stores(found))))
    load_before = load.answers
    harm(stack)
    healed = stack.until(
        lambda found: (
            found.is_complete
            and len(after := stores(found)) == 1
            and after != before
            and all(worker.telemetry and worker.telemetry.store_is_up for worker in found.workers)
        )
    )
    assert healed.stores[0].stats is not None
    assert healed.stores[0].stats.former_arena_loss == HARMS[harm]
    for which, expected in enumerate(load.expected):
        assert stack.ask(which) == expected
    stack.until(lambda _: load.answers > load_before)


@pytest.fixture(scope="module")
def stack() -> Iterator[Up]:
    """One stack for all harms: fewer than the deaths after which `up` gives a store up."""
    with up(instance_name("files")) as running:
        yield running


@pytest.mark.parametrize("harm", [remove_arena, halve_arena])
def test_requests_survive_what_is_done_to_files_in_use(
    harm: Callable[[Up], None], stack: Up
) -> None:
    with load_on(stack) as load:
        harm_and_heal(stack, load, harm)
    assert load.wrong == []
    assert load.answers > 0
    if harm is not halve_arena:  # its readers are ended by the kernel, and only its
        assert not load.errors[SUSPECT]


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_removed_and_truncated_arenas_again_and_again() -> None:
    """Every harm in random order, on one stack; `up` gives a store up that dies more often."""
    seed = int(os.environ.get("SPLITPOINT_SEED", time.time_ns() % 1_000_000))
    harms = [*HARMS]
    random.Random(seed).shuffle(harms)
    print(f"SPLITPOINT_SEED={seed}")
    with up(instance_name("harms")) as stack, load_on(stack) as load:
        for harm in harms:
            harm_and_heal(stack, load, harm)
            load.stop.wait(35)  # fewer than 5 deaths in 2 minutes
    print(f"{load.answers} answers, errors: {dict(load.errors)}")
    assert load.wrong == []
