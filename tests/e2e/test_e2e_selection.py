"""Selections over real processes: what answers say, and what is refused. About a minute."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import SECONDS
from kept_fleet import KeptFleet, kept_fleet
from selecting import maple_artifacts
from small_model import WIDE, small_model

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.client import Client
from splitpoint.client.answers import Completion, Tokens
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.planning.plan import ReasonKind, Residency
from splitpoint.selection import SelectionMethod
from splitpoint.speculation import DraftMethod
from splitpoint_cli.request.observed import Status
from worker_service.selection.artifacts import Artifacts, encoded

TOKENS = 16
PROMPT = "".join(
    f"def method_{index}(self, transport, data_{index}):\n"
    f"    self._buffer_{index}.extend(data_{index})\n"
    f"    return transport.write(self._buffer_{index})\n\n"
    for index in range(30)
)


def write_artefacts(folder: Path, model: Path) -> None:
    """Write random maps, as `splitpoint calibrate --columns 8` does, of `lowrank` and `maple`."""
    shape = shape_from_config(read_config(model), name="any")
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"layers.{index}.{name}": torch.randn(
            (shape.kv_head_count, shape.head_dim, 8), generator=generator
        )
        for index in range(shape.layer_count)
        for name in ("query_map", "key_map")
    }
    for made in (Artifacts(SelectionMethod.LOWRANK, tensors, {}), maple_artifacts(shape, 8)):
        (folder / f"{made.method}.safetensors").write_bytes(encoded(made, model))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptFleet]:
    """Workers behind links that are slow enough for selections to gain."""
    artifacts = tmp_path_factory.mktemp("artifacts")
    # Its heads are as wide as those of large models, and its first two layers read everything.
    model = small_model(**WIDE, num_hidden_layers=4)
    write_artefacts(artifacts, model)
    with kept_fleet(
        *("--link-rate", "20MB", "--device-memory", "256MiB", "--artifacts", str(artifacts)),
        *("--speculative-config", '{"method": "auto"}'),
        model=model,
        store_options=("--host-memory", "128MiB", "--activations", "always"),
    ) as running:
        yield running


def ask(stack: KeptFleet, residency: Residency = Residency.STREAMED, **more: Any) -> Completion:
    with Client(stack.address) as client:
        options = {"max_tokens": TOKENS, "ignore_eos": True, "residency": residency, **more}
        return client.generate(PROMPT, **options).complete()


@pytest.fixture(scope="module")
def exact(stack: KeptFleet) -> Completion:
    return ask(stack, speculate=DraftMethod.OFF)


def test_an_approximate_answer_says_what_it_read(stack: KeptFleet, exact: Completion) -> None:
    done = ask(stack, select="columns:0.1")
    usage = done.usage.selection
    assert usage.is_approximate, (usage, done.plan)
    # The step that gives the first token builds the screens.
    assert usage.step_count == TOKENS - 1
    assert 0.1 <= usage.read_ratio < 0.5
    assert usage.skipped_token_count > 0
    assert usage.fetched_row_count > 0
    assert usage.reused_row_count > 0
    assert usage.link_bytes % usage.fetched_row_count == 0
    assert done.plan is not None
    assert ReasonKind.SELECTED in dict(done.plan.reasons)
    assert not exact.usage.selection.step_count
    assert done.token_ids[0] == exact.token_ids[0], "that step read everything"


def test_a_bounded_pool_says_what_it_took_and_left(stack: KeptFleet, exact: Completion) -> None:
    usage = ask(stack, select="columns:0.1,full_layers=0,pool=0.5,policy=lru").usage.selection
    assert (usage.is_approximate, usage.off_reason) == (True, "")
    assert usage.step_count == TOKENS - 1
    assert usage.evicted_token_count > 0
    assert usage.pool_bytes > 0
    assert ask(stack, speculate=DraftMethod.OFF).token_ids == exact.token_ids
    with pytest.raises(InvalidArgument, match="full_layers=0"):
        ask(stack, select="columns:0.1,pool=0.5")


def test_artefacts_are_those_of_the_folder(stack: KeptFleet) -> None:
    usage = ask(stack, select="lowrank:0.2,columns=8", max_tokens=6).usage.selection
    assert (usage.is_approximate, usage.step_count) == (True, 5)
    with pytest.raises(InvalidArgument, match="trained for 8") as refused:
        ask(stack, select="maple:0.2,columns=6")
    assert refused.value.field == "selection.columns"


def test_keys_made_of_layer_inputs_are_served(stack: KeptFleet, exact: Completion) -> None:
    """Of a prompt that is restored; as a draft they change no token."""
    done = ask(stack, select="maple:0.2")
    usage = done.usage.selection
    assert (usage.is_approximate, usage.step_count) == (True, TOKENS - 1), done.plan
    assert 0.2 <= usage.read_ratio < 0.5
    assert done.token_ids[0] == exact.token_ids[0], "that step read everything"
    lossless = ask(stack, select="maple:0.2,verify", speculative_tokens=4)
    assert lossless.token_ids == exact.token_ids
    assert lossless.usage.selection.fetched_row_count > 0


def test_generate_tells_people(stack: KeptFleet) -> None:
    command = [sys.executable, "-m", "splitpoint_cli", "generate", "--address", stack.address]
    options = ["--max-tokens", "8", "--ignore-eos", "--residency", "streamed"]
    done = subprocess.run(
        [*command, *options, "--select", "window:0.2"],
        input=PROMPT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stderr.startswith("approximate: 7 steps read "), done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("select", "residency", "why"),
    [
        ("columns:1", Residency.STREAMED, "reads every token"),
        ("columns:alpha=inf,cap=1", Residency.STREAMED, "reads every token"),
        ("columns:0.1", Residency.RESIDENT, "on the device"),
        ("columns:0.999", Residency.STREAMED, "rows and screens"),
    ],
)
def test_an_exact_answer_says_why(
    stack: KeptFleet, exact: Completion, select: str, residency: Residency, why: str
) -> None:
    done = ask(stack, residency, select=select)
    usage = done.usage.selection
    assert why in usage.off_reason
    assert (usage.is_approximate, usage.step_count, usage.link_bytes) == (False, 0, 0)
    assert done.token_ids == exact.token_ids
    assert done.plan is not None
    assert ReasonKind.NOT_SELECTED in dict(done.plan.reasons)


def test_a_verified_selection_changes_no_token(stack: KeptFleet, exact: Completion) -> None:
    done = ask(stack, select="columns:0.1,verify", speculative_tokens=4)
    assert done.token_ids == exact.token_ids
    assert done.usage.speculation.method is DraftMethod.SELF
    assert done.usage.speculation.draft_token_count
    usage = done.usage.selection
    assert not usage.is_approximate
    assert 0 < usage.step_count <= done.usage.speculation.draft_token_count
    assert 0.1 <= usage.read_ratio < 0.5
    assert usage.fetched_row_count > 0
    assert done.plan is not None
    assert dict(done.plan.reasons)[ReasonKind.SELECTED][2:4] == (usage.step_count, "drafted tokens")


def test_what_cannot_be_is_refused_by_name(stack: KeptFleet) -> None:
    for select, speculate, field in (
        ("h2o:0.1", None, "selection.method"),
        ("columns:2", None, "selection.ratio"),
        ("columns", None, "selection.ratio"),
        ("columns:0.1", DraftMethod.SUFFIX, "speculation.method"),
        ("columns:0.1,verify", DraftMethod.OFF, "speculation.method"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            ask(stack, select=select, speculate=speculate)
        assert refused.value.field == field
    with pytest.raises(FailedPrecondition) as missing:
        ask(stack, select="infinigen:0.1")
    assert missing.value.reason == "NO_ARTIFACTS"
    assert "splitpoint calibrate" in missing.value.message


def test_status_lists_what_the_worker_selects_by(stack: KeptFleet) -> None:
    for worker in stack.until(lambda found: found.ready_count == 2).workers:
        assert set(worker.selection_methods) == {
            *("columns", "window", "lowrank", "maple"),
        }


def busy_worker(stack: KeptFleet) -> str:
    """Return the worker that runs a request."""

    def busy(found: Status) -> list[str]:
        return [each.id for each in found.workers if each.running_count]

    return busy(stack.until(lambda found: bool(busy(found))))[0]


def test_an_answer_goes_on_approximately_after_its_worker_was_killed(
    stack: KeptFleet, exact: Completion
) -> None:
    """The last test: the worker is started anew. The other one goes on."""
    done, count = None, 0
    with Client(stack.address) as client:
        generation = client.generate(
            PROMPT,
            max_tokens=TOKENS,
            ignore_eos=True,
            residency=Residency.STREAMED,
            select="columns:0.1",
        )
        for event in generation:
            if isinstance(event, Tokens):
                was_few, count = count < 4, count + len(event.token_ids)
                if was_few and count >= 4:
                    stack.kill_worker(busy_worker(stack))
            elif isinstance(event, Completion):
                done = event
    assert done is not None
    assert count == len(done.token_ids) == TOKENS
    usage = done.usage.selection
    # Two steps read everything and built screens: each worker's first one.
    assert (usage.is_approximate, usage.step_count) == (True, TOKENS - 2)
    assert done.token_ids[0] == exact.token_ids[0]
