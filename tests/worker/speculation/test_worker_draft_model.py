"""A draft model is checked against the served one, and charged before it is loaded.

Takes about 2 seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import CPU, admission
from tiny_models import build_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.errors import InvalidArgument, ResourceExhausted
from worker_service.device.memory import CACHE_SHARE
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Sequence
from worker_service.speculation.model_draft import DraftModel

MIB = 1 << 20


def write_model(folder: Path, *, spare: str = "spare", vocabulary: int = 260, **more: Any) -> Path:
    """Write a tiny Llama with a tokenizer of 257 tokens, of which one is `spare`."""
    torch.manual_seed(3)
    build_tiny("llama", vocab_size=vocabulary, **more).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {token: index for index, token in enumerate([*alphabet, spare])}
    tokenizer = Tokenizer(models.BPE(known, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


def plan(folder: Path, served: Path, budget: int = 256 * MIB, batch: int = 4) -> DraftModel:
    return DraftModel.plan(
        folder,
        served,
        shape_from_config(read_config(served)),
        CPU,
        chunk_tokens=16,
        budget_bytes=budget,
        max_batch_size=batch,
        max_batched_tokens=64,
    )


def test_a_companion_is_loaded_into_the_memory_that_was_planned(
    served: Path, tmp_path: Path
) -> None:
    companion = plan(write_model(tmp_path, num_hidden_layers=1), served)
    memory = companion.memory
    # Four sequences of the whole context of 512 tokens.
    assert memory.page_count == 4 * 512 // 16
    assert memory.budget_bytes == (
        memory.weight_bytes + memory.workspace_bytes + memory.page_count * memory.page_bytes
    )
    drafter = companion.load()
    assert drafter.model.weight_bytes == memory.weight_bytes
    assert drafter.cache.pages.used_count == 0
    assert any(plane.any() for plane in drafter.cache.keys), "nothing has warmed up"
    planes = (*drafter.cache.keys, *drafter.cache.values)
    assert sum(plane.nbytes for plane in planes) == memory.page_count * memory.page_bytes
    sequence = Sequence(admission("one", range(3, 40), Sampling(max_tokens=9, ignore_eos=True)))
    assert drafter.propose([(sequence, 1)])[0] != []


def test_the_cache_takes_a_share_of_little_memory_and_too_little_is_refused(
    served: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, num_hidden_layers=1)
    budget = 32 * MIB
    memory = plan(folder, served, budget, batch=64).memory
    assert memory.page_count == int(CACHE_SHARE * budget) // memory.page_bytes
    with pytest.raises(ResourceExhausted, match="too small"):
        plan(folder, served, MIB // 2)


def test_another_vocabulary_is_refused(served: Path, tmp_path: Path) -> None:
    larger = write_model(tmp_path / "larger", vocabulary=300)
    with pytest.raises(InvalidArgument, match="has 300 tokens, that of the served model 260"):
        plan(larger, served)
    other = write_model(tmp_path / "other", spare="other")
    with pytest.raises(InvalidArgument, match=r"token 256 is 'other', .* 'spare'"):
        plan(other, served)
    bare = write_model(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(InvalidArgument, match="no tokenizer to compare"):
        plan(bare, served)


def test_a_folder_without_a_model_is_refused(served: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        plan(tmp_path / "nothing", served)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(InvalidArgument, match="mamba"):
        plan(tmp_path, served)
