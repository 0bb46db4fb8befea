"""Moved to `bench.texts`; callers follow."""

from splitpoint_cli.bench.texts import *  # noqa: F403
