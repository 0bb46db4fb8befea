"""However a process with an LLM ends, nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_model import small_model

from splitpoint.config import SHARED_MEMORY, runtime_path

ROOT = Path(__file__).resolve().parents[2]
START = """
import os, signal, sys, threading
from splitpoint import LLM
llm = LLM(MODEL, device="cpu", host_memory="64MiB", device_memory="128MiB", threads=1)
long = {"max_tokens": 3000, "ignore_eos": True}
"""
LISTED = "print([e for e in os.listdir('/dev/shm') if str(os.getpid()) in e])\n"
# What the process does then, and its exit code.
ENDS = {
    "the interpreter ends": ("llm.generate('a', {'max_tokens': 2})", 0),
    "it exits while another thread waits": (
        "threading.Thread(target=llm.generate, args=(['a'] * 40, long), daemon=True).start(); "
        "threading.Event().wait(0.3); sys.exit(3)",
        3,
    ),
    "an exception ends it": ("raise SystemError('on purpose')", 1),
    "Ctrl-C ends it": (
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start(); "
        "llm.generate(['a'] * 40, long)",
        -signal.SIGINT,
    ),
    "SIGTERM ends it": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "kill -9 while it computes": (
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start(); "
        "llm.generate(['a'] * 40, long)",
        -signal.SIGKILL,
    ),
}


def script_of(end: str) -> str:
    """The whole script that does this with an LLM."""
    return START.replace("MODEL", repr(str(small_model()))) + end


def left_of(pid: int) -> list[str]:
    """Files and processes of the LLMs of a process."""
    name = f"llm-{pid}-"
    files = [path.name for path in SHARED_MEMORY.glob(f"splitpoint-*-{name}*")]
    files += [path.name for path in runtime_path("any").parent.glob(f"{name}*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name.encode() in command:
                files.append(command.decode())
    return files


# Imports everything once. The child that it forks goes on behind the loop, and ends as an
# interpreter does.
FORKING = """
import json, os, select, signal, sys
import splitpoint_offline.llm, splitpoint_offline.services
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        for number, path in enumerate(order["files"]):
            os.dup2(os.open(path, os.O_RDWR), number)
        break
    descriptor = os.pidfd_open(child)
    if not select.select([descriptor], [], [], 60)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    print(child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
exec(order["script"])
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process


@dataclass(frozen=True)
class Runner:
    """Runs scripts in processes that have imported all that an LLM needs."""

    forking: subprocess.Popen[str]
    folder: Path

    def __call__(self, script: str) -> tuple[int, subprocess.CompletedProcess[str]]:
        """Run a script in a process group of its own, as a shell would; return its process id."""
        printed, told = self.folder / "stdout", self.folder / "stderr"
        printed.touch()
        told.touch()
        order = {"script": script_of(script), "files": [os.devnull, str(printed), str(told)]}
        assert self.forking.stdin is not None
        assert self.forking.stdout is not None
        print(json.dumps(order), file=self.forking.stdin, flush=True)
        pid, code = map(int, self.forking.stdout.readline().split())
        return pid, subprocess.CompletedProcess(script, code, printed.read_text(), told.read_text())


@pytest.fixture
def run(forking: subprocess.Popen[str], tmp_path: Path) -> Runner:
    return Runner(forking, tmp_path)


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left(end: str, run: Runner) -> None:
    script, code = ENDS[end]
    pid, done = run(LISTED + script)
    check_left(pid, done, code)


def test_a_fresh_interpreter_leaves_nothing() -> None:
    """As users start one: what the forked ones import before is imported by the script itself."""
    script, code = ENDS["the interpreter ends"]
    with subprocess.Popen(
        [sys.executable, "-c", script_of(LISTED + script)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        out, told = process.communicate(timeout=150)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, told)
    check_left(process.pid, done, code)


def check_left(pid: int, done: subprocess.CompletedProcess[str], code: int) -> None:
    assert done.returncode == code, done.stderr
    assert f"-llm-{pid}-" in done.stdout
    deadline = time.monotonic() + 60
    while left_of(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left_of(pid) == []
    if code == 0:
        assert done.stderr == ""


def test_an_interrupted_call_ends_its_requests_and_the_model_goes_on(run: Runner) -> None:
    _, done = run(
        """
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    llm.generate(["a"] * 40, long)
except KeyboardInterrupt:
    print("interrupted")
print(len(llm.generate("def f(", {"max_tokens": 3, "ignore_eos": True})[0].token_ids))
del llm  # the last reference: it closes by itself
import time
for _ in range(500):
    if not [e for e in os.listdir("/dev/shm") if f"-llm-{os.getpid()}-" in e]:
        print("gone")
        break
    time.sleep(0.02)
"""
    )
    assert done.stdout.split() == ["interrupted", "3", "gone"], done.stderr
    assert done.returncode == 0


FORKED = """
import time
from multiprocessing import get_context
from splitpoint.errors import FailedPrecondition

def child(queue):
    try:
        llm.generate("a")
    except FailedPrecondition as error:
        queue.put(error.message)
    llm.close()

context = get_context("fork")
"""


def test_a_forked_process_leaves_the_model_to_its_parent(run: Runner) -> None:
    pid, done = run(
        FORKED
        + """
queue = context.SimpleQueue()
# Several: with gRPC's own support for forks one in ten died.
for target, arguments in (*[(int, ())] * 9, (child, (queue,))):
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    print(process.exitcode, end=" ", flush=True)
print(queue.get() if process.exitcode == 0 else "", flush=True)
if not os.fork():
    sys.exit()  # with all that runs at the end of an interpreter
os.wait()
print(len([e for e in os.listdir("/dev/shm") if f"-llm-{os.getpid()}-" in e]))
print(len(llm.generate("def f(", {"max_tokens": 3, "ignore_eos": True})[0].token_ids))
"""
    )
    first, *lines = done.stdout.splitlines()
    codes, message = first[:20], first[20:]
    assert codes == "0 " * 10, done.stderr
    assert message.startswith(f"this LLM belongs to process {pid}, ")
    assert lines == ["1", "3"]
    assert done.returncode == 0
    assert left_of(pid) == []


def test_a_forked_process_does_not_keep_the_files_of_a_killed_one(run: Runner) -> None:
    """The child lives on."""
    pid, done = run(
        """
child = os.fork()
if not child:
    for fd in (0, 1, 2):
        os.close(fd)
    threading.Event().wait(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    child = int(done.stdout)
    try:
        deadline = time.monotonic() + 60
        while left_of(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left_of(pid) == []
    finally:
        os.kill(child, signal.SIGKILL)
