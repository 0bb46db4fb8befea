"""What fits where: against sums by hand, against the worker's own division."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from splitpoint.config import format_size
from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.errors import InvalidArgument, NotFound, ResourceExhausted, SplitpointError
from splitpoint.planning.plan import RestoreMethod
from splitpoint.planning.weight_placement import WeightObjective
from splitpoint.residency.batch_size import BatchLimit
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding
from splitpoint.speculation import DraftMethod
from splitpoint_cli.main import app
from splitpoint_cli.models import NamedModel
from splitpoint_cli.planning.sizing import Load, Node, host_memory_of, size_up

H100 = BUILT_IN_PROFILES["h100"]
GIB = 1 << 30


def node(memory: int = 72 * GIB, profile: Profile = H100, **more: object) -> Node:
    return Node(profile, memory, step_compute_seconds=6e-3, **more)  # type: ignore[arg-type]


def test_a_long_request_of_a_grouped_query_model() -> None:
    found = size_up(BUILT_IN_SHAPES["llama-3.1-8b"], node(), Load(32768, 512, 256))
    # 32 layers x (K and V) x 8 heads x 128 x 2 bytes.
    token = 32 * 2 * 8 * 128 * 2
    assert found.host_token_bytes == token
    assert found.resident_request_bytes == found.host_request_bytes == 32768 * token
    assert found.prefix_bytes == 32000 * token
    assert found.resident_count == found.memory.cache_capacity_bytes // (32768 * token)
    assert not found.has_activations
    assert found.restore.method is RestoreMethod.LOAD
    assert found.restore.predicted_restore_seconds == pytest.approx(
        32000 * token / H100.link_bytes_per_second, rel=0.01
    )
    # The link carries all caches in each step, and hides what a step computes.
    whole = found.streamed_count * 32768 * token
    assert found.step_seconds == pytest.approx(whole / H100.link_bytes_per_second, rel=0.02)


def test_a_model_that_keeps_activations() -> None:
    found = size_up(BUILT_IN_SHAPES["opt-6.7b"], node(), Load(2048, 512, 128))
    # K, V and X are as wide as each other.
    assert found.host_token_bytes == 32 * 3 * 4096 * 2
    assert found.resident_request_bytes == 2048 * 32 * 2 * 4096 * 2
    assert found.restore.split_tokens > 0
    assert found.restore.predicted_restore_seconds < 0.6 * found.restore.predicted_load_seconds


def test_drafts_leave_less_for_the_cache() -> None:
    """As a worker divides: logits of 64 drafts, twice; a window of each streamed request."""
    shape, load = BUILT_IN_SHAPES["llama-3.1-8b"], Load(32768, 512, 256)
    plain = size_up(shape, node(), load)
    by = {
        method: size_up(shape, node(drafts=method), load)
        for method in (DraftMethod.OFF, DraftMethod.SUFFIX, DraftMethod.SELF, DraftMethod.AUTO)
    }
    for method, found in by.items():
        more = found.memory.workspace_bytes - plain.memory.workspace_bytes
        assert more >= 64 * shape.vocabulary_size * 4 * 2
        assert found.memory.cache_capacity_bytes < plain.memory.cache_capacity_bytes
        has_window = method in (DraftMethod.SELF, DraftMethod.AUTO)
        assert (found.streamed_request_bytes > plain.streamed_request_bytes) == has_window


def test_the_speculative_config_of_workers_is_understood() -> None:
    def sized(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["size", "--json", *arguments])
        return done.exit_code, done.output if done.exception is None else str(done.exception)

    plain, drafting = (
        json.loads(sized(*arguments)[1])["memory"]["workspace_bytes"]
        for arguments in ((), ("--speculative-config", '{"method": "ngram"}'))
    )
    assert drafting > plain
    code, said = sized("--speculative-config", "{}")
    assert code != 0
    assert "method is missing" in said


def test_a_draft_model_takes_its_memory_first() -> None:
    """As a worker divides: its cache holds a whole batch, but takes a tenth at most."""
    served, draft = BUILT_IN_SHAPES["opt-6.7b"], BUILT_IN_SHAPES["opt-125m"]
    load = Load(2048, 512, 128)
    for memory, pages in ((72 * GIB, 32 * 2048 // 64), (20 * GIB, None)):
        drafting = node(memory, drafts=DraftMethod.MODEL, draft=NamedModel(draft))
        # Without a draft model more places would be chosen, whose workspace takes memory, too.
        plain = size_up(served, replace(drafting, draft=None, max_batch=32), load)
        found = size_up(served, drafting, load)
        assert (found.batch.size, found.batch.limit) == (32, BatchLimit.DRAFTS)
        assert plain.draft is None
        assert found.draft is not None
        assert found.draft.weight_bytes == draft.weight_bytes
        assert found.draft.page_bytes == draft.page_bytes(64)
        cache = found.draft.page_count * found.draft.page_bytes
        assert found.draft.page_count == pages or 0.09 < cache / memory <= 0.1
        taken = found.draft.budget_bytes
        assert taken == draft.weight_bytes + found.draft.workspace_bytes + cache
        assert found.memory.budget_bytes == memory - taken
        less = plain.memory.cache_capacity_bytes - found.memory.cache_capacity_bytes
        assert less == pytest.approx(taken, rel=0.05)
    with pytest.raises(ResourceExhausted, match="too small"):
        size_up(served, node(GIB // 4, drafts=DraftMethod.MODEL, draft=NamedModel(draft)), load)


def test_a_draft_model_on_the_command_line() -> None:
    arguments = ["size", "--model", "opt-6.7b", "--tokens", "2048", "--draft-model"]
    done = CliRunner().invoke(app, [*arguments, "opt-125m"])
    assert done.exit_code == 0, done.output
    assert "draft model opt-125m " in " ".join(done.output.split()).lower()
    told = json.loads(CliRunner().invoke(app, [*arguments, "opt-125m", "--json"]).stdout)
    assert told["draft"]["budget_bytes"] + told["memory"]["budget_bytes"] == 72 * GIB
    wrong = CliRunner().invoke(app, [*arguments, "llama-168m"])
    assert "llama-168m cannot draft: its vocabulary has 32,000 tokens" in str(wrong.exception)


def test_weights_that_do_not_fit_are_counted_in_each_step() -> None:
    shape = BUILT_IN_SHAPES["llama-3-8b"]
    small = size_up(shape, node(12 * GIB), Load(2048, 512, 128))
    assert small.placement.streamed_bytes > 0
    link = small.placement.streamed_bytes / H100.link_bytes_per_second
    assert small.lone_step_seconds > link
    assert small.full_batch.tokens_per_second > 0
    with pytest.raises(ResourceExhausted, match="too small"):
        size_up(shape, node(1 * GIB), Load(2048, 512, 128))


def test_for_throughput_every_place_is_taken_at_the_same_memory() -> None:
    """KVPR's setting, OPT-30B on an A100 of 40 GB: weights and caches on the host."""
    shape, a100 = BUILT_IN_SHAPES["opt-30b"], BUILT_IN_PROFILES["a100-40"]
    load = Load(2048, 512, 128)
    found = {
        objective: size_up(
            shape, node(36 * GIB, a100, chunk_tokens=16, weight_objective=objective), load
        )
        for objective in WeightObjective
    }
    best = found[WeightObjective.THROUGHPUT]
    assert best.full_batch.resident + best.full_batch.streamed == 32
    assert "32 requests as long as the context at once" in best.placement.reason
    for objective in (WeightObjective.LATENCY, WeightObjective.BALANCED):
        one_batch = found[objective].residents
        assert best.full_batch.tokens_per_second > 1.3 * one_batch.tokens_per_second
        full_batch = found[objective].full_batch
        # Whole layers and parts of a resident request are not the same.
        assert best.full_batch.tokens_per_second >= 0.97 * full_batch.tokens_per_second
    arguments = ["size", "--model", "opt-30b", "--profile", "a100-40", "--device-memory", "36GiB"]
    arguments += ["--tokens", "2048", "--weight-objective", "throughput"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    output = " ".join(done.output.split())
    assert "weights crossing once" in output
    assert "throughput takes the first" in output
    # An encoded store streams nothing unless asked.
    done = CliRunner().invoke(app, [*arguments, "--kv-encoding", "int8"])
    assert done.exit_code == 0, done.output
    assert "weights crossing once" not in " ".join(done.output.split())
    assert "streamed, have the most" not in " ".join(done.output.split())


@pytest.mark.parametrize("memory", ["6GiB", "12GiB"])
@pytest.mark.parametrize("model", ["opt-6.7b", "llama-3-8b"])
@pytest.mark.parametrize("profile", ["a100-80", "cpu"])
def test_plan_and_size_place_weights_alike(
    model: str, profile: str, memory: str, tmp_path: Path
) -> None:
    """As a worker: a CPU holds a head by itself that is tied to the table, a GPU does not."""
    if profile == "cpu":
        path = tmp_path / "profile.json"
        path.write_text(replace(BUILT_IN_PROFILES["a100-80"], device_type="cpu").to_json())
        profile = str(path)
    arguments = ("--model", model, "--profile", profile, "--device-memory", memory, "--json")
    lengths = ("--max-tokens", "128", "--weight-objective", "throughput")
    plan, size = (
        json.loads(CliRunner().invoke(app, [*command, *arguments, *lengths]).stdout)
        for command in (("plan", "--cached", "100", "--new", "9"), ("size", "--tokens", "2048"))
    )
    assert plan["weights_reason"] == size["placement"]["reason"]
    assert plan["device_weight_bytes"] == size["memory"]["weight_bytes"]
    on_host = size["placement"]["on_host"]
    assert [plan["host_layers"], plan["head_on_host"]] == [on_host["layers"], on_host["head"]]
    total = BUILT_IN_SHAPES[model].weight_bytes
    if profile != "a100-80" and BUILT_IN_SHAPES[model].tied_embeddings:
        total += BUILT_IN_SHAPES[model].embedding_bytes
    assert plan["weights_reason"].startswith(f"{format_size(total)} of weights do not fit")


def test_host_memory_has_room_for_the_streamed_requests_of_a_batch() -> None:
    arguments = ["size", "--model", "opt-30b", "--profile", "a100-40", "--device-memory", "36GiB"]
    arguments += ["--tokens", "2048", "--max-tokens", "128", "--json"]

    def sized(*more: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(CliRunner().invoke(app, [*arguments, *more]).stdout)
        return told

    found = sized("--weight-objective", "throughput")
    assert found["batch_streams"]
    assert found["streamed_wanted"] == found["full_batch"]["streamed"] > 20
    needed = found["streamed_wanted"] * found["host_request_bytes"] + 100 * found["prefix_bytes"]
    assert found["host_memory_bytes"] == int(1.1 * needed)
    assert sized("--weight-objective", "throughput", "--streamed", "0")["streamed_wanted"] == 0
    # From an encoded store no request is streamed unless asked.
    assert sized("--kv-encoding", "int8")["streamed_wanted"] == 0


def test_encodings_shrink_the_host_and_not_the_device() -> None:
    shape = BUILT_IN_SHAPES["llama-3-8b"]
    native, int4 = (
        size_up(shape, node(encoding=encoding), Load(4096, 64, 64))
        for encoding in (Encoding.NATIVE, Encoding.INT4)
    )
    assert int4.host_request_bytes == pytest.approx(0.281 * native.host_request_bytes, rel=0.01)
    assert int4.resident_request_bytes == native.resident_request_bytes


def test_host_memory_adds_up() -> None:
    found = size_up(BUILT_IN_SHAPES["opt-6.7b"], node(), Load(2048, 512, 128))
    assert host_memory_of(found, streamed_count=0, prefix_count=0) == 0
    both = host_memory_of(found, streamed_count=2, prefix_count=3)
    assert both == int(1.1 * (2 * found.host_request_bytes + 3 * found.prefix_bytes))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ((100, 90, 20), "more than the 100 of a request"),
        ((100, 0, 20), "at least 1 token is new"),
        ((4096, 512, 128), "over OPT-6.7B's context of 2,048"),
    ],
)
def test_loads_that_cannot_be(load: tuple[int, int, int], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        size_up(BUILT_IN_SHAPES["opt-6.7b"], node(), Load(*load))


def test_the_command_prints_rows_and_json() -> None:
    runner = CliRunner()
    arguments = ["size", "--model", "opt-6.7b", "--tokens", "2048", "--max-tokens", "128"]
    shown = runner.invoke(app, [*arguments, "--streamed", "4"])
    assert shown.exit_code == 0
    for words in ("resident at once", "restoring one", "split", "--host-memory", "4 streamed"):
        assert words in shown.stdout
    told = json.loads(runner.invoke(app, [*arguments, "--streamed", "4", "--json"]).stdout)
    assert told["streamed_wanted"] == 4
    assert told["restore"]["method"] == "recompute"
    assert told["host_memory_bytes"] == int(
        1.1 * (4 * told["host_request_bytes"] + 100 * told["prefix_bytes"])
    )
    refused = runner.invoke(app, [*arguments, "--streamed", "400"])
    assert isinstance(refused.exception, InvalidArgument)


def test_measured_costs_want_the_devices_memory(tmp_path: Path) -> None:
    """The link of an H100 would be wrong for a measured profile."""
    profile = tmp_path / "profile.json"
    profile.write_text(H100.to_json())
    runner = CliRunner()
    measured = ("size", "--profile", str(profile), "--model", "llama-3.1-8b")
    refused = runner.invoke(app, measured)
    assert isinstance(refused.exception, InvalidArgument)
    assert "--device-memory" in refused.exception.message
    given = runner.invoke(app, [*measured, "--device-memory", "72GiB"])
    assert given.stdout.splitlines()[2:] == runner.invoke(app, ["size"]).stdout.splitlines()[2:]


MEASURING = {
    "size": ("--device-memory", "1GiB", "--tokens", "64", "--new", "16", "--max-tokens", "16"),
    "simulate": ("--device-memory", "1GiB", "--num-prompts", "1", "--trace-input", "0.001"),
}


@pytest.mark.parametrize("command", MEASURING)
def test_measured_costs_are_those_of_their_model(tmp_path: Path, command: str) -> None:
    path = tmp_path / "status.json"

    def asked(measured_with: str, *more: str) -> Result:
        profile = json.loads(replace(H100, model=measured_with).to_json())
        path.write_text(json.dumps({"workers": [{"id": "0", "profile": profile}]}))
        arguments = ("--profile", str(path), *MEASURING[command], *more, "--json")
        return CliRunner().invoke(app, [command, *arguments])

    def error_of(done: Result) -> SplitpointError:
        assert isinstance(done.exception, SplitpointError), done.output
        return done.exception

    taken = asked("stdlib-llama", "--model", "stdlib-llama")
    told = json.loads(taken.stdout)
    assert told["model_id" if command == "simulate" else "model"] == "stdlib-llama"
    # With the owner or without it; a folder has no owner.
    assert asked("Owner/OPT-125M", "--model", "opt-125m").exit_code == 0
    refused = error_of(asked("stdlib-llama", "--model", "opt-125m"))
    assert isinstance(refused, InvalidArgument)
    assert "of the model stdlib-llama, not of OPT-125M" in refused.message
    by_default = json.loads(asked("stdlib-llama").stdout)
    assert {**by_default, "simulated_in_seconds": 0} == {**told, "simulated_in_seconds": 0}
    assert "give --model" in error_of(asked("")).message
    absent = error_of(asked("no-such-owner/model"))
    assert isinstance(absent, NotFound)
    assert "of the model no-such-owner/model, which is not on this machine" in absent.message


@pytest.mark.parametrize(("model", "tokens"), [("llama-3-8b", 8192), ("llama-3.1-8b", 32768)])
def test_a_request_has_no_more_tokens_than_the_context_unless_it_is_given(
    model: str, tokens: int
) -> None:
    told = json.loads(CliRunner().invoke(app, ["size", "--model", model, "--json"]).stdout)
    token = BUILT_IN_SHAPES[model].kv_bytes_per_token
    assert told["resident_request_bytes"] == tokens * token
    refused = CliRunner().invoke(app, ["size", "--model", "llama-3-8b", "--tokens", "8193"])
    assert "over Llama-3-8B's context of 8,192" in str(refused.exception)


def test_a_request_too_large_for_the_device_is_streamed() -> None:
    shown = CliRunner().invoke(
        app, ["size", "--tokens", "100000", "--device-memory", "24GiB", "--json"]
    )
    told = json.loads(shown.stdout)
    assert told["resident_count"] == 0
    assert told["streamed_wanted"] == told["streamed_count"] > 0
