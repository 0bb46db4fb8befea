"""The name and the instruction sets of this host's processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path

# Tile products of bfloat16: Intel's AMX.
AMX_BF16 = "amx_bf16"


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
