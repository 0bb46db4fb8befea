"""A model in this process, without a server: `splitpoint.LLM`."""

from __future__ import annotations

import os

# gRPC reads this as it is imported. Otherwise it starts its threads again in every process that is
# forked from this one, over work that the parent's threads had begun, and the child often dies of
# SIGSEGV or SIGABRT (docs/usage.md). A value that the user set stays.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
