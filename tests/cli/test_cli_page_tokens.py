"""`--page-tokens`: numbers, the arena that is there, and a real measurement. Ten seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from splitpoint.arena.owner import open_or_create_arena
from splitpoint.costs.page_choice import PageChoice
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout, DataType
from splitpoint_cli import page_tokens
from splitpoint_cli.page_tokens import choose_pages, kept_page_tokens, page_tokens_of
from splitpoint_cli.stack.child import child_environment

SHAPE = replace(BUILT_IN_SHAPES["opt-125m"], layer_count=2, data_type=DataType.FLOAT32)


def chosen(
    text: str,
    arena: Path,
    *,
    device: str = "cpu",
    kernels: str = "auto",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> PageChoice:
    return choose_pages(
        text,
        SHAPE,
        arena=arena,
        arena_bytes=1 << 30,
        device=device,
        threads=1,
        cpu_kernels=kernels,
        environment=child_environment(environment),
    )


def leave_arena(path: Path, chunk_tokens: int) -> None:
    """Leave an arena as `up --keep-arena` does at its end."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    layout = ArenaLayout.of(SHAPE, chunk_tokens=chunk_tokens, has_activations=True)
    opened = open_or_create_arena(path, layout, 2)
    superblock = opened.arena.superblock
    opened.arena.close()
    opened.owner.keep(superblock)


def test_a_number_needs_no_reason(tmp_path: Path) -> None:
    assert chosen("96", tmp_path / "arena") == PageChoice(96)


@pytest.mark.parametrize("text", ["", "many", "1.5", "0", "-64", "5000"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        page_tokens_of(text)


@pytest.mark.parametrize("text", ["0", "5000", "99999999999", "9" * 400, "many"])
def test_errors_name_the_option_and_the_number(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        page_tokens_of(text)
    assert caught.value.message.startswith("--page-tokens")
    assert text in caught.value.message
    assert caught.value.field == "page-tokens"


def test_an_arena_that_is_there_keeps_its_size(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "arena"
    leave_arena(path, 24)  # a size that no measurement gives
    found = chosen("auto", path)
    assert found.tokens == 24
    assert "arena that is there" in found.reason
    assert kept_page_tokens(path, replace(SHAPE, layer_count=3)) is None
    assert kept_page_tokens(path, replace(SHAPE, data_type=DataType.BFLOAT16)) is None


def test_a_file_that_is_no_arena_is_left_to_the_store(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"no arena" * 2000)
    path.chmod(0o600)
    assert kept_page_tokens(path, SHAPE) is None


def test_pages_are_measured_without_an_arena(tmp_path: Path) -> None:
    found = chosen("auto", tmp_path / "arena")
    assert 16 <= found.tokens <= 256
    assert found.tokens & (found.tokens - 1) == 0
    assert "rows on this host" in found.reason


def test_a_failed_measurement_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="could not be measured"):
        chosen("auto", tmp_path / "arena", device="abacus")


def test_a_measurement_that_takes_too_long_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_tokens, "_MEASURE_SECONDS", 0.01)
    with pytest.raises(FailedPrecondition, match=r"took more than 0\.01 s"):
        chosen("auto", tmp_path / "arena")


def test_pages_are_measured_with_the_kernels_that_workers_get(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = {"SPLITPOINT_KERNEL_CACHE": str(cache)}
    chosen("auto", tmp_path / "arena", kernels="flags", environment=environment)
    assert not cache.exists()  # flags need no measurement
    with pytest.raises(FailedPrecondition, match="quick"):
        chosen("auto", tmp_path / "arena", kernels="decode=quick", environment=environment)


def test_the_measuring_program_says_what_it_wants() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker_service.profiling.page_costs"],
        env={**os.environ, **child_environment({})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--shape" in done.stderr
