"""Real engines of vLLM, on the CPU: `make vllm-test` runs this folder in vLLM's environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Helpers of other tests are imported by plain name; their conftest.py is not loaded here.
sys.path.append(str(Path(__file__).resolve().parents[2]))

# Read when vLLM is imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="2",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)

from engines import Store, import_vllm, make_models

import_vllm()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of small random checkpoints, by family."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of pages, whose slots are as large as the first engine wants."""
    with Store(tmp_path) as store:
        yield store
