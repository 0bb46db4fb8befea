"""Shared code of services and clients. Imports no service and never needs a GPU.

`splitpoint.LLM` and `splitpoint.SamplingParams` are `splitpoint_offline`'s: a model in this
process. They are loaded when they are first asked for, so a client pays nothing for them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitpoint_offline.llm import LLM
    from splitpoint_offline.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

# gRPC's core writes to stderr what it also reports as an error (a taken port, a failed
# handshake). It reads this as grpc is imported. A value that the user set stays.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def __getattr__(name: str) -> Any:
    """Return LLM or SamplingParams. The one import that points up: users look for them here."""
    if name == "LLM":
        from splitpoint_offline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from splitpoint_offline.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
