"""`python -m MODULE` without its imports: what a process starts so is forked by one that has them.

After `install`, `subprocess` and asyncio start a program of this project, or of its tests by path,
by fork_server.py: a child of this process with its own arguments, environment, folder, descriptors,
process group and end. Everything else is started as ever: other programs, Python with other
options, and where variables differ that libraries read when they are imported.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fork_server import Orders

PR_SET_CHILD_SUBREAPER = 36
ROOT = str(Path(__file__).resolve().parent.parent)
# What it is now: a test may set another one.
PYTHON = sys.executable
# Libraries read these when they are imported. Those of which `splitpoint up` sets one for a worker,
# how long threads spin and how many kernels are kept, change no answer.
_READ_BY_IMPORTS = re.compile(
    "PYTHON(?!PATH|UNBUFFERED)|LD_|GLIBC_|MALLOC_|OMP_|KMP_|MKL_|OPENBLAS_|TORCH|CUDA|GRPC_|HF_"
    "|TRANSFORMERS_|LC_|LANG|TZ|CXX|MC_|VLLM|_?TYPER_|TERMINAL_WIDTH|FORCE_COLOR|PY_COLORS"
)
_lock = threading.Lock()


def install(orders_of: Callable[[Sequence[str]], Orders | None]) -> None:
    """Let `subprocess` ask for programs of which `orders_of` returns how to ask.

    It is given what follows `python`.
    """
    processes: Any = subprocess.Popen
    start = processes._execute_child
    parameters = inspect.signature(start)

    def start_or_ask(*given: Any) -> None:
        options = parameters.bind(*given).arguments
        if not (_is_plain(options) and (orders := orders_of(_words(options)))):
            start(*given)
            return
        environment = dict(os.environ if options["env"] is None else options["env"])
        if _imports_differ(orders.environment, environment):
            start(*given)
            return
        process = options["self"]
        process.pid = _ask(orders, options, environment)
        if not process.pid:  # a new interpreter says why
            start(*given)
            return
        process._child_created = True
        process._close_pipe_fds(
            *(options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(options[name] for name in ("errread", "errwrite")),
        )

    processes._execute_child = start_or_ask


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return what follows `python`."""
    return [*map(os.fsdecode, options["args"][1:])]


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Return whether it is `python PROGRAM ...`, and needs no process that is new."""
    command = options["args"]
    is_python = isinstance(command, list | tuple) and len(command) > 1 and str(command[0]) == PYTHON
    special = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    return (
        is_python
        and not any(options[name] for name in special)
        and options["umask"] < 0
        and options["close_fds"]
    )


def _imports_differ(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    names = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    return any(map(_READ_BY_IMPORTS.match, names)) or _path(before) != _path(now)


def _path(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH, without that of this project."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [folder for folder in folders if folder not in ("", ROOT)]


def _ask(orders: Orders, options: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    """Have a command started as a child of this process; return its process id."""
    streams = {0: options["p2cread"], 1: options["c2pwrite"], 2: options["errwrite"]}
    # What is not redirected is what this process has.
    given = {number: number if each == -1 else each for number, each in streams.items()}
    given |= {each: each for each in options["pass_fds"]}
    group = options.get("process_group")
    set_subreaper = ctypes.CDLL(None).prctl
    with _lock:
        set_subreaper(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            process_id, _ = orders.ask(
                *given.values(),
                command=_words(options),
                numbers=[*given],
                environment=environment,
                folder=os.fsdecode(options["cwd"] or os.getcwd()),
                is_session=bool(options["start_new_session"]),
                group=-1 if group is None else group,
            )
        finally:
            set_subreaper(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return process_id
