"""Spooled output: all of it in order, and no wait and no error for a reader that is not there.

About a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from splitpoint_cli import spool
from splitpoint_cli.spool import MOST_BYTES, Spool, spooled_output


@contextmanager
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe's read descriptor, and the stream at its other end."""
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        try:
            yield read, stream
        finally:
            try:
                os.close(read)
            except OSError:
                pass  # the test did


def test_all_arrives_in_order() -> None:
    with pipe() as (read, stream):
        spooled = Spool(stream)
        for i in range(1000):
            print(f"line {i} é", file=spooled)
        spooled.finish()
        assert os.read(read, 1 << 16).decode() == "".join(f"line {i} é\n" for i in range(1000))


def test_a_reader_that_died_is_no_error() -> None:
    with pipe() as (read, stream):
        os.close(read)
        spooled = Spool(stream)
        for _ in range(100):
            print("unread", file=spooled, flush=True)
        spooled.finish()


def test_a_reader_that_stopped_costs_bounded_memory_and_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool, "_LAST_SECONDS", 0.05)
    with pipe() as (read, stream):
        spooled = Spool(stream)
        for _ in range(3 * MOST_BYTES // 1000):
            spooled.write("x" * 1000)
        spooled.finish()
        assert sum(map(len, spooled._waiting)) <= MOST_BYTES
        os.close(read)  # lets the thread go


def test_standard_streams_are_spooled_once_and_given_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout, sys.stderr
    with spooled_output():
        outer = sys.stderr
        with spooled_output():
            assert sys.stderr is outer
            assert isinstance(sys.stdout, Spool)
            print("out")
            print("err", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capfd.readouterr() == ("out\n", "err\n")
