"""Moved to `bench.harness`; callers follow."""

from splitpoint_cli.bench.harness import *  # noqa: F403
