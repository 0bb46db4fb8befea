"""`splitpoint bench offload --speculate`: what is counted, and a small run of the real thing.

Takes about 15 seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType, ModelShape
from splitpoint.speculation import DraftMethod
from splitpoint_cli.bench.offload import offload
from splitpoint_cli.bench.offload_report import (
    PLAIN_STREAMING,
    RESIDENT,
    OffloadSample,
    OffloadWorkload,
    Step,
    drafts_report_of,
    table_of,
)
from splitpoint_cli.bench.pooled import PooledHeads, pooled_shape
from splitpoint_cli.bench.texts import beginnings, held_back_files
from worker_service.kernels.choice import in_use

SHAPE = ModelShape("By hand", "llama", 1, 8, 4, 4, 2, 16, 128, 512, DataType.FLOAT32)
WORKLOAD = OffloadWorkload(
    *("By hand", "float32", 1, 100, 8, 184e6, 2, "cpu", 1, 0), speculate=DraftMethod.SELF
)
FACTS = {
    "layers": 1,
    "query_heads": 4,
    "kv_heads": 4,
    "weights": "checkpoint",
    "heads_are_averaged": False,
}


def run(
    seconds: float, pulls: int, link_bytes: int, drafted: int, accepted: int, *tokens: int
) -> OffloadSample:
    steps = (Step(seconds, link_bytes=link_bytes),)
    return OffloadSample(steps, (tokens,), None, 8, pulls, drafted, accepted)


def test_the_report_divides_by_tokens_and_compares_rounds() -> None:
    plain = run(8.0, 8, 8000, 0, 0, 1, 2, 3)
    slow = run(4.0, 4, 4000, 12, 4, 1, 2, 3)
    fast = run(2.0, 2, 2000, 8, 6, 1, 2, 4)
    runs = {PLAIN_STREAMING: (plain, plain), "self": (slow, fast), RESIDENT: (plain, plain)}
    report = drafts_report_of(WORKLOAD, runs, FACTS)
    drafted = report["contenders"]["self"]
    assert drafted["tokens_per_pull"] == 2.6667  # 16 in 6
    assert drafted["link_bytes_per_token"] == 375
    assert drafted["acceptance"] == 0.5
    assert drafted["tokens_per_second"] == 3
    assert drafted["agreeing_token_share"] == 0.8333
    assert report["contenders"][PLAIN_STREAMING]["acceptance"] is None
    assert report["ratios"] == {
        "tokens_per_second_over_plain": 3.0,
        "link_bytes_per_token_over_plain": 0.375,
    }
    assert json.loads(json.dumps(report)) == report
    assert table_of(report).row_count == 3


def test_heads_are_averaged_in_groups_of_neighbours() -> None:
    class Source:
        def get(self, name: str) -> torch.Tensor:
            return torch.arange(8.0).repeat_interleave(2).view(8, 2)

    pooled = PooledHeads(Source(), SHAPE, 2)
    # Heads are rows 0-1, 2-3, 4-5 and 6-7.
    found = pooled.get("model.layers.0.self_attn.k_proj.weight")
    assert found[:, 0].tolist() == [1, 2, 5, 6]
    assert len(pooled.get("model.layers.0.self_attn.q_proj.weight")) == 8
    target = torch.empty(4, 2)
    pooled.read_into("model.layers.0.self_attn.v_proj.weight", target)
    assert torch.equal(target, found)
    assert pooled_shape(SHAPE, 2).kv_head_count == 2
    with pytest.raises(InvalidArgument):
        pooled_shape(SHAPE, 3)


def test_prompts_begin_where_files_begin(tmp_path: Path) -> None:
    folder = resolve_model(None)
    for name, count in (("a.py", 100), ("b.py", 1500), ("c.py", 1500)):
        lines = (f"{name[0]}{number} = {number}\n" for number in range(count))
        (tmp_path / name).write_text("".join(lines))
    files = sorted(tmp_path.iterdir())
    first, second, third, *_ = prompts = beginnings(files, folder, 4, 3000)
    assert {len(each) for each in prompts} == {3000}
    # The first file is too short; after each file's beginning come further pieces.
    assert beginnings(files[1:], folder, 2, 3000) == (first, second)
    assert third not in (first, second)
    with pytest.raises(InvalidArgument, match="the text has"):
        beginnings(files, folder, 40, 3000)
    (tmp_path / "d.py").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        beginnings([tmp_path / "d.py"], folder, 1, 10)
    assert {path.parent.name for path in held_back_files()} == {"asyncio", "unittest"}


@pytest.mark.parametrize(("kv_heads", "select"), [(None, None), (2, None), (2, "columns:0.1,int8")])
def test_a_small_run_gives_equal_texts_and_fewer_bytes(
    kv_heads: int | None, select: str | None, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    offload(
        speculate="self",
        # By measurement there may be none on a busy machine.
        draft_tokens=4,
        kv_heads=kv_heads,
        select=select,
        batch=2,
        prompt=512,
        new=16,
        repeats=1,
        threads=1,
        as_json=True,
        output=found,
    )
    report = json.loads(found.read_text())
    assert report["kernels"] == str(in_use())
    drafted, plain = (report["contenders"][name] for name in ("self", PLAIN_STREAMING))
    # Near ties may fall differently: several rows are other products than one.
    assert drafted["agreeing_token_share"] > 0.6
    # Those of the steps after the one in which the later sequence began.
    assert 10 < drafted["tokens"] <= 2 * 15
    assert plain["tokens_per_pull"] == 1
    assert drafted["tokens_per_pull"] > 1
    assert drafted["accepted"] == drafted["tokens"] - drafted["pulls"]
    assert report["kv_heads"] == (kv_heads or 4)
    assert report["heads_are_averaged"] is (kv_heads == 2)
    assert report["select"] == (select and f"{select},verify")
    # Of eight chunks the first and the newest four stay.
    assert report["window_tokens"] == 256
    assert report["ratios"]["link_bytes_per_token_over_plain"] < 0.5


def test_a_selection_needs_self_drafts() -> None:
    with pytest.raises(InvalidArgument, match="by self, not by suffix"):
        offload(speculate="suffix", select="columns:0.1")


def test_a_method_without_a_measurement_is_named() -> None:
    with pytest.raises(InvalidArgument, match="none of self"):
        offload(speculate="oracle")
