"""`splitpoint bench offload`: what is counted and reported, and small runs of the real thing.

In its two forms: loading in several orders, and drafts (`--speculate`) and selections (`--select`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_models import write_tiny

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.costs.profile import Profile
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.selection import UNUSED, Selection, SelectionUsage
from splitpoint.shapes import DataType, ModelShape
from splitpoint_cli.bench import offload_runs
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.limits import Peer
from splitpoint_cli.bench.offload import offload
from splitpoint_cli.bench.offload_costs import BatchCosts
from splitpoint_cli.bench.offload_host import OffloadHost, Way
from splitpoint_cli.bench.offload_report import (
    COARSE,
    ENCODED,
    FULL_LOAD,
    KVPR,
    PIPELINED,
    RESIDENT,
    SEQUENTIAL,
    Contender,
    OffloadResults,
    OffloadSample,
    OffloadWorkload,
    Step,
    StepPart,
    compared_report_of,
    report_of,
    table_of,
)
from splitpoint_cli.bench.offload_runs import model_of, peer_of, run_all
from splitpoint_cli.bench.pooled import PooledHeads, pooled_shape
from splitpoint_cli.bench.texts import beginnings, held_back_files, random_prompts
from worker_service.kernels.choice import in_use

SHAPE = ModelShape("By hand", "opt", 4, 8, 2, 2, 4, 16, 128, 512, DataType.FLOAT32, False, True)
PROFILE = Profile(1e6, 0.0, 1e6, 0.0, 1e6, step_compute_seconds=0.5)
BOUND = (0.8, 0.7)
WORKLOAD = OffloadWorkload("By hand", "float32", 2, 100, 4, None, 2, "cpu", 1, 0)
SELECTING = replace(
    WORKLOAD, link_rate=1000.0, compared=(Selection.parsed("columns:0.1"),), lengths=(100,)
)
MULTI_HEAD = ModelShape("By hand", "llama", 1, 8, 4, 4, 2, 16, 128, 512, DataType.FLOAT32)
FACTS = {
    "layers": 4,
    "query_heads": 4,
    "kv_heads": 4,
    "weights": "random",
    "heads_are_averaged": False,
}


def run(seconds: Sequence[float], tokens: str, predicted: float | None = None) -> OffloadSample:
    steps = tuple(Step(each, predicted, link_bytes=1000, link_seconds=0.1) for each in seconds)
    return OffloadSample(steps, tuple(tuple(map(int, each)) for each in tokens.split()))


def costs(**changes: Any) -> BatchCosts:
    """X is 32 bytes a token and layer, K and V 64; a rebuild takes 4 h d_kv = 256 FLOP."""
    values = {"batch": 2, "cached": 1024, "has_activations": True, "compute_seconds": 0.5}
    return BatchCosts(SHAPE, PROFILE, chunk_tokens=64, staging_tokens=1024, **values | changes)


def test_a_step_is_bound_by_its_link_or_its_device() -> None:
    """Layer 0 sends no X."""
    link, compute = costs().bound(384)
    assert link == pytest.approx(2 * (3 * 384 * 32 + 4 * 640 * 64) / 1e6)
    assert compute == pytest.approx(0.5 + 2 * 4 * 384 * 256 / 1e6)
    assert costs().bound(0)[1] == 0.5
    for split in (0, 64, 384, 1024):
        assert costs().step_seconds(split) >= max(costs().bound(split)) * (1 - 1e-9)


def test_the_batch_is_planned_as_one() -> None:
    """Every choice is best among its own kind, by brute force over whole chunks."""
    batch = costs(compute_seconds=0.01)
    everything = range(0, 1025, 64)
    planned = batch.planned()
    assert planned.reason
    assert 0 < planned.split_tokens < 1024
    assert planned.step_seconds == batch.step_seconds(planned.split_tokens)
    assert planned.step_seconds <= 1.02 * min(batch.step_seconds(split) for split in everything)
    # Alone, a rebuilt token costs 3 x 32 + 4 x 256 against 4 x 64 of a loaded one.
    assert batch.best(Schedule.SERIAL).split_tokens == 0
    column = batch.best(Schedule.COLUMN)
    assert column.step_seconds >= planned.step_seconds * (1 - 1e-9)
    # X of layers 1 to 3 beside other work, then a rebuild beside the rest of K,V.
    sent, rebuilt = 2 * 3 * 32 * column.split_tokens, 2 * 4 * 256 * column.split_tokens
    loaded = 2 * 4 * 64 * (1024 - column.split_tokens)
    assert sent / 1e6 > 0.01
    seconds = (sent + max(rebuilt, loaded)) / 1e6 + 0.01 / 4
    assert column.step_seconds == pytest.approx(seconds)
    late = costs(compute_seconds=2.0).step_seconds(512, Schedule.COLUMN)
    assert late == pytest.approx(2.0 + 2 * 4 * 256 * 512 / 1e6 + 2.0 / 4)
    grouped = costs(has_activations=False)
    best = [grouped.best(schedule).split_tokens for schedule in (Schedule.SERIAL, Schedule.COLUMN)]
    assert [grouped.planned().split_tokens, *best] == [0, 0, 0]


def test_a_batch_may_be_longer_than_any_sequence() -> None:
    """Its split is not cut off where the context of one of them ends."""
    batch = costs(batch=64, cached=448, compute_seconds=0.01)
    assert batch.batch * batch.cached > SHAPE.context_length
    planned = batch.planned()
    best = min(batch.step_seconds(split) for split in range(0, 449, 64))
    assert planned.step_seconds <= 1.02 * best < batch.step_seconds(0)


def some_report() -> dict[str, Any]:
    contenders = {
        FULL_LOAD: Contender(0, (run([2.0, 4.0, 2.0], "1234 5678"),) * 2),
        SEQUENTIAL: Contender(50, (run([3.0] * 2, "123 567"),)),
        KVPR: Contender(30, (run([4.0] * 3, "1234 5678"),)),
        PIPELINED: Contender(
            40, (run([1.0, 2.0, 1.0], "1239 5678", 1.1), run([9.0] * 3, "1 5", 1.1))
        ),
        RESIDENT: Contender(None, (run([0.5] * 3, "1234 5678"),)),
        "transformers offloaded sdpa": Contender(None, (run([8.0] * 3, "1234 5678"),)),
    }
    results = OffloadResults(
        PROFILE,
        "why",
        BOUND,
        contenders,
        skipped=("x",),
    )
    return report_of(WORKLOAD, results)


def test_the_report_compares_medians() -> None:
    report = some_report()
    ours = report["contenders"][PIPELINED]
    assert ours["decode_seconds"] == (4 + 27) / 2
    assert ours["step_seconds"] == (2 + 9) / 2
    assert ours["agreeing_token_share"] == 7 / 8
    assert report["ratios"]["pipelined_over_full_load"] == round(15.5 / 8, 3)
    assert report["ratios"]["sequential_over_pipelined"] == round(6 / 10.5, 3)
    assert report["ratios"]["pipelined_over_fastest_peer"] == round(15.5 / 24, 3)
    assert report["ratios"]["pipelined_step_over_bound"] == round(5.5 / 0.8, 3)
    assert report["ratios"]["kvpr_order_over_pipelined"] == round(12 / 15.5, 3)
    assert report["bound"]["seconds"] == 0.8
    # 6,000 bytes at a megabyte a second, in 16 seconds.
    assert report["link"]["efficiency"] == round(0.006 / 16, 4)
    assert report["link"]["bytes_per_step"] == 1000
    # 0.1, 0.45, 0.1 of one run, 7.9 / 9 thrice of the other.
    assert report["prediction"] == {
        "median_error": round((0.45 + 7.9 / 9) / 2, 4),
        "predicted_steps": 6,
        "missing": "",
    }
    assert json.loads(json.dumps(report)) == report
    assert table_of(report).row_count == 7


def test_without_predictions_it_says_why() -> None:
    silent = Contender(0, (run([1.0], "12"),))
    names = (FULL_LOAD, SEQUENTIAL, KVPR, PIPELINED)
    results = OffloadResults(
        PROFILE,
        "why",
        BOUND,
        dict.fromkeys(names, silent),
    )
    report = report_of(WORKLOAD, results)
    assert report["prediction"]["median_error"] is None
    assert "no step" in report["prediction"]["missing"]
    assert "no prediction error: no step" in str(table_of(report).caption)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("dtype", {"dtype": "int4"}),
        ("link_rate", {"link_rate": "fast"}),
        ("png", {"png_file": Path("x.png")}),
        ("kv_encoding", {"kv_encoding": ["int8", "native"]}),
        ("trace", {"trace_file": Path("/no/such/folder.json")}),
        ("prompt", {"prompt": 2048, "new": 2}),
        ("micro_batch", {"batch": 2, "micro_batch": 3}),
        ("micro_batch", {"micro_batch": 2, "select": ["columns:0.1"]}),
    ],
)
def test_bad_input_is_named(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        offload(**{"threads": 1, **options})
    assert caught.value.field == field


def tiny(case: str, folder: Path, **changes: Any) -> tuple[ModelShape, OffloadWorkload]:
    write_tiny(case, folder)
    shape = shape_from_config(read_config(folder), name="tiny", data_type=DataType.FLOAT32)
    workload = OffloadWorkload("tiny", "float32", 3, 150, 50, None, 1, "cpu", 1, 0)
    return shape, replace(workload, **changes)


def test_every_way_to_decode_gives_transformers_tokens(tmp_path: Path) -> None:
    """The prompt ends inside a chunk, and that chunk is filled and sealed on the way."""
    shape, workload = tiny("opt", tmp_path, prompt=180, new=20)
    peer = Peer(shape, 3, torch.device("cpu"), cache="dynamic")
    with closing(OffloadHost(model_of(shape, workload, peer), workload)) as host:
        host.prefill()
        peer.choose(host.prompts, 2)
        wanted = peer.decode(host.prompts, workload.new)
        assert len({token for each in wanted.tokens for token in each}) > 1
        assert len(wanted.steps) == workload.new - 1
        runs = [host.decode(workload.new, Way(residency=Residency.RESIDENT))]
        for split in (0, 64, 100, 180):
            for schedule in (Schedule.PIPELINED, Schedule.COLUMN, Schedule.SERIAL):
                runs.append(host.decode(workload.new, Way(schedule, split_tokens=split)))
    for each in runs:
        assert each.tokens == wanted.tokens
        assert len(each.steps) == workload.new - 1
        assert all(step.seconds > 0 for step in each.steps)


def test_weights_cross_the_link_once_for_all_sequences(tmp_path: Path) -> None:
    """KVPR's loop over batches is one step of all sequences: their caches cross besides.

    Tokens are those of each sequence alone.
    """
    write_tiny("opt", tmp_path, num_hidden_layers=4)
    shape = shape_from_config(read_config(tmp_path), name="tiny", data_type=DataType.FLOAT32)
    workload = replace(WORKLOAD, batch=4, prompt=130, new=6, weights_on_host=True)
    prompts = random_prompts(shape.vocabulary_size, 4, 130, seed=5)
    model = model_of(shape, workload)
    # Serial lanes: every piece of work ends in its own step. Two chunks, one of them rebuilt.
    page, inputs = 64 * shape.kv_bytes_per_token, 64 * shape.activation_bytes_per_token_layer
    cache = page + (shape.layer_count - 1) * inputs
    alone, together = Way(Schedule.SERIAL, split_tokens=64), Way(split_tokens=64)
    texts = {}
    for batch in (1, 4):
        batches = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
        with closing(OffloadHost(model, replace(workload, batch=batch), prompts=prompts)) as host:
            host.prefill()
            runs = [host.decode(workload.new, alone, prompts=each) for each in batches]
            texts[batch] = [each for run in runs for each in run.tokens]
            for run in runs:
                moved = {step.link_bytes for step in run.steps}
                assert moved == {model.host_weight_bytes() + batch * cache}
                assert set(run.steps[0].parts) == set(StepPart)
            overlapped = host.decode(workload.new, together, prompts=prompts[:batch])
            assert list(overlapped.tokens) == texts[batch][:batch]
    assert texts[1] == texts[4]
    assert len({token for text in texts[1] for token in text}) > 1


def test_batches_of_kvprs_order_need_the_memory_of_one_of_them(tmp_path: Path) -> None:
    shape, workload = tiny("opt", tmp_path, batch=4, prompt=180, new=5, weights_on_host=True)
    found = {}
    for at_once in (None, 1):
        each = replace(workload, micro_batch=at_once)
        with closing(OffloadHost(model_of(shape, each), each)) as host:
            host.prefill()
            found[at_once] = host.decode(5, Way(Schedule.COLUMN, split_tokens=64))
            ours = host.decode(5, Way(split_tokens=64))
    assert found[1].tokens == found[None].tokens == ours.tokens
    # Three tiles, each of the three chunks of every sequence, or of one.
    page = 64 * (shape.kv_bytes_per_token_layer + 2 * shape.activation_bytes_per_token_layer)
    whole, looped = (found[at_once].device_bytes or 0 for at_once in (None, 1))
    assert whole - looped >= 3 * 3 * 3 * page


def test_a_grouped_model_has_one_split(tmp_path: Path) -> None:
    shape, workload = tiny("qwen2", tmp_path, new=5)
    with closing(OffloadHost(model_of(shape, workload), workload)) as host:
        assert not host.has_activations
        host.prefill()
        resident = host.decode(5, Way(residency=Residency.RESIDENT))
        assert host.decode(5).tokens == resident.tokens


def test_the_peer_runs_in_the_same_rounds(tmp_path: Path) -> None:
    """With another of its caches, since the offloaded one needs a GPU."""
    shape, workload = tiny("opt", tmp_path, new=6, batch=2)
    said = Console(file=io.StringIO())
    progress = Progress(said)
    peer = Peer(shape, 3, torch.device("cpu"), cache="dynamic")
    results = run_all(shape, workload, progress, peer)
    name = f"transformers dynamic {peer.attention}"
    report = report_of(workload, results)
    assert report["contenders"][name]["steps"] == 5
    assert {each["agreeing_token_share"] for each in report["contenders"].values()} == {1.0}
    assert report["ratios"]["pipelined_over_fastest_peer"] > 0
    assert report["prediction"]["predicted_steps"] == 5
    assert report["link"]["bytes_per_step"] > 0
    assert report["skipped"] == []
    assert isinstance(said.file, io.StringIO)
    assert "timed runs: 6 in all" in said.file.getvalue()
    assert peer_of(shape, workload, progress) is None


def test_a_small_run_ends_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny("opt", tmp_path / "model")
    files = {name: tmp_path / f"{name}.out" for name in ("output", "trace_file")}
    offload(
        shape=str(folder),
        batch=2,
        prompt=130,
        new=8,
        link_rate="40MB",
        threads=1,
        repeats=1,
        sweep=True,
        weights_on_host=True,
        kv_encoding=["int8", "int4", "int8"],
        png_file=tmp_path / "sweep.png",
        as_json=True,
        **files,  # type: ignore[arg-type]
    )
    last = capsys.readouterr().out
    assert files["output"].read_text() == last
    report: dict[str, Any] = json.loads(last)
    assert report["kernels"] == str(in_use())
    encoded = {f"{ENCODED}int8", f"{ENCODED}int4"}
    exact = {FULL_LOAD, SEQUENTIAL, KVPR, PIPELINED, COARSE, RESIDENT}
    contenders = report["contenders"]
    assert set(contenders) == exact | encoded
    assert {contenders[name]["agreeing_token_share"] for name in exact} == {1.0}
    assert contenders[KVPR]["device_bytes"] > contenders[PIPELINED]["device_bytes"]
    # Its pages are those of the whole cache.
    assert contenders[RESIDENT]["device_bytes"] > contenders[PIPELINED]["device_bytes"]
    assert report["profile"]["host_weight_bytes"] > 0
    for name in encoded:
        assert contenders[name]["split_tokens"] == contenders[PIPELINED]["split_tokens"]
        assert report["ratios"][f"{name.removeprefix(ENCODED)}_step_over_native"] > 0
    assert report["ratios"]["fine_over_coarse_weights"] > 0
    assert report["profile"]["link_bytes_per_second"] < 41e6
    splits = [point["split_tokens"] for point in report["sweep_points"]]
    assert splits == sorted({*splits, 0, 64, 128, 130})
    assert report["contenders"][PIPELINED]["split_tokens"] in splits
    assert "needs a GPU" in report["skipped"][0]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["trace_file"].read_text())["traceEvents"]


# -- drafts and selections ----------------------------------------------------------------


def compared_run(
    seconds: float, size: int, *tokens: int, fetched: int = 0, **counts: int
) -> OffloadSample:
    """Two steps of four tokens each."""
    rows = SelectionUsage(
        step_count=1,
        visible_token_count=100,
        read_token_count=12,
        fetched_row_count=fetched,
        reused_row_count=10 - fetched,
    )
    steps = (Step(seconds, link_bytes=size, token_count=4, selected=rows if fetched else UNUSED),)
    return OffloadSample(steps * 2, (tokens,), token_count=8, **counts)


def test_a_report_divides_by_tokens_and_compares_rounds() -> None:
    full = (compared_run(1.0, 800, 1, 2, 3, pull_count=8), compared_run(2.0, 800, 1, 2, 3))
    selected = tuple(compared_run(each, 132, 1, 2, 4, fetched=4) for each in (0.2, 0.4))
    drafting = compared_run(0.5, 400, 1, 2, 3, pull_count=2, drafted=8, accepted=6)
    runs = {FULL_LOAD: full, "columns:0.1": selected, "self": (drafting, drafting)}
    report = compared_report_of(SELECTING, {100: runs}, FACTS)
    (length,) = report["results"]
    assert length["cached"] == 100
    found = length["contenders"]
    assert (
        found["columns:0.1"]
        | {
            "step_over_full_load": 0.2,
            "over_full_load": 5,
            "link_bytes_per_step": 132,
            "link_bytes_per_token": 33,
            "read_share": 0.12,
            "fetched_share": 0.4,
            "agreeing_token_share": 0.6667,
            "acceptance": None,
            "tokens_per_pull": None,
        }
        == found["columns:0.1"]
    )
    assert found["self"]["tokens_per_pull"] == 4
    assert found["self"]["acceptance"] == 0.75
    assert found["self"]["over_full_load"] == 3
    assert found[FULL_LOAD]["read_share"] is None
    assert json.loads(json.dumps(report)) == report
    assert table_of(report).row_count == 3


def test_heads_are_averaged_in_groups_of_neighbours() -> None:
    class Source:
        def get(self, name: str) -> torch.Tensor:
            return torch.arange(8.0).repeat_interleave(2).view(8, 2)

    pooled = PooledHeads(Source(), MULTI_HEAD, 2)
    # Heads are rows 0-1, 2-3, 4-5 and 6-7.
    found = pooled.get("model.layers.0.self_attn.k_proj.weight")
    assert found[:, 0].tolist() == [1, 2, 5, 6]
    assert len(pooled.get("model.layers.0.self_attn.q_proj.weight")) == 8
    target = torch.empty(4, 2)
    pooled.read_into("model.layers.0.self_attn.v_proj.weight", target)
    assert torch.equal(target, found)
    assert pooled_shape(MULTI_HEAD, 2).kv_head_count == 2
    with pytest.raises(InvalidArgument):
        pooled_shape(MULTI_HEAD, 3)


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


@pytest.mark.parametrize("kv_heads", [2, pytest.param(None, marks=pytest.mark.chaos)])
def test_a_small_run_of_drafts_gives_equal_texts_and_fewer_bytes(
    kv_heads: int | None, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    offload(
        speculate="self",
        # By measurement there may be none on a busy machine.
        draft_tokens=4,
        kv_heads=kv_heads,
        select=["columns:0.1,int8"],
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
    assert report["kv_heads"] == (kv_heads or 4)
    assert report["heads_are_averaged"] is (kv_heads == 2)
    selection = "columns:0.1,int8,verify"
    assert report["compared"] == [selection]
    (length,) = report["results"]
    contenders = length["contenders"]
    assert list(contenders) == [FULL_LOAD, "self", selection, RESIDENT]
    assert contenders[FULL_LOAD]["tokens_per_pull"] == 1
    for name in ("self", selection):
        drafted = contenders[name]
        # Near ties may fall differently: several rows are other products than one.
        assert drafted["agreeing_token_share"] > 0.6
        assert drafted["tokens_per_pull"] > 1
        # All may be right where the text repeats itself.
        assert 0 < drafted["accepted"] <= drafted["drafted"]
        assert drafted["link_bytes_per_token"] < 0.5 * contenders[FULL_LOAD]["link_bytes_per_token"]


def test_a_selection_needs_self_drafts() -> None:
    with pytest.raises(InvalidArgument, match="by self, not by suffix"):
        offload(speculate="suffix", select=["columns:0.1"])


def test_a_method_without_a_measurement_is_named() -> None:
    with pytest.raises(InvalidArgument, match="none of self"):
        offload(speculate="oracle")


def small_run_of_a_selection(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the report of three layers with random weights, a tenth of whose tokens are read."""
    output = folder / "report.json"
    offload(
        shape="smollm2-135m",
        layers=3,
        kv_heads=3,
        batch=1,
        new=6,
        threads=1,
        repeats=1,
        select=["columns:0.1"],
        output=output,
        **options,
    )
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def test_a_small_run_of_a_selection_counts_what_crosses_the_link(tmp_path: Path) -> None:
    # Slow enough for a selection to gain from int8.
    report = small_run_of_a_selection(
        tmp_path, link_rate="2MB/s", length=[300, 330], kv_encoding=["int8"]
    )
    assert report["weights"] == "random"
    assert [each["cached"] for each in report["results"]] == [300, 330]
    for length in report["results"]:
        contenders = length["contenders"]
        sizes = {name: each["link_bytes_per_step"] for name, each in contenders.items()}
        # Two layers read everything, one a tenth, in whole pages.
        assert 2 / 3 <= sizes["columns:0.1"] / sizes[FULL_LOAD] < 0.75
        assert sizes[RESIDENT] == 0
        # 66 bytes for 256; whole chunks and rows alike.
        share = sizes["columns:0.1, int8"] / sizes["columns:0.1"]
        assert share == pytest.approx(66 / 256, rel=0.05)
        assert 0.1 <= contenders["columns:0.1"]["read_share"] < 0.5
        assert 0 < contenders["columns:0.1"]["fetched_share"] <= 1


@pytest.mark.parametrize("kv_heads", [2, pytest.param(4, marks=pytest.mark.chaos)])
def test_selections_and_heavy_hitters_are_in_one_table(
    kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer loads what it keeps, once per token."""
    # Factors of little text.
    monkeypatch.setattr(offload_runs, "LENGTH", 128)
    monkeypatch.setattr(offload_runs, "TOKENS", 256)
    output = tmp_path / "report.json"
    compared = ["h2o:0.1", "columns:0.1,int8", "columns:0.15,int8,verify", "lowrank:0.1,columns=8"]
    offload(
        shape=str(resolve_model(None)),
        kv_heads=kv_heads,
        batch=1,
        new=10,
        link_rate="20MB/s",
        threads=1,
        repeats=1,
        select=compared,
        length=[400],
        output=output,
    )
    report = json.loads(output.read_text())
    assert report["compared"] == [str(Selection.parsed(each)) for each in compared]
    (length,) = report["results"]
    found = length["contenders"]
    assert list(found) == [FULL_LOAD, *report["compared"], RESIDENT]
    for name, facts in found.items():
        assert facts["tokens_per_second"] > 0
        assert facts["device_bytes"] > 0
        assert (facts["link_bytes_per_token"] > 0) == (name != RESIDENT)
    # Two of eight layers keep everything, the others a tenth of it.
    token_bytes = report["kv_bytes_per_token"] / 8
    kept = 2 * 404 + 6 * 41
    assert found["h2o:0.1"]["link_bytes_per_token"] == pytest.approx(kept * token_bytes, rel=0.03)
    # Near ties may fall differently.
    assert found["columns:0.15,int8,verify"]["agreeing_token_share"] > 0.6


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 6") as raised:
        offload(select=["columns:0.1"], new=4)
    assert raised.value.field == "new"
    with pytest.raises(InvalidArgument, match="reads every token"):
        offload(select=["columns:1"])
    with pytest.raises(InvalidArgument, match="h2o is measured"):
        offload(select=["h2o:0.1,verify"])
    with pytest.raises(InvalidArgument, match="needs the same columns in every"):
        offload(select=["lowrank:0.1", "lowrank:0.1,columns=8"])
    with pytest.raises(InvalidArgument, match="pools are not measured here"):
        offload(select=["columns:0.1,full_layers=0,pool=0.6"])
    with pytest.raises(InvalidArgument, match="has its own layers"):
        offload(select=["columns:0.1"], layers=16)
    with pytest.raises(FailedPrecondition, match="nothing was selected: rows and screens take"):
        offload(
            shape="smollm2-135m",
            layers=3,
            batch=1,
            prompt=70,
            new=8,
            select=["columns:0.5"],
            link_rate="20MB/s",
            threads=1,
            repeats=1,
        )
