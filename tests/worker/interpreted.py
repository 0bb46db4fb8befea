"""Triton's interpreter in a process of its own.

Triton reads `TRITON_INTERPRET` when it is imported, for the functions of its own library, and a
process imports it once: with the flag or without.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Interpreter:
    """A process in which every kernel is carried out by numpy."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def attend(
        self,
        places: tuple[Any, Any, Any, Any],
        tensors: tuple[torch.Tensor, ...],
        *,
        padded: int | None = None,
        **more: Any,
    ) -> tuple[list[int], list[torch.Tensor]]:
        """The firsts of a `SpanView` of `places`, and what its `attend` returns.

        `places`: page numbers, owners, positions and seen rows; `tensors`: queries, keys and
        values; `padded`: spans for which the tables have room.
        """
        firsts, parts = self.call(_attend, places, tensors, padded, more)
        return firsts, parts

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a module returns there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        name = Path(sys.modules[function.__module__].__file__ or "").stem
        request = (name, function.__name__, pickle.dumps(arguments))
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        result, error = pickle.load(self._process.stdout)
        assert error is None, error
        return result


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        # numpy's products stand for tensor cores, whose sums do not depend on a row's place
        # in its tile. OpenBLAS's kernels for Haswell and Zen round some rows differently.
        "OPENBLAS_CORETYPE": "Nehalem",
    }
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    with process:  # it ends at the end of its input
        yield Interpreter(process)


def _attend(places: Any, tensors: Any, padded: int | None, more: dict[str, Any]) -> Any:
    from worker_service.device.upload import Upload
    from worker_service.model.span_attention import SpanView, load_kernels

    upload = Upload(torch.device("cpu"))
    numbers, owners, positions, seen = places
    view = SpanView.of(numbers, owners, positions, seen, len(tensors[0]), upload, padded)
    parts = view.attend(*tensors, kernels=load_kernels(), **more)
    return view.firsts.tolist(), list(parts)


def _serve() -> None:
    while True:
        try:
            module, name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        result = error = None
        try:
            function = getattr(importlib.import_module(module), name)
            result = function(*pickle.loads(arguments))
        except Exception:
            error = traceback.format_exc()
        pickle.dump((result, error), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
