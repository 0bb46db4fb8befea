"""Fixtures that every test folder shares, and the guard against what tests leave behind."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Helpers (tiny_models.py, ...) are imported by plain name, from whatever folder.
sys.path += sorted({str(path.parent) for path in (ROOT / "tests").rglob("*.py")})
import fork_server  # noqa: E402
import forked_python  # noqa: E402
import reference_cache  # noqa: E402
from own_names import free_ports, instance_name, owner_of, shared_memory_folder  # noqa: E402
from redis_server import RedisServer  # noqa: E402

from splitpoint.config import SHARED_MEMORY, runtime_path  # noqa: E402

# Real engines of vLLM, in its own environment: `make vllm-test`.
collect_ignore = ["vllm/engine"]
# The choices of a process that outlive whatever made them; both need torch, which many tests
# do without.
KERNEL_MODULES = ("worker_service.kernels.choice", "worker_service.kernels.row_counts")

# Folders whose files take longest. They run first, so that all jobs of `make test` end together.
LONGEST_FIRST = ("e2e", "gateway", "models", "worker", "security", "kvstore", "cli")

# How long an example takes says how busy the machine is. A GPU machine may lack Hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis

    hypothesis.settings.register_profile(
        "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("suite")

# Two threads on two cores only fight when several processes test at once;
# child processes inherit this, and torch reads it when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell ignores Ctrl-C for what it starts in the background, and what tests start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The suite must behave the same without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
# Else each process that the suite starts compiles the project's sources, and pytest rewrites
# every assertion: half the time of a collection.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _place(item: pytest.Item) -> int:
    """Return the place of a test's folder in LONGEST_FIRST; other folders follow."""
    is_in = (item.nodeid.startswith(f"tests/{folder}/") for folder in LONGEST_FIRST)
    return next((place for place, found in enumerate(is_in) if found), len(LONGEST_FIRST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first, and long fault runs only when asked for: `-m chaos`, or by name."""
    items.sort(key=_place)
    if "chaos" in config.option.markexpr or any("::" in name for name in config.args):
        return
    long = [item for item in items if item.get_closest_marker("chaos") is not None]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item.get_closest_marker("chaos") is None]


def pytest_sessionstart() -> None:
    """Look for no garbage while tests are imported: nearly all that imports make stays."""
    gc.disable()
    forked_python.install(fork_server.orders_of)


def pytest_collection_finish() -> None:
    """Leave what the imports made out of the collections to come.

    Each module of tests ends with one, which took 0.4 s over torch and transformers.
    """
    gc.enable()
    gc.freeze()
    # Libraries see at the end of the process that nothing of theirs is left. Not before: pytest
    # ends with five collections.
    atexit.register(gc.unfreeze)


def pytest_unconfigure() -> None:
    """End the processes that all tests share."""
    fork_server.close_parents()


@pytest.fixture(autouse=True, scope="session")
def shared_references(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let all processes of this session use each other's references (tiny_models.py)."""
    reference_cache.use_folder_of(tmp_path_factory)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: products of tiny models gain nothing from a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shared_memory_entries() -> set[str]:
    """Names in /dev/shm that belong to this project."""
    return {entry.name for entry in SHARED_MEMORY.glob("splitpoint-*")}


def runtime_entries() -> set[str]:
    """Names of the runtime folders of stacks of this test process."""
    return {entry.name for entry in runtime_path("any").parent.glob(instance_name("*"))}


def in_use_elsewhere(name: str) -> bool:
    """Whether the entry is of another test process, or another stack on this machine maps it."""
    owner = owner_of(name)
    if owner is not None:
        return owner != os.getpid()  # also if that one was killed and left it
    ours = {os.getpid(), *own_processes()}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        try:
            if f"{SHARED_MEMORY}/{name}/" in (entry / "maps").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return False


def child_processes(pid: int | None = None) -> set[int]:
    """Living children of a process (default: this one), from /proc; zombies are not alive."""
    parent = os.getpid() if pid is None else pid
    children = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command may contain anything; the fields after its last `)` do not.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            children.add(int(entry.name))
    return children


def own_processes() -> set[int]:
    """Living children, and in place of the processes that fork (fork_server.py) their children."""
    parents = fork_server.parent_processes()
    return (child_processes() - parents).union(*map(child_processes, parents))


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """Fail the module that leaves a file of a stack or a child process behind.

    Fixtures that start processes are therefore of module scope at most.
    """
    shm_before, children_before = shared_memory_entries(), own_processes()
    runtime_before = runtime_entries()
    yield
    gc.collect()
    deadline = time.monotonic() + 30
    while True:
        files = {n for n in shared_memory_entries() - shm_before if not in_use_elsewhere(n)}
        folders = runtime_entries() - runtime_before
        children = own_processes() - children_before
        # Anything may need a moment to go; nothing may stay.
        if not (files or folders or children) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not files, f"left in /dev/shm: {sorted(files)}"
    assert not folders, f"left beside sockets: {sorted(folders)}"
    assert not children, f"still running: {sorted(children)}"


def _kernels_in_use() -> tuple[Any, Any]:
    """Return the CPU kernels and row counts of this process; None where torch is not loaded."""
    choice, counts = (sys.modules.get(name) for name in KERNEL_MODULES)
    return choice and choice.in_use(), counts and counts.in_use()


def _use_kernels(choice: Any, counts: Any) -> None:
    """Use these from now on, as far as their modules are loaded."""
    chosen_in, counted_in = (sys.modules.get(name) for name in KERNEL_MODULES)
    if chosen_in is not None:
        chosen_in.use(choice)
    if counted_in is not None:
        counted_in.use_row_counts(counts or {})


@pytest.fixture(autouse=True, scope="module")
def default_kernels() -> Iterator[None]:
    """Keep the kernels that a module's fixtures choose out of the modules behind it."""
    yield
    _use_kernels(None, None)


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Keep kernels and threads that a test chooses, or a worker in it, out of the tests behind."""
    before, torch = _kernels_in_use(), sys.modules.get("torch")
    threads = torch and torch.get_num_threads()
    yield
    _use_kernels(*before)
    if torch is not None:
        torch.set_num_threads(threads)


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A private folder on tmpfs for an arena, gone afterwards."""
    folder = shared_memory_folder()
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running Redis (Valkey) of this test alone."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def socket_address(tmp_path: Path) -> str:
    """A fresh `unix:` address (pytest's folders are short enough for sun_path)."""
    path = tmp_path / "s"
    if len(str(path)) > 100:
        pytest.fail(f"temporary path too long for a socket: {path}")
    return f"unix:{path}"


@pytest.fixture
def free_port() -> int:
    """A loopback port for a service of this test process."""
    return free_ports(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the tiny Llama. No test changes it."""
    from tiny_models import write_tiny

    return write_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The checkpoint that ships with the project."""
    return ROOT / "models" / "stdlib-llama"
