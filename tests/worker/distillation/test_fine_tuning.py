"""MAPLE's second stage: its loss is that of serving, and the model's loss trains the factors."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selecting import maple_artifacts
from tiny_models import VOCABULARY, write_tiny
from torch.nn import functional

from splitpoint.selection import Selection, SelectionMethod
from worker_service.distillation.calibrate import calibrate
from worker_service.distillation.fine_tuning import FineTuning, fine_tune
from worker_service.distillation.training import Training
from worker_service.evaluation.teacher_forced import TeacherForced
from worker_service.kernels.choice import in_use, plain_weights
from worker_service.model.decoder import Decoder
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.maple import MapleWeights
from worker_service.selection.screen_factory import Screens

RANK, LENGTH = 4, 48
SOME = Selection.parsed(f"maple:0.25,columns={RANK},int8=no,sinks=1,recent=2,full_layers=1")


def passages(count: int) -> list[list[int]]:
    """Return token ids in which some words repeat."""
    draw = random.Random(5)
    words = [draw.choices(range(3, VOCABULARY), k=4) for _ in range(6)]
    return [
        [token for word in draw.choices(words, k=LENGTH // 4) for token in word]
        for _ in range(count)
    ]


def plain(case: str, folder: Path) -> Decoder:
    with plain_weights():
        return Decoder.load(write_tiny(case, folder), torch.device("cpu"), torch.float32)


def drawn(model: Decoder) -> tuple[Artifacts, list[MapleWeights]]:
    """Return factors of no use, as they are stored and as they are trained."""
    stored = maple_artifacts(model.shape, RANK)
    weights = []
    for index in range(model.shape.layer_count):
        query, key = (
            stored.of_layer(index, name).float() * stored.of_layer(index, f"{name}_scale")
            for name in ("query", "key")
        )
        projection, turned = (
            stored.of_layer(index, name) for name in ("projection", "frequencies")
        )
        weights.append(MapleWeights(projection, query, key, turned))
    return stored, weights


def losses(facts: dict[str, object], name: str) -> list[float]:
    found = facts[f"{name}_losses"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("case", ["llama-3", "opt", "gemma2"])
@pytest.mark.parametrize("block", [7, 64])
def test_the_models_loss_is_that_of_reading_by_selection(
    case: str, block: int, tmp_path: Path
) -> None:
    """Grouped queries, learned positions, and windows with caps."""
    model = plain(case, tmp_path)
    stored, weights = drawn(model)
    [passage] = passages(1)
    settings = FineTuning(SOME, block_queries=block)
    _, facts = fine_tune(model, weights, [], [passage], settings)
    with torch.no_grad():
        # It computes the first token exactly, and tells nothing of what that predicts.
        first = model.run(
            torch.tensor(passage[:1]),
            torch.zeros(1, dtype=torch.int64),
            lambda *made: (
                made[-1]
                .repeat_interleave(model.shape.query_head_count // model.shape.kv_head_count, 1)
                .flatten(1)
            ),
        )
        of_first = functional.cross_entropy(model.logits(first), torch.tensor(passage[1:2]))
        read = TeacherForced(model, passage, 1).read(Screens(model.config, SOME, stored))
    expected = float(read.losses.sum() + of_first) / (LENGTH - 1)
    assert losses(facts, "model")[0] == pytest.approx(expected, rel=1e-4)
    assert losses(facts, "model")[0] == losses(facts, "model")[1], "nothing was learned from"
    assert not facts["is_kept"]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_models_loss_trains_the_layers_that_select(alpha: float, tmp_path: Path) -> None:
    model = plain("llama-3", tmp_path)
    _, weights = drawn(model)
    seen = passages(2)
    settings = FineTuning(SOME, alpha=alpha, rate=0.02)
    tuned, facts = fine_tune(model, weights, seen * 12, seen, settings)
    (before, after), (error_before, error_after) = (
        losses(facts, name) for name in ("model", "score")
    )
    assert facts["is_kept"]
    if alpha:
        assert error_after < 0.9 * error_before
    else:
        assert after < before - 1e-3
    for index, (given, made) in enumerate(zip(weights, tuned, strict=True)):
        is_same = torch.equal(given.query, made.query) and torch.equal(given.key, made.key)
        assert is_same == (index < SOME.full_layers)
        assert not made.query.requires_grad


def test_factors_that_became_worse_are_not_kept(tmp_path: Path) -> None:
    model = plain("llama-3", tmp_path)
    _, weights = drawn(model)
    tuned, facts = fine_tune(model, weights, passages(2), passages(1), FineTuning(SOME, rate=50.0))
    assert not facts["is_kept"]
    assert tuned == weights


def test_products_without_gradients_are_refused(tmp_path: Path) -> None:
    model = Decoder.load(write_tiny("llama", tmp_path), torch.device("cpu"), torch.float32)
    assert in_use() is None
    with pytest.raises(ValueError, match="plain_weights"):
        fine_tune(model, drawn(model)[1], [], passages(1), FineTuning(SOME))


def test_calibration_has_both_stages(tmp_path: Path) -> None:
    """The second one changes the factors of the layers that select, and those alone."""
    model = plain("llama-3", tmp_path)
    stages = []
    for tuning in (None, FineTuning(replace(SOME, full_layers=2), rate=0.02)):
        stages.append(
            calibrate(
                model,
                SelectionMethod.MAPLE,
                [tuple(each) for each in passages(6)],
                rank=RANK,
                training=Training(epochs=1, block_queries=16),
                tuning=tuning,
                track=lambda _, items: iter(items),
                say=lambda _: None,
            )
        )
    (first, results), (second, _) = stages
    assert "fine_tuning" not in first.facts
    facts = second.facts["fine_tuning"]
    assert isinstance(facts, dict)
    assert facts["is_kept"]
    for result in results:
        assert min(result.losses) < result.losses[0]
    for name, tensor in first.tensors.items():
        is_tuned = "layers.2" in name and ("query" in name or "key" in name)
        assert torch.equal(second.tensors[name], tensor) != is_tuned
