"""`splitpoint plan --explain-residency` and `what-pays --residency`. Quick: about two seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.errors import InvalidArgument
from splitpoint_cli.main import app
from splitpoint_cli.planning.residency_examples import examples

PLAN = ["plan", "--explain-residency", "--cached", "1024", "--new", "64", "--max-tokens", "64"]


def explained(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*PLAN, *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {way["way"]: way for way in report["ways"]}


@pytest.mark.parametrize("model", ["opt-6.7b", "llama-3-8b"])
@pytest.mark.parametrize("profile", BUILT_IN_PROFILES)
def test_four_ways_with_their_rates(model: str, profile: str) -> None:
    memory = {"opt-6.7b": "24GiB", "llama-3-8b": "17GiB"}[model]
    report = explained("--model", model, "--profile", profile, "--device-memory", memory)
    ways = by_name(report)
    assert list(ways) == ["resident", "waves", "time slices", "streamed"]
    assert "fit at once" in ways["resident"]["reason"]
    assert report["best"] == "waves"
    assert "waves: " in report["reason"]
    assert "streamed " in report["reason"]
    for name in ("waves", "time slices", "streamed"):
        way = ways[name]
        assert 0 < way["mean_seconds"] <= way["last_seconds"]
        assert way["tokens_per_second"] == pytest.approx(64 * 64 / way["last_seconds"])
    assert ways["waves"]["link_bytes_per_token"] == 0
    assert ways["streamed"]["link_bytes_per_token"] > ways["time slices"]["link_bytes_per_token"]


def test_memory_for_all_is_resident_and_memory_for_none_is_streamed() -> None:
    model = ("--model", "opt-6.7b", "--profile", "h100-pcie5")
    assert explained(*model, "--requests", "8")["best"] == "resident"
    limits = ("--device-memory", "14GiB", "--max-batch", "8", "--requests", "8")
    tight = explained(*model, *limits, "--max-tokens", "512")
    assert tight["best"] == "streamed"
    assert by_name(tight)["resident"]["reason"].startswith("one request needs 800 MiB")


def test_a_shared_prefix_lets_more_be_resident() -> None:
    arguments = ("--model", "opt-6.7b", "--profile", "a100-pcie4", "--device-memory", "24GiB")
    apart, together = (
        by_name(explained(*arguments, "--shared", shared)) for shared in ("0", "1024")
    )
    assert together["resident"]["is_possible"] or (
        together["waves"]["at_once"] > 1.5 * apart["waves"]["at_once"]
    )


def test_the_profile_of_a_running_stack(tmp_path: Path) -> None:
    """What `status --json` prints has the measured profile of its workers."""
    profile = json.loads(BUILT_IN_PROFILES["a100-pcie4"].to_json())
    measured = {**profile, "memory_seconds_per_byte": 0.0, "step_compute_seconds": 0.02}
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"workers": [{"id": "w0", "profile": measured}]}))
    report = explained("--model", "opt-6.7b", "--profile", str(status), "--device-memory", "24GiB")
    assert by_name(report)["waves"]["step_seconds"] == pytest.approx(0.02)
    assert report["profile"]["description"].startswith("worker w0")


def test_a_plan_for_another_model_takes_the_machines_rates_only(tmp_path: Path) -> None:
    bound = {"step_compute_seconds": 0.02, "host_weight_bytes": 7, "host_kv_weight_bytes": 3}
    profile = {**json.loads(BUILT_IN_PROFILES["a100-pcie4"].to_json()), **bound}
    mine = tmp_path / "mine.json"

    def used(measured_with: str) -> dict[str, object]:
        mine.write_text(json.dumps({**profile, "model": measured_with}))
        asked = ["plan", "--model", "opt-6.7b", "--profile", str(mine), "--cached", "64"]
        done = CliRunner().invoke(app, [*asked, "--new", "64", "--json"])
        told: dict[str, object] = json.loads(done.stdout)["profile"]
        return told

    for name in ("", "opt-6.7b", "facebook/opt-6.7b"):
        found = used(name)
        assert {key: found[key] for key in bound} == bound
    other = used("stdlib-llama")
    assert {other[key] for key in bound} == {0}
    assert other["link_bytes_per_second"] == profile["link_bytes_per_second"]
    assert str(other["description"]).endswith("(rates measured with stdlib-llama)")


def test_measured_costs_need_the_device_memory(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(BUILT_IN_PROFILES["a100-pcie4"].to_json())
    done = CliRunner().invoke(app, [*PLAN, "--model", "opt-6.7b", "--profile", str(mine)])
    assert isinstance(done.exception, InvalidArgument)
    assert done.exception.field == "device_memory"


def test_the_table_for_people_names_every_way_and_the_choice() -> None:
    arguments = ["--model", "opt-6.7b", "--profile", "a100-pcie4", "--device-memory", "24GiB"]
    done = CliRunner().invoke(app, [*PLAN, *arguments])
    assert done.exit_code == 0, done.output
    for words in ("waves", "time slices", "streamed", "chosen", "of 64 fit at once"):
        assert words in done.output


def test_in_the_examples_waves_win_wherever_a_request_fits() -> None:
    """Section 7: streaming is for what cannot be resident at all."""
    found = list(examples(list(BUILT_IN_PROFILES.items())))
    assert len(found) == 7 * len(BUILT_IN_PROFILES)
    chosen = set()
    for _, each in found:
        best = each.comparison.best
        assert best is not None
        fits = each.room.resident_at_once(each.shape, each.load)
        wanted = "streamed" if not fits else "resident" if fits == 64 else "waves"
        assert best.way.value == wanted
        chosen.add(wanted)
    assert chosen == {"resident", "waves", "streamed"}
