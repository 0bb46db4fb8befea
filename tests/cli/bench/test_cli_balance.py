"""`splitpoint bench restore --balance`: a link that is as fast as recomputing."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from splitpoint.errors import InvalidArgument
from splitpoint_cli.bench.restore_report import BOTH_ENDS, LOAD, TOKENS, RestoreWorkload
from splitpoint_cli.main import app


def test_a_balanced_link_is_measured_and_named() -> None:
    arguments = [
        "bench",
        "restore",
        "--shape",
        "smollm2-135m",
        "--layers",
        "2",
        "--balance",
        "--json",
    ]
    done = CliRunner().invoke(app, [*arguments, "--prompt", "130", "--threads", "1"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    load, tokens = report["contenders"][LOAD], report["contenders"][TOKENS]
    # An emulated link never takes less than its rate allows.
    assert load["link_busy_seconds"] > 0.99 * load["link_bytes"] / report["link_rate"]
    # With grouped queries no activations are stored.
    assert report["skipped"]
    assert tokens["link_bytes"] == 0 < load["link_bytes"]
    assert report["contenders"][BOTH_ENDS]["predicted_seconds"] > 0


def test_a_link_is_either_given_or_balanced() -> None:
    with pytest.raises(InvalidArgument) as caught:
        RestoreWorkload(
            "opt-125m", "float32", 200, 1, "cpu", 1, 5, 0, link_rate=10**8, balance=True
        )
    assert caught.value.field == "balance"
