"""A worker process that loads a checkpoint of some size says how far it is."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
import torch
from local_stack import ROOT, stop_process
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.progress import Progress, Ticker, read_progress
from splitpoint.service import READY_PREFIX
from worker_service.checkpoint.names import expected_tensors
from worker_service.checkpoint.tensors import Checkpoint

# 3 layers of 12 x 1024 x 1024 and the like: 130 MB in float32.
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("large"), **SIZES)


async def run_worker(
    folder: Path, tmp_path: Path, *more: str
) -> tuple[list[Progress], list[str], str]:
    """Return its progress lines before READY, its other lines, and its log."""
    log = tmp_path / "worker.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker_service", "--listen", f"unix:{tmp_path}/w"),
            *("--model", str(folder), "--device", "cpu", "--device-memory", "512MiB", *more),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
        )
    told: list[Progress] = []
    others: list[str] = []
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            async for raw in process.stdout:
                line = raw.decode().rstrip()
                if line.startswith(READY_PREFIX):
                    break
                progress = read_progress(line)
                if progress is None:
                    others.append(line)
                else:
                    told.append(progress)
    finally:
        await stop_process(process)
    return told, others, log.read_text()


async def test_loading_is_told_on_stdout_and_in_the_log(large: Path, tmp_path: Path) -> None:
    told, others, log = await run_worker(
        *(large, tmp_path, "--progress-lines", "--progress-seconds", "0.01")
    )
    assert others == []
    assert len(told) >= 3
    done = [progress.done_bytes for progress in told]
    assert done == sorted(done)
    assert told[-1].is_complete
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert 0.99 * size < told[-1].total_bytes < size
    lines = re.findall(r"INFO worker-0: loading weights: (.*) of (.*)\n", log)
    assert len(lines) >= 3
    assert lines[-1][0] == lines[-1][1]


async def test_what_is_soon_loaded_is_not_worth_a_line(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "small")
    told, others, log = await run_worker(folder, tmp_path)
    assert (told, others) == ([], [])
    assert "loading weights" not in log


def test_a_download_has_the_name_that_the_scheduler_gives_it(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--the-name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert read_decoder(write_tiny("llama", snapshot)).shape.name == "owner/the-name"


@pytest.mark.parametrize("case", ["llama-3", "qwen3", "opt"])
def test_the_total_is_what_the_files_hold(case: str, tmp_path: Path) -> None:
    """Tied, sharded and with biases: bytes as stored, whatever type they are read as."""
    folder = write_tiny(case, tmp_path)
    told: list[Progress] = []
    config = read_decoder(folder, None)
    cpu = torch.device("cpu")
    with Checkpoint(folder, config, cpu, torch.bfloat16, [Ticker(told.append, 0.0)]) as checkpoint:
        names = list(expected_tensors(config))
        size = 0
        for name in names:
            size += 4 * checkpoint.get(name).numel()
            assert (told[-1].done_bytes, told[-1].is_complete) == (size, name == names[-1])
