"""gRPC's own lines on stderr: none, unless the user asks for them.

Its core writes there what it also reports as an error (a port that is taken, a handshake
that failed), which comes back as one of ours.
"""

from __future__ import annotations

import os


def silence() -> None:
    """For this process; must come before grpc is imported. What the user set, stays."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
