"""Moved to `bench.limits`; callers follow."""

from splitpoint_cli.bench.limits import *  # noqa: F403
