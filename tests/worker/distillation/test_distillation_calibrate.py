"""Calibration of every screen on tiny models: losses fall, ranks agree, artefacts open."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILY_CASES, VOCABULARY, write_tiny

from splitpoint.errors import InvalidArgument
from splitpoint.selection import Selection, SelectionMethod
from worker_service.distillation.calibrate import Item, LayerResult, calibrate
from worker_service.distillation.measures import TOP_SHARE
from worker_service.distillation.training import Training, squared_error, train
from worker_service.model.decoder import Decoder
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.screen import AttentionShape, TokenRows
from worker_service.selection.screen_factory import Screens

RANK, LENGTH, PASSAGES = 4, 64, 4
ONE_EPOCH = Training(epochs=1)
CALIBRATED = [method for method in SelectionMethod if method.is_calibrated]
# Mean recall that factors of these models reach in all families. Random factors find about the
# tenth that chance finds, at most 0.18.
LEAST_RECALL = 0.25


def passages(count: int = PASSAGES) -> list[tuple[int, ...]]:
    """Return token ids in which some repeat, as in a text."""
    draw = random.Random(3)
    words = [draw.choices(range(3, VOCABULARY), k=4) for _ in range(12)]
    return [
        tuple(token for word in draw.choices(words, k=LENGTH // 4) for token in word)
        for _ in range(count)
    ]


def untracked(_what: str, items: Sequence[Item]) -> Iterator[Item]:
    return iter(items)


def calibrated(
    model: Decoder,
    method: SelectionMethod,
    training: Training = ONE_EPOCH,
    said: list[str] | None = None,
) -> tuple[Artifacts, list[LayerResult]]:
    said = [] if said is None else said
    return calibrate(
        model,
        method,
        passages(),
        rank=RANK,
        training=training,
        track=untracked,
        say=said.append,
    )


@pytest.fixture(scope="module", params=FAMILY_CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    return tiny(request.param, folder)


def tiny(case: str, folder: Path) -> Decoder:
    return Decoder.load(write_tiny(case, folder), torch.device("cpu"), torch.float32)


# Every screen on one family, and one that has all that can be trained on every family.
@pytest.mark.parametrize(
    ("model", "method"),
    [
        pytest.param(
            case,
            method,
            marks=[] if case == "llama-3" or method is SelectionMethod.MAPLE else pytest.mark.chaos,
        )
        for case in FAMILY_CASES
        for method in CALIBRATED
    ],
    indirect=["model"],
)
def test_every_screen_is_calibrated_on_every_family(
    model: Decoder, method: SelectionMethod
) -> None:
    artifacts, results = calibrated(model, method)
    layers = model.shape.layer_count
    assert [result.layer for result in results] == list(range(layers))
    for result in results:
        assert 0.0 < result.recall <= 1.0
        assert 0.0 < result.weight <= 1.0
    assert sum(result.recall for result in results) / layers > LEAST_RECALL
    assert sum(result.weight for result in results) / layers > 1.3 * TOP_SHARE
    trained = method is SelectionMethod.MAPLE
    assert all(len(result.losses) == (2 if trained else 0) for result in results)
    if trained:
        start, best = (sum(pick(result.losses) for result in results) for pick in (_first, min))
        assert best < 0.997 * start
    screens = Screens(model.config, Selection.parsed(f"{method}:0.2,columns={RANK}"), artifacts)
    assert screens.layer(1) is None
    for index in range(2, layers):
        assert screens.layer(index) is not None


def _first(losses: Sequence[float]) -> float:
    return losses[0]


def test_training_lowers_the_loss_on_text_that_it_does_not_see(tmp_path: Path) -> None:
    said: list[str] = []
    training = Training(epochs=3, block_queries=32)
    _, results = calibrated(tiny("llama-3", tmp_path), SelectionMethod.MAPLE, training, said)
    start, best = (sum(pick(result.losses) for result in results) for pick in (_first, min))
    # The closed form has nearly the smallest squared error already.
    assert best < start
    assert f"layer 0, epoch 0: loss {results[0].losses[0]:.4g}" in said
    assert len(said) == sum(len(result.losses) for result in results)


def test_the_true_products_have_no_loss() -> None:
    """Of what a query sees, whatever comes behind it."""
    draw = torch.Generator().manual_seed(1)
    inputs, queries, keys = (
        torch.randn(size, generator=draw) for size in ((LENGTH, 8), (LENGTH, 4, 8), (LENGTH, 2, 8))
    )
    rows = TokenRows(inputs, queries, keys)
    shape = AttentionShape(4, 2, 8, 0.5, None, 24)

    def true(of: TokenRows, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return of.queries, of.keys

    settings = Training(epochs=0, block_queries=16)
    trained = train(
        (rows.queries, rows.keys), true, shape, [rows], [rows], settings, lambda *_: None
    )
    [found] = trained.losses
    assert found == pytest.approx(0.0, abs=1e-6)


def test_the_error_of_a_row_is_that_of_differences_between_tokens_that_it_sees() -> None:
    guessed = torch.tensor([[1.0, 5.0, 90.0], [7.0, 7.0, 7.0]])
    seen = torch.tensor([[True, True, False], [True, True, True]])
    assert squared_error(guessed, torch.zeros(2, 3), seen) == (4 + 0) / 2


def test_training_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    """A rate that ruins the factors ends after one epoch, with the factors of the start."""
    model = tiny("qwen2", tmp_path)
    ruinous = Training(epochs=5, rate=50.0)
    artifacts, results = calibrated(model, SelectionMethod.MAPLE, ruinous)
    untrained, _ = calibrated(model, SelectionMethod.MAPLE, Training(epochs=0))
    for result in results:
        assert len(result.losses) == 2
        assert result.losses[1] > result.losses[0]
    for name, tensor in untrained.tensors.items():
        assert torch.equal(artifacts.tensors[name], tensor)


def test_calibration_can_be_repeated(tmp_path: Path) -> None:
    model = tiny("qwen3", tmp_path)
    one, other = (calibrated(model, SelectionMethod.MAPLE)[0] for _ in range(2))
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(other.tensors[name], tensor)


def test_trained_artefacts_have_one_rank(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path)
    artifacts, _ = calibrated(model, SelectionMethod.MAPLE, Training(epochs=0))
    Screens(model.config, Selection.parsed("maple:0.1"), artifacts)
    with pytest.raises(InvalidArgument, match="trained for 4"):
        Screens(model.config, Selection.parsed("maple:0.1,columns=6"), artifacts)
    with pytest.raises(InvalidArgument, match="at least 2 passages"):
        calibrate(
            model,
            SelectionMethod.MAPLE,
            passages(1),
            rank=RANK,
            training=Training(),
            track=untracked,
            say=print,
        )
