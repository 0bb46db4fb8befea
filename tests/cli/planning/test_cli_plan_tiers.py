"""`splitpoint plan` with a tier: does loading from it pay? Quick: about a second."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from splitpoint.costs.fetching import ROUND_TRIP_SECONDS
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.main import app

MODEL = "llama-3-8b"
PLAN = ["plan", "--model", MODEL, "--profile", "h100", "--cached", "1000", "--new", "3000"]
CHUNK = 64


def planned(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*PLAN, "--chunk-tokens", str(CHUNK), *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MODEL, ()),
        ("llama-2-7b", ("--model", "llama-2-7b", "--max-tokens", "32")),
        ("llama-2-7b", ("--model", "llama-2-7b", "--max-tokens", "32", "--no-activations")),
    ],
)
def test_a_fast_tier_is_loaded_from(model: str, options: tuple[str, ...]) -> None:
    """With X where a store keeps it: not of a model with grouped queries."""
    report = planned("--tier-tokens", "3800", "--tier-rate", "64GB/s", *options)
    # Full chunks, after the full ones of the arena.
    chunks = 3800 // CHUNK - 1000 // CHUNK
    shape, token_bytes = BUILT_IN_SHAPES[model], BUILT_IN_SHAPES[model].kv_bytes_per_token
    if model != MODEL and "--no-activations" not in options:
        token_bytes += shape.activation_bytes_per_token
    seconds = ROUND_TRIP_SECONDS + chunks * CHUNK * token_bytes / 64e9
    assert (report["fetched_tokens"], report["fetch_source"]) == (chunks * CHUNK, "disk")
    assert report["cached_tokens"] == 3800 // CHUNK * CHUNK
    assert report["predicted_fetch_seconds"] == pytest.approx(seconds)
    assert report["predicted_ttft_seconds"] < planned(*options)["predicted_ttft_seconds"]
    shown = CliRunner().invoke(
        app, [*PLAN, "--chunk-tokens", str(CHUNK), "--tier-tokens", "3800", "--tier-rate", "64GB/s"]
    )
    assert f"loaded from a tier first  {chunks * CHUNK:,} tokens, " in shown.output


def test_a_slow_tier_is_not_and_why() -> None:
    alone, report = planned(), planned("--tier-tokens", "3800")
    assert report["fetched_tokens"] == 0
    assert report["predicted_ttft_seconds"] == alone["predicted_ttft_seconds"]
    assert report["reason"] == alone["reason"]
    *details, why = report["reason_details"]
    assert details == alone["reason_details"]
    assert why.startswith("not loaded: loading 2,816 tokens from the disk tier at 1 GB/s")
    # What the arena has already is no more.
    assert planned("--tier-tokens", "1000")["reason_details"] == alone["reason_details"]


def test_a_tier_holds_no_more_than_the_prompt() -> None:
    done = CliRunner().invoke(app, [*PLAN, "--tier-tokens", "4001"])
    assert isinstance(done.exception, InvalidArgument)
    assert "4,000 prompt tokens" in done.exception.message
