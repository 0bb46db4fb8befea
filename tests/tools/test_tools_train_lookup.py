"""The tool that trains look-up models, at its smallest size; and the rows that it trains on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from tools.train_lookup_models import Row, Rows, Settings, make_model


@pytest.fixture(scope="module")
def rows() -> Rows:
    tokenizer = Tokenizer.load(resolve_model(None))
    assert tokenizer is not None
    text = torch.tensor(tokenizer.encode("def add(left, right):\n    return left + right\n" * 200))
    return Rows(tokenizer, text, Settings("opt", vocabulary=4096))


def looked_up(row: Row) -> list[tuple[int, ...]]:
    """Return the runs of tokens that are answers."""
    runs: list[tuple[int, ...]] = []
    for index, is_answer in enumerate(row.is_answer.tolist()):
        if is_answer and index and row.is_answer[index - 1]:
            runs[-1] += (int(row.ids[index]),)
        elif is_answer:
            runs.append((int(row.ids[index]),))
    return runs


def test_a_passage_repeats_after_a_length_that_differs_by_row(rows: Rows) -> None:
    periods = set()
    for _ in range(20):
        row = rows.passage(64, 1000)
        known = int(row.is_answer.nonzero()[0])
        period = known - 1
        periods.add(period)
        assert torch.equal(row.ids[period:], row.ids[: 64 - period])
        assert row.is_answer[known:].all()
    # A fixed distance would be learned in place of a look-up.
    assert len(periods) > 5


@pytest.mark.parametrize("kind", ["_table", "_needles"])
def test_every_answer_stands_before_the_question(rows: Rows, kind: str) -> None:
    for _ in range(4):
        row: Row = getattr(rows, kind)(512)
        assert len(row.ids) == 512
        answers = looked_up(row)
        assert answers
        ids = tuple(row.ids.tolist())
        for answer in answers:
            places = [at for at in range(len(ids)) if ids[at : at + len(answer)] == answer]
            assert len(places) >= 2


def test_positions_of_the_opt_model_single_out_the_token_before() -> None:
    table = make_model(Settings("opt")).get_parameter("model.decoder.embed_positions.weight")
    assert not table.requires_grad
    rows = table[1000:1400, :]
    products = rows @ rows.T
    own, others = products.diagonal(), products.triu(2)
    assert own.min() > 1.5 * others.max()


def test_what_it_writes_is_served(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.train_lookup_models", "opt", "--smoke"]
    done = subprocess.run(
        [*command, "--threads", "1", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["trained_tokens"] == 20_480
    assert set(report["right_answers"]["512"]) == {"needle", "extraction"}
    shape = shape_from_config(read_config(tmp_path))
    assert (shape.layer_count, shape.kv_head_count, shape.head_dim) == (2, 2, 32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    table = model.get_parameter("model.decoder.embed_positions.weight").float()
    expected = make_model(Settings("opt", hidden=64, context=1024)).get_parameter(
        "model.decoder.embed_positions.weight"
    )
    torch.testing.assert_close(table, expected.detach(), atol=2e-3, rtol=1e-2)
