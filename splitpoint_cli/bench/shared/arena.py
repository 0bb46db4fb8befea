"""Moved to `bench.ending`; callers follow."""

from splitpoint_cli.bench.ending import *  # noqa: F403
