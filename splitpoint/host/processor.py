"""The instruction sets of this host's processor."""

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
                if name.strip() == "flags":
                    return frozenset(flags.split())
    except OSError:
        pass
    return frozenset()
