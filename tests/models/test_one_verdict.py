"""One verdict from every command on the checkpoints that are downloaded most.

checkpoints.json has of each the facts of its config.json, and which code computes it ("own",
"transformers") or what the refusal says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_names import instance_name

from splitpoint.errors import InvalidArgument
from splitpoint_cli.checks.finding import Verdict
from splitpoint_cli.checks.model import find_model
from splitpoint_cli.planning.options import PlanOptions, SizeOptions
from splitpoint_cli.planning.plan import plan
from splitpoint_cli.planning.size import size
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from splitpoint_offline.options import settings_of
from worker_service.startup.model_source import source_of

CHECKPOINTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "checkpoints.json").read_text()
)
# A request that fits every context; the card does not matter.
SHORT: dict[str, Any] = {"profile": "h100", "new": 16, "max_tokens": 16}


def command_of(decorated: Any) -> Any:
    """Return what a command calls with its options, without Typer around it."""
    return decorated.__wrapped__


def test_codes_are_planned_as_they_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt-oss names no element type: what is not MXFP4 has 16 bits. GPUs have no such kernels."""
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINTS["openai/gpt-oss-20b"]["config"]))
    sized = SizeOptions(model=str(tmp_path), **SHORT, tokens=64, device_memory="2TiB")
    command_of(size)(sized)
    command_of(plan)(PlanOptions(model=str(tmp_path), **SHORT, cached=16))
    printed = capsys.readouterr().out
    assert "bfloat16" in printed
    assert printed.count("MXFP4 in groups of 32 is for CPU workers") == 2
    with pytest.raises(InvalidArgument, match="MXFP4 in groups of 32 already"):
        command_of(size)(replace(sized, weights="int8"))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_command_says_the_same(name: str, tmp_path: Path) -> None:
    wanted = CHECKPOINTS[name]
    (tmp_path / "config.json").write_text(json.dumps(wanted["config"]))
    model = str(tmp_path)
    stack = StackOptions(model=model, device="cpu", instance=instance_name("verdict"))
    asks: list[Callable[[], Any]] = [
        lambda: plan_stack(stack),
        lambda: settings_of(model, {}),
        lambda: command_of(size)(
            SizeOptions(model=model, **SHORT, tokens=64, device_memory="2TiB")
        ),
        lambda: command_of(plan)(PlanOptions(model=model, **SHORT, cached=16)),
    ]
    doctor = find_model(model, "auto").finding
    if wanted["by"]:
        assert source_of(tmp_path).backend.value == wanted["by"]
        assert doctor.verdict is Verdict.OK
        for ask in asks:
            ask()
        return
    with pytest.raises(InvalidArgument) as caught:
        source_of(tmp_path)
    reason = caught.value.message
    assert wanted["reason"] in reason
    assert doctor.verdict is Verdict.PROBLEM
    assert reason in doctor.found
    for ask in asks:
        with pytest.raises(InvalidArgument) as caught:
            ask()
        assert caught.value.message == reason
