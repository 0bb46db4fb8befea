"""The spin time of OpenMP's threads, by processor and by the cores of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from splitpoint.host.memory import available_cores
from splitpoint.host.processor import (
    BRIEF,
    LONG,
    MODERATE,
    SPIN_COUNT,
    WAIT_POLICY,
    instruction_sets,
    processor_name,
    spin_count,
    spins_long,
    vector_sets,
)

AMX, OTHER = ("avx512f", "amx_bf16"), ("avx512f",)
# What `splitpoint up` gives its workers, decided in a process of its own as there.
WORKERS = """
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack

stack = plan_stack(StackOptions(device="cpu", workers=2, threads=2, listen="127.0.0.1:0"))
print(*{worker.environment.get("GOMP_SPINCOUNT", "as it was") for worker in stack.workers})
"""


@pytest.mark.parametrize(
    ("threads", "workers", "flags", "wanted"),
    [
        (4, 2, AMX, LONG),
        (2, 2, AMX, LONG),
        (4, 3, AMX, BRIEF),
        (9, 1, AMX, BRIEF),
        (1, 1, AMX, BRIEF),
        (4, 2, OTHER, MODERATE),
        (4, 3, OTHER, BRIEF),
        (1, 1, OTHER, BRIEF),
    ],
)
def test_only_workers_with_cores_of_their_own_spin_long(
    threads: int, workers: int, flags: tuple[str, ...], wanted: str
) -> None:
    assert spin_count(threads=threads, workers=workers, cores=8, flags=flags) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, BRIEF), ({SPIN_COUNT: "77"}, "77"), ({WAIT_POLICY: "active"}, "None")],
)
def test_a_process_spins_briefly_unless_the_user_decided(
    given: dict[str, str], wanted: str
) -> None:
    code = "import os, worker_service; print(os.environ.get('GOMP_SPINCOUNT'))"
    assert run(code, given) == wanted


def test_instruction_sets_are_those_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu amx_bf16\n\nflags\t\t: fpu\n")
    assert instruction_sets(cpuinfo) == {"fpu", "amx_bf16"}
    assert instruction_sets(tmp_path / "none") == frozenset()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, True),
        ({SPIN_COUNT: BRIEF}, False),
        ({SPIN_COUNT: MODERATE}, False),
        ({SPIN_COUNT: LONG}, True),
        ({WAIT_POLICY: "x"}, None),
    ],
)
def test_a_process_knows_how_its_threads_wait(given: dict[str, str], wanted: bool | None) -> None:
    assert spins_long(given) is wanted


def test_a_processor_has_a_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A B-1 @ 2 GHz\n\nmodel name\t: C\n")
    assert processor_name(cpuinfo) == "A B-1 @ 2 GHz"
    assert processor_name(tmp_path / "none") == ""


def test_up_decides_for_its_workers_unless_the_user_did() -> None:
    decided = spin_count(threads=2, workers=2, cores=available_cores(), flags=instruction_sets())
    # Not in pytest's folder, whose name may be too long for sockets.
    with tempfile.TemporaryDirectory() as runtime:
        folder = {"XDG_RUNTIME_DIR": runtime}
        assert run(WORKERS, folder) == decided
        assert run(WORKERS, {**folder, SPIN_COUNT: "77"}) == "as it was"


def run(code: str, given: dict[str, str]) -> str:
    kept = {
        name: text for name, text in os.environ.items() if name not in (SPIN_COUNT, WAIT_POLICY)
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


# -- which of a processor's flags are those of arithmetic --------------------------------


def test_flags_of_arithmetic() -> None:
    x86 = "fpu sse4_2 ssse3 avx2 avx512_bf16 amx_tile fma f16c hypervisor ibpb smep sme bmi2"
    assert vector_sets(x86.split()) == set(x86.split()[:8])
    arm = "fp asimd asimdhp sve i8mm bf16 crc32 atomics dcpop"
    assert vector_sets(arm.split()) == set(arm.split()[:6])
    assert vector_sets() <= instruction_sets()
