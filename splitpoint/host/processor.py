"""The name and the instruction sets of this host's processor."""

from __future__ import annotations

from collections.abc import Collection
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
