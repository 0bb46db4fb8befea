"""The page size of a stack: a number, or what the model of growth says for this host.

An arena that an earlier stack left is the record of the choice: its size is taken again, so that
its prefixes are found. Otherwise a child process measures, as a worker would compute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from splitpoint.costs.page_choice import PageChoice, PageCosts, choose_page
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound
from splitpoint.options.store import CHUNK_TOKENS
from splitpoint.shapes import ArenaLayout, ModelShape

AUTO = "auto"
_PAGE_TOKENS = replace(CHUNK_TOKENS, name="page-tokens")
_MEASURING = "worker_service.profiling.page_costs"
# A new host compiles and calibrates its kernels first; either may wait for another process.
_MEASURE_SECONDS = 600.0


def page_tokens_of(text: str) -> int | None:
    """Return the number of `--page-tokens`, or None for auto. Raises InvalidArgument."""
    if text == AUTO:
        return None
    try:
        tokens = int(text)
    except ValueError:
        raise InvalidArgument(
            f"--page-tokens: {text!r} is neither a number nor {AUTO}", field="page-tokens"
        ) from None
    _PAGE_TOKENS.check(tokens)
    return tokens


def kept_page_tokens(arena: Path, shape: ModelShape) -> int | None:
    """Return the page size of an arena that is there for this shape; None if there is none."""
    from splitpoint.arena.format import ArenaFormatError  # needs an extra
    from splitpoint.arena.mapping import superblock_at

    try:
        layout = superblock_at(arena).layout
    except (NotFound, ArenaFormatError):
        return None  # the store says what is wrong with a file that is no arena
    return layout.chunk_tokens if _is_for(layout, shape) else None


def _is_for(layout: ArenaLayout, shape: ModelShape) -> bool:
    mine = ArenaLayout.of(shape, chunk_tokens=layout.chunk_tokens, has_activations=False)
    names = ("layer_count", "kv_head_count", "head_dim", "hidden_size", "data_type")
    return all(getattr(layout, name) == getattr(mine, name) for name in names)


def choose_pages(
    text: str,
    shape: ModelShape,
    *,
    arena: Path,
    arena_bytes: int,
    device: str,
    threads: int | None,
    cpu_kernels: str,
    environment: Mapping[str, str],
) -> PageChoice:
    """Return the page size that store and workers get, and why.

    Args:
        text: the value of `--page-tokens`.
        threads, cpu_kernels, environment: of a worker on `device`, whose attention is measured.

    Raises InvalidArgument for `text`, FailedPrecondition if the measurement fails.
    """
    tokens = page_tokens_of(text)
    if tokens is not None:
        return PageChoice(tokens)
    kept = kept_page_tokens(arena, shape)
    if kept is not None:
        return PageChoice(kept, "auto: the arena that is there has chunks of this size")
    costs = _measured(shape, device, threads, cpu_kernels, environment)
    return choose_page(shape, costs, arena_bytes=arena_bytes, has_gpu=device != "cpu")


def _measured(
    shape: ModelShape,
    device: str,
    threads: int | None,
    cpu_kernels: str,
    environment: Mapping[str, str],
) -> PageCosts:
    command = [
        sys.executable,
        "-m",
        _MEASURING,
        "--shape",
        json.dumps({**asdict(shape), "data_type": shape.data_type.value}),
        "--device",
        device,
        "--cpu-kernels",
        cpu_kernels,
    ]
    if threads is not None:
        command += ["--threads", str(threads)]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=_MEASURE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise _not_measured(f"it took more than {_MEASURE_SECONDS:g} s") from error
    if done.returncode:
        raise _not_measured((done.stderr.strip().splitlines() or ["no message"])[-1])
    return PageCosts(**json.loads(done.stdout))


def _not_measured(why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the cost of pages could not be measured: {why}; --page-tokens takes a number, too",
        reason="NOT_MEASURED",
    )
