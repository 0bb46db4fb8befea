"""Triton's interpreter in a process of its own.

Triton reads `TRITON_INTERPRET` when it is imported, for the functions of its own library, and a
process imports it once: with the flag or without.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Interpreter:
    """A process in which every kernel is carried out by numpy."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def attend(
        self,
        places: tuple[Any, Any, Any],
        tensors: tuple[torch.Tensor, ...],
        *,
        padded: int | None = None,
        **more: Any,
    ) -> tuple[list[int], list[torch.Tensor]]:
        """The firsts of a `SpanView` of `places`, and what its `attend` returns.

        `places`: page numbers, owners and seen rows; `tensors`: queries, keys and values;
        `padded`: spans for which the tables have room.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arrays = [each.numpy() for each in tensors]
        pickle.dump((places, padded, arrays, more), self._process.stdin)
        self._process.stdin.flush()
        firsts, parts = pickle.load(self._process.stdout)
        return firsts, [torch.from_numpy(part) for part in parts]


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:  # it ends at the end of its input
        yield Interpreter(process)


def _serve() -> None:
    from worker_service.device.upload import Upload
    from worker_service.model.span_attention import SpanView, load_kernels

    kernels = load_kernels()
    while True:
        try:
            (numbers, owners, seen), padded, arrays, more = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        tensors = [torch.from_numpy(array) for array in arrays]
        upload = Upload(torch.device("cpu"))
        view = SpanView.of(numbers, owners, seen, len(tensors[0]), upload, padded)
        parts = [part.numpy() for part in view.attend(*tensors, kernels=kernels, **more)]
        pickle.dump((view.firsts.tolist(), parts), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
