"""Moved to `bench.engine`; callers follow."""

from splitpoint_cli.bench.engine import *  # noqa: F403
