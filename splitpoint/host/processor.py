"""This host's processor: its name and instruction sets, its compiler, and two libraries' settings.

The C++ compiler makes the kernels of CPU workers.

By default GNU OpenMP's threads spin for milliseconds at every barrier before they sleep. Next to
another worker, a benchmark or a build, spinning threads keep the threads they wait for from
running: products took up to twenty times as long (docs/lab/log.md). So every process spins briefly,
except a worker with cores of its own. Its threads spin from one call of a kernel to the next, some
0.1 ms. On a Xeon with AMX, where waking a thread is slow, they spin as long as GNU OpenMP lets
them: a step took 55 ms with brief spinning and 35 ms without a limit.

oneDNN compiles a kernel for each shape that it multiplies, which takes 0.5 MiB and milliseconds. By
default up to 1,024 of them stay in its own cache, and as many for each kind of operation and thread
in PyTorch's cache above it: a worker that saw prompts of many lengths grew by more than a gigabyte
(docs/lab/log.md). So both caches are bounded.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

# Tile products of bfloat16: Intel's AMX.
AMX_BF16 = "amx_bf16"
# Vectors of 512 bits.
AVX512 = "avx512f"
# Beginnings of the flags of arithmetic, on x86 and Arm. The other flags change with the kernel
# and its mitigations.
_ARITHMETIC = (
    *("amx", "avx", "f16c", "fma", "sse", "ssse"),
    *("asimd", "bf16", "fp", "i8mm", "smef", "sve"),
)


@cache
def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first processor. Empty if the kernel lists none."""
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                name, _, flags = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(flags.split())
    except OSError:
        pass
    return frozenset()


def vector_sets(flags: Collection[str] | None = None) -> frozenset[str]:
    """Return the flags of arithmetic, which decide what a numerical library computes with.

    `flags`: those of this host's processor by default.
    """
    given = instruction_sets() if flags is None else flags
    return frozenset(flag for flag in given if flag.startswith(_ARITHMETIC))


@cache
def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the first processor; empty if the kernel gives none."""
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "CPU part"):
                    return value.strip()
    except OSError:
        pass
    return ""


COMPILERS = ("c++", "g++", "clang++")


@cache
def compiler() -> tuple[str, ...] | None:
    """Return the C++ compiler's command: a path, then arguments; None if there is none.

    $CXX if it is set, which may have several words: `ccache g++`, `g++ -m64`.
    """
    given = _words(os.environ.get("CXX", ""))
    for program, *arguments in [given] if given else [[name] for name in COMPILERS]:
        path = shutil.which(program)
        if path is not None:
            return path, *arguments
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quotation mark
        return [text]


SPIN_COUNT = "GOMP_SPINCOUNT"
WAIT_POLICY = "OMP_WAIT_POLICY"
# Loops before a thread sleeps: some microseconds.
BRIEF = "1000"
# As long as Python takes between two kernels.
MODERATE = "10000"
# GNU OpenMP's own default: some milliseconds.
LONG = "300000"

# The environment before this module changed it.
_GIVEN = {name: os.environ[name] for name in (SPIN_COUNT, WAIT_POLICY) if name in os.environ}


def wait_briefly() -> None:
    """Limit spinning in this process; must come before torch is imported.

    Values that the user set stay.
    """
    if not _GIVEN:
        os.environ.setdefault(SPIN_COUNT, BRIEF)


def spin_count(*, threads: int, workers: int, cores: int, flags: Collection[str]) -> str:
    """Return how often threads of CPU workers spin before they sleep.

    Args:
        threads: compute threads of each worker.
        workers: CPU workers on this host.
        cores: cores that they may run on, together.
        flags: instruction sets of the processor.
    """
    have_own_cores = threads > 1 and threads * workers <= cores
    if not have_own_cores:
        return BRIEF
    return LONG if AMX_BF16 in flags else MODERATE


def spin_environment(count: str) -> Mapping[str, str]:
    """Return the environment that gives a child `count`. Empty if the user decided."""
    return {} if _GIVEN else {SPIN_COUNT: count}


def spins_long(environment: Mapping[str, str] = os.environ) -> bool | None:
    """Return how this process's threads wait; None if the user's own policy decides it."""
    if WAIT_POLICY in environment:
        return None
    count = environment.get(SPIN_COUNT, LONG)
    return int(count) >= int(LONG) if count.isdigit() else None


# Most kernels in a cache. A step uses some dozens, the same in every layer.
KERNELS = 128
# The caches of oneDNN, and of the layer between PyTorch and oneDNN.
CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_primitive_caches() -> None:
    """Bound them in this process; call before torch is imported. Values that the user set stay."""
    for name in CAPACITIES:
        os.environ.setdefault(name, str(KERNELS))
