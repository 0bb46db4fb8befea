"""Screens: what they keep, how close their scores are to the true ones, and exact budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_rows import (
    HIDDEN,
    SHAPE,
    SHAPES,
    guess_from,
    part,
    random_rows,
    true_logits,
    visible,
)
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from splitpoint.selection import Selection, SelectionMethod
from worker_service.selection import kept_rows
from worker_service.selection import screen as screens_of_one
from worker_service.selection.artifacts import Artifacts, artifacts_path, encoded, load
from worker_service.selection.columns import ColumnScreen, LowRankScreen
from worker_service.selection.h2o import HeavyHitterScreen
from worker_service.selection.kept_rows import KeptRows, to_int8
from worker_service.selection.maple import MapleScreen, MapleWeights, project, sparse_signs
from worker_service.selection.records import Records
from worker_service.selection.screen import (
    AttentionShape,
    Guess,
    KeyScreen,
    LayerScreen,
    TokenRows,
    grouped_products,
)
from worker_service.selection.screen_factory import Screens
from worker_service.selection.token_choice import choose
from worker_service.selection.window import WindowScreen

CPU = torch.device("cpu")


def orthogonal(heads: int, width: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    rotation: torch.Tensor
    rotation, _ = torch.linalg.qr(torch.randn((heads, width, width), generator=random))
    return rotation


def maple(shape: AttentionShape, *, int8: bool) -> MapleScreen:
    random = torch.Generator().manual_seed(6)
    rank = 8
    weights = MapleWeights(
        sparse_signs(HIDDEN, 16, random),
        torch.randn((17, shape.query_heads, rank), generator=random),
        torch.randn((17, shape.kv_heads, rank), generator=random),
        torch.rand((shape.kv_heads, rank // 2), generator=random),
    )
    return MapleScreen(shape, weights, int8=int8)


def low_rank(shape: AttentionShape, rank: int, *, int8: bool) -> LowRankScreen:
    maps = orthogonal(shape.kv_heads, shape.head_dim)[..., :rank]
    return LowRankScreen(shape, maps, maps, int8=int8)


Make = Callable[[AttentionShape, Selection], LayerScreen]
SCREENS: Mapping[SelectionMethod, Make] = {
    SelectionMethod.COLUMNS: lambda shape, _: ColumnScreen(shape, 5, int8=False),
    SelectionMethod.INFINIGEN: lambda shape, _: ColumnScreen(
        shape, 5, int8=False, skew=orthogonal(shape.kv_heads, shape.head_dim)
    ),
    SelectionMethod.LOWRANK: lambda shape, _: low_rank(shape, 5, int8=False),
    SelectionMethod.MAPLE: lambda shape, _: maple(shape, int8=True),
    SelectionMethod.WINDOW: lambda shape, _: WindowScreen(shape),
    SelectionMethod.H2O: HeavyHitterScreen,
}


FULL_BUDGETS = [
    (method, rule)
    for method in SCREENS
    for rule in ("1", "budget_tokens=500", "alpha=inf,cap=1")
    if method.has_logits or "alpha" not in rule
]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("method", "rule"), FULL_BUDGETS)
def test_a_full_budget_reads_everything_by_every_screen(
    shape: AttentionShape, method: SelectionMethod, rule: str
) -> None:
    selection = Selection.parsed(f"{method}:{rule}")
    rows = random_rows(75, shape)
    screen = SCREENS[method](shape, selection)
    screen.extend(part(rows, 0, 40))
    screen.extend(part(rows, 40, 75))
    read = choose(
        screen.scores(guess_from(rows, 40)),
        selection,
        first_position=40,
        tokens=75,
        kv_heads=shape.kv_heads,
        window=shape.window,
    )
    expected = visible(rows, 40, shape).unsqueeze(1).expand(-1, shape.kv_heads, -1)
    assert torch.equal(read, expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pieces", [(40,), (1, 7, 32)])
def test_all_columns_give_the_true_logits_skewed_or_not(
    shape: AttentionShape, pieces: tuple[int, ...]
) -> None:
    """Skewed logits are the original ones: A is orthogonal, and stands behind RoPE."""
    rows = random_rows(40, shape)
    width = shape.head_dim
    for screen in (
        ColumnScreen(shape, width, int8=False),
        ColumnScreen(shape, width, int8=False, skew=orthogonal(shape.kv_heads, width)),
        low_rank(shape, width, int8=False),
    ):
        first = 0
        for count in pieces:
            screen.extend(part(rows, first, first + count))
            first += count
        torch.testing.assert_close(screen.scores(guess_from(rows, 0)), true_logits(rows, 0, shape))
        assert screen.device_bytes == rows.keys.nbytes


def test_kept_columns_are_those_with_the_largest_sums() -> None:
    rows = random_rows(30)
    rows.keys[:, 0, 3] *= 50
    rows.queries[:, 2, 7] *= 50  # of KV head 1, whose group are heads 2 and 3
    screen = ColumnScreen(SHAPE, 1, int8=False)
    screen.extend(rows)
    scores = screen.scores(guess_from(rows, 0))
    for head, column in ((0, 3), (1, 3), (2, 7), (3, 7)):
        expected = torch.outer(rows.queries[:, head, column], rows.keys[:, head // 2, column])
        torch.testing.assert_close(scores[:, head], expected * SHAPE.scale)
    assert screen.device_bytes == 30 * 2 * 4


@pytest.mark.parametrize("shape", [SHAPE, SHAPES["multi-head"]])
def test_products_are_those_of_each_groups_key(shape: AttentionShape) -> None:
    rows = random_rows(30, shape)
    products = grouped_products(rows.queries, rows.keys) * shape.scale
    torch.testing.assert_close(products, true_logits(rows, 0, shape))


def test_int8_rows_are_as_close_as_their_scale_allows() -> None:
    rows = torch.randn((50, 2, 16), generator=torch.Generator().manual_seed(1))
    rows[7] = 0
    kept = KeptRows(int8=True)
    kept.extend(rows[:3])
    kept.extend(rows[3:])
    scale = rows.abs().amax(-1, keepdim=True) / 127
    assert ((kept.all() - rows).abs() <= 0.51 * scale + 1e-3 * rows.abs()).all()
    assert kept.size_bytes == 50 * 2 * (16 + 2)
    quantized, _ = to_int8(rows)
    assert quantized.abs().max() == 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [5, 16])
@pytest.mark.parametrize("method", ["columns", "int8", "lowrank"])
def test_screens_in_given_blocks_equal_those_in_memory_of_their_own(
    method: str, block_tokens: int, dtype: torch.dtype
) -> None:
    """Bit for bit, however the tokens come; what the blocks held before does not matter."""

    def screen(records: Records) -> LayerScreen:
        if method == "lowrank":
            maps = torch.randn((2, 2, 16, 7), generator=torch.Generator().manual_seed(0))
            return LowRankScreen(SHAPE, *maps, int8=True, records=records)
        return ColumnScreen(SHAPE, 5, int8=method == "int8", records=records)

    wide = random_rows(90)
    rows = TokenRows(wide.inputs.to(dtype), wide.queries.to(dtype), wide.keys.to(dtype))
    size = block_tokens * 2 * 16 * dtype.itemsize
    # Each is a slice of larger memory, as a page is of a plane.
    memory = torch.full((40, size), 255, dtype=torch.uint8)
    own, given = screen(Records()), screen(Records(list(memory)))
    for first, last in ((0, 37), (37, 38), (38, 54), (54, 90)):
        for each in (own, given):
            each.extend(part(rows, first, last))
        asked = guess_from(rows, last - 1)
        assert torch.equal(own.scores(asked), given.scores(asked))
    assert own.device_bytes == given.device_bytes


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", ["columns", "infinigen", "lowrank"])
def test_tokens_on_the_device_are_scored_as_if_they_were_kept(
    shape: AttentionShape, method: str
) -> None:
    """By their keys, of which the screen has none."""
    rows = random_rows(60, shape)
    both, first = (
        SCREENS[SelectionMethod(method)](shape, Selection.parsed(f"{method}:0.1")) for _ in (0, 1)
    )
    for screen in (both, first):
        screen.extend(part(rows, 0, 40))
    both.extend(part(rows, 40, 60))
    guess = guess_from(rows, 50)
    assert isinstance(first, KeyScreen)
    torch.testing.assert_close(
        first.scores_of(guess, rows.keys[40:]), both.scores(guess)[..., 40:], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("method", ["columns", "infinigen", "lowrank", "int8"])
def test_long_prompts_are_taken_in_pieces(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same columns, and the same scores, as of all tokens at once."""
    rows = random_rows(75)

    def scores() -> torch.Tensor:
        rotation = orthogonal(SHAPE.kv_heads, SHAPE.head_dim)
        screen: LayerScreen = (
            low_rank(SHAPE, 5, int8=False)
            if method == "lowrank"
            else ColumnScreen(
                SHAPE, 5, int8=method == "int8", skew=rotation if method == "infinigen" else None
            )
        )
        screen.extend(rows)
        return screen.scores(guess_from(rows, 60))

    at_once = scores()
    monkeypatch.setattr(screens_of_one, "PIECE_TOKENS", 10)
    torch.testing.assert_close(scores(), at_once)


def test_products_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of six rows, of which pieces of ten take parts."""
    rows = random_rows(33)
    for int8 in (False, True):
        kept = KeptRows(int8=int8, records=Records(list(torch.zeros((9, 864), dtype=torch.uint8))))
        kept.extend(rows.keys)
        at_once = kept.products(rows.queries)
        monkeypatch.setattr(kept_rows, "PIECE_ROWS", 10)
        torch.testing.assert_close(kept.products(rows.queries), at_once)
        monkeypatch.undo()
        torch.testing.assert_close(at_once, grouped_products(rows.queries, kept.all()))


def test_records_say_when_their_blocks_are_full() -> None:
    records = Records([torch.zeros(24, dtype=torch.uint8)] * 2)
    records.append(torch.zeros(3, 2))
    records.append(torch.zeros(3, 2))
    with pytest.raises(ResourceExhausted, match="the pages of a screen are full"):
        records.append(torch.zeros(1, 2))


@pytest.mark.parametrize("shape", [SHAPE, SHAPES["multi-head"]])
def test_keys_of_maple_are_rotated_by_their_positions(shape: AttentionShape) -> None:
    """Scores depend on how far a token is, not on where both are, nor on how the tokens came."""
    rows = random_rows(40, shape)
    at_once, in_pieces, later = (maple(shape, int8=False) for _ in range(3))
    at_once.extend(rows)
    for first, last in ((0, 7), (7, 8), (8, 40)):
        in_pieces.extend(part(rows, first, last))
    later.extend(replace(rows, first_position=1000))
    scores = at_once.scores(guess_from(rows, 30))
    torch.testing.assert_close(in_pieces.scores(guess_from(rows, 30)), scores)
    moved = replace(guess_from(rows, 30), first_position=1030)
    torch.testing.assert_close(later.scores(moved), scores, atol=1e-2, rtol=1e-2)
    farther = at_once.scores(moved)
    assert (farther - scores).norm() > 0.3 * scores.norm()


def heavy_hitters(budget: int) -> tuple[HeavyHitterScreen, Selection]:
    selection = Selection.parsed(f"h2o:budget_tokens={budget},sinks=1,recent=2")
    return HeavyHitterScreen(SHAPES["multi-head"], selection), selection


@pytest.mark.parametrize("hitter", [None, 35])
def test_heavy_hitters_are_those_of_a_plain_simulation(hitter: int | None) -> None:
    """Each head by itself, in Python: attention received, half of the budget newest, one out.

    `hitter`: a token behind the prompt that all queries attend to.
    """
    shape, budget, prompt, tokens = SHAPES["multi-head"], 12, 30, 60
    rows = random_rows(tokens, shape)
    if hitter is not None:
        rows.queries.add_(1)
        rows.keys[hitter].add_(4)
    screen, _ = heavy_hitters(budget)
    screen.extend(part(rows, 0, prompt))
    screen.extend(part(rows, prompt, tokens))
    scores = screen.scores(guess_from(rows, prompt))
    logits = true_logits(rows, 0, shape)
    for head in range(shape.kv_heads):
        received = [0.0] * tokens
        left: list[int] = []

        def evict(count: int, left: list[int], received: list[float]) -> list[int]:
            free = [n for n in left if n >= 1 and n < count - budget // 2]
            gone = sorted(free, key=lambda n: received[n])[: max(0, len(left) - budget)]
            return [n for n in left if n not in gone]

        for position in range(tokens):
            left.append(position)
            if position >= prompt:
                left = evict(position + 1, left, received)
                read = scores[position - prompt, head].isfinite().nonzero().flatten().tolist()
                assert read == left
            weights = logits[position, head, left].softmax(-1).tolist()
            for number, weight in zip(left, weights, strict=True):
                received[number] += weight
            if position == prompt - 1:
                left = evict(prompt, left, received)
        assert hitter is None or hitter in left


def test_an_evicted_token_never_returns_and_the_next_query_may_ask() -> None:
    rows = random_rows(80, SHAPES["multi-head"])
    screen, selection = heavy_hitters(16)
    screen.extend(part(rows, 0, 20))
    before = torch.ones((4, 80), dtype=torch.bool)
    for position in range(20, 80):
        guess = Guess(rows.inputs[:1], rows.queries[:1], position)
        scores = screen.scores(guess)
        read = choose(scores, selection, first_position=position, tokens=position, kv_heads=4)[0]
        assert read.sum(-1).tolist() == [16] * 4
        assert not (read & ~before[:, :position]).any()
        before[:, :position] = read
        screen.extend(part(rows, position, position + 1))
    assert screen.device_bytes == 16 * 4 * (2 * 16 * 4 + 4)


def test_the_sparse_projection_keeps_products_on_average() -> None:
    """E[P P^T] = I (section 4), and a sixth of the entries has each sign."""
    random = torch.Generator().manual_seed(0)
    width, rank, draws = 12, 8, 4000
    total = torch.zeros((width, width))
    values: list[torch.Tensor] = []
    for _ in range(draws):
        projection = project(torch.eye(width), sparse_signs(width, rank, random))[:, :-1]
        total += projection @ projection.T
        values.append(projection.flatten())
    # Standard deviations: (2 / rank)^0.5 on the diagonal, rank^-0.5 beside it, over draws^0.5.
    torch.testing.assert_close(total / draws, torch.eye(width), atol=0.04, rtol=0)
    entries = torch.cat(values)
    assert sorted(set(entries.tolist())) == pytest.approx(
        [-math.sqrt(3 / rank), 0.0, math.sqrt(3 / rank)]
    )
    for sign in (-1, 1):
        assert (entries.sign() == sign).float().mean() == pytest.approx(1 / 6, abs=0.005)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama-3", tmp_path_factory.mktemp("tiny"))


def skews(folder: Path) -> Artifacts:
    shape = read_decoder(folder).shape
    tensors = {
        f"layers.{index}.skew": orthogonal(shape.kv_head_count, shape.head_dim)
        for index in range(shape.layer_count)
    }
    return Artifacts(SelectionMethod.INFINIGEN, tensors, {"tokens": 7})


def test_artefacts_are_read_back_and_bound_to_their_model(tiny: Path, tmp_path: Path) -> None:
    made = skews(tiny)
    method = SelectionMethod.INFINIGEN
    artifacts_path(method, tiny, tmp_path).write_bytes(encoded(made, tiny))
    found = load(method, tiny, tmp_path, CPU)
    assert found.facts == {"tokens": 7}
    assert found.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert torch.equal(found.tensors[name], tensor)
    config = read_decoder(tiny)
    selection = Selection.parsed("infinigen:alpha=4")
    screens = Screens.open(config, selection, tiny, artifacts=tmp_path, device=CPU)
    assert screens.layer(1) is None
    assert isinstance(screens.layer(2), ColumnScreen)

    other = write_tiny("llama-3", tmp_path / "other", seed=1)
    with pytest.raises(FailedPrecondition) as caught:
        load(method, other, tmp_path, CPU)
    assert caught.value.reason == "ARTIFACTS_OF_ANOTHER_MODEL"
    both = (
        caught.value.metadata["model_fingerprint"],
        caught.value.metadata["artifacts_fingerprint"],
    )
    assert both[0] != both[1]
    assert all(each[:16] in caught.value.message for each in both)


def test_missing_damaged_and_foreign_artefacts_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="splitpoint calibrate"):
        load(SelectionMethod.MAPLE, tiny, tmp_path, CPU)
    content = encoded(skews(tiny), tiny)
    (tmp_path / "maple.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgument, match="no artefacts of maple"):
        load(SelectionMethod.MAPLE, tiny, tmp_path, CPU)
    (tmp_path / "infinigen.safetensors").write_bytes(content[:-9])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load(SelectionMethod.INFINIGEN, tiny, tmp_path, CPU)


def test_factors_that_do_not_fit_are_refused(tiny: Path) -> None:
    config = read_decoder(tiny)
    selection = Selection.parsed("infinigen:0.1")
    wrong = Artifacts(
        SelectionMethod.INFINIGEN, {"layers.0.skew": torch.eye(3).expand(2, 3, 3)}, {}
    )
    with pytest.raises(InvalidArgument, match="skew of layer 0"):
        Screens(config, selection, wrong)
    with pytest.raises(InvalidArgument, match="no factors"):
        Screens(config, selection, Artifacts(SelectionMethod.INFINIGEN, {}, {}))
