"""Moved to `bench.local_store`; callers follow."""

from splitpoint_cli.bench.local_store import *  # noqa: F403
