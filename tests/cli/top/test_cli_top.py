"""`splitpoint top` on a real stack, in a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from own_names import instance_name
from small_model import small_model
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint_cli.stack.child import child_environment

PROGRAM = [sys.executable, "-m", "splitpoint_cli"]
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


@dataclass
class Stack:
    address: str
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    command = [
        *PROGRAM,
        "up",
        *("--model", str(small_model())),
        *("--listen", "127.0.0.1:0", "--instance", instance_name("top")),
        *("--workers", "2", "--threads", "1", "--link-rate", "50MB", "--page-tokens", "16"),
        *("--host-memory", "64MiB", "--device-memory", "256MiB"),
    ]
    with up_process(command) as process:
        printed = wait_until_up(process)
        address = printed.split("scheduler")[1].split()[0]
        yield Stack(address, process)
        process.send_signal(signal.SIGINT)
        process.wait(60)


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, "top", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment({}),
        check=False,
    )


def test_a_snapshot_of_a_stack_under_load(stack: Stack) -> None:
    with Client(stack.address) as client:
        client.wait_ready()
        generation = client.generate(
            "def load():\n    pass\n" * 40, max_tokens=3000, ignore_eos=True
        )
        next(generation)
        done = top("--address", stack.address, "--once", "--json", "--interval", "1")
        generation.close()
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["status"]["complete"]
    assert told["interval_seconds"] >= 1
    assert told["status"]["scheduler"]["running_count"] == 1
    rates = told["rates"]["scheduler"]
    assert rates["generated_per_second"] > 0
    assert rates["itl_seconds"] > 0
    busy, idle = sorted(
        told["rates"]["workers"].values(), key=lambda worker: -worker["steps_per_second"]
    )
    assert busy["steps_per_second"] > 0
    assert busy["generated_per_second"] == pytest.approx(busy["steps_per_second"], rel=0.5)
    assert idle["steps_per_second"] == idle["generated_per_second"] == 0
    for worker in (busy, idle):
        assert (worker["link_limit"], worker["link_limit_is"]) == (50e6, "emulated")
        assert 0 <= worker["link_in"] < 100e6
        assert 0 <= worker["link_in_share"] <= 1
        assert 0 <= worker["compute_share"] <= 1
    (store,) = told["rates"]["stores"].values()
    assert store["evicted_per_second"] >= 0


def test_a_snapshot_for_people(stack: Stack) -> None:
    done = top("--address", stack.address, "--once")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"splitpoint top  {stack.address}  small-llama  up ")
    for part in (
        "worker 0  ready",
        "worker 1  ready",
        "MB/s (emulated)",
        "free ",
        "queue 0 waiting",
    ):
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_what_makes_no_sense_is_said(stack: Stack) -> None:
    done = top("--address", stack.address)
    assert (done.returncode, "add --once" in done.stderr) == (2, True)
    done = top("--address", stack.address, "--json")
    assert (done.returncode, "add --once" in done.stderr) == (2, True)
    done = top("--address", "127.0.0.1:1", "--once")
    assert done.returncode == 3
    assert "UNAVAILABLE" in done.stderr


# -- the live view ------------------------------------------------------------------------------


@dataclass
class Terminal:
    """A pseudo terminal with `top` in it, and everything that it wrote."""

    keyboard: int
    screen: int
    process: subprocess.Popen[bytes]
    written: bytes = field(default=b"")

    def wait_for(self, text: str, seconds: float = 40) -> None:
        """Until it was written after what was waited for before."""
        deadline = time.monotonic() + seconds
        while text.encode() not in self.written:
            assert time.monotonic() < deadline, self.written.decode(errors="replace")
            self._read(0.2)
        self.written = self.written.rpartition(text.encode())[2]

    def press(self, key: str) -> None:
        os.write(self.keyboard, key.encode())

    def end(self) -> bytes:
        """Its last words, once it has ended."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.written

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.keyboard], [], [], seconds)
        if ready:
            self.written += os.read(self.keyboard, 65536)
        return bool(ready)


@contextmanager
def terminal(address: str, kind: str = "xterm-256color") -> Iterator[Terminal]:
    keyboard, screen = pty.openpty()
    termios.tcsetwinsize(screen, (40, 100))
    before = termios.tcgetattr(screen)
    process = subprocess.Popen(
        [*PROGRAM, "top", "--address", address, "--interval", "0.3"],
        stdin=screen,
        stdout=screen,
        stderr=screen,
        env=child_environment({"TERM": kind, "PYTHONUTF8": "1"}),
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    try:
        yield Terminal(keyboard, screen, process)
        assert termios.tcgetattr(screen) == before, "the terminal is not as it was"
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)
        os.close(screen)


def _take_terminal() -> None:
    """So that Ctrl-C typed there becomes a signal, also where background jobs ignore it."""
    import fcntl

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x03", 0)])
def test_keys_that_end_it(stack: Stack, key: str, code: int) -> None:
    with terminal(stack.address) as shown:
        shown.wait_for("steps/s")
        shown.wait_for("q quits")
        shown.press("x")  # means nothing
        shown.wait_for("q quits")
        shown.press(key)
        last = shown.end()
        assert shown.process.returncode == code
        assert last.rstrip().endswith(b"\x1b[?25h") or LEAVE_SCREEN in last
        assert b"Traceback" not in last


def test_a_signal_puts_the_terminal_back(stack: Stack) -> None:
    with terminal(stack.address) as shown:
        shown.wait_for("q quits")
        shown.process.terminate()
        assert LEAVE_SCREEN in shown.end()
        assert shown.process.returncode == 128 + signal.SIGTERM


def test_a_terminal_that_cannot_be_drawn_over(stack: Stack) -> None:
    with terminal(stack.address, "dumb") as shown:
        shown.wait_for("q quits")
        shown.wait_for("q quits")
        assert ENTER_SCREEN not in shown.written
        shown.press("q")
        shown.end()
        assert shown.process.returncode == 0


def test_a_scheduler_that_goes_away(stack: Stack) -> None:
    """The last one: it stops the stack."""
    with terminal(stack.address) as shown:
        shown.wait_for("q quits")
        stack.process.send_signal(signal.SIGINT)
        stack.process.wait(60)
        shown.wait_for("the scheduler is away for")
        shown.wait_for("as last seen")
        shown.press("q")
        shown.end()
        assert shown.process.returncode == 0
