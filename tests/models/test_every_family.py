"""Every causal language model of transformers is served as transformers computes it, or refused.

A few families always; all of them by `make models`, which writes docs/models.md.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from any_models import FAMILIES, WRAPPERS, NotMade, clear_prompt, small_model, usual_config, write
from drafter_doubles import self_drafting
from engine_runner import CPU, admission, make_engine, run_all
from selecting import select_always
from store_runner import restored, store_runner

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Residency
from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.selection import Selection
from splitpoint.shapes import ArenaLayout, WeightFormat
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.lanes.lanes import SerialLanes
from worker_service.startup.model_source import ModelSource, source_of

# Experts, latent attention, windows, learned positions, parallel blocks, partial rotation, joint
# projections, scaled residuals, sinks, chunks; and refusals: a state, no positions, heads that
# differ by layer, another attention.
ALWAYS = (
    *("qwen3_moe", "deepseek_v3", "cohere2", "gpt2", "gpt_neox", "phi3", "granite", "gpt_oss"),
    "llama4_text",
    *("mamba", "bloom", "mimo_v2_flash", "diffllama", "jamba"),
    # The text part of what reads images: angles of three kinds, another name for it, our own
    # decoder; refused: all tokens of a prompt see each other.
    *("qwen2_5_vl", "idefics3", "gemma3", "paligemma"),
)
NEW_TOKENS = 8
CHUNK = 16
GREEDY = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
# Through screens and rows, all of them.
EVERY_TOKEN = Selection.parsed("columns:0.999,full_layers=0")
# The same, where it only drafts.
DRAFTING = Selection.parsed("columns:0.999,verify")
# Where the rows of all families go, if anywhere.
ROWS = os.environ.get("SPLITPOINT_MODEL_ROWS")

pytestmark = pytest.mark.usefixtures("one_thread")


def note(family: str, backend: str, reason: str = "", *, selects: bool = False) -> None:
    """Add a row to the table of `make models`."""
    if ROWS is not None:
        row = {"family": family, "by": backend, "reason": reason, "selects": selects}
        row["is_wrapper"] = family in WRAPPERS
        with Path(ROWS).open("a") as rows:
            rows.write(json.dumps(row) + "\n")


def check_refused_in_usual_sizes(family: str, folder: Path, made: NotMade) -> None:
    """Try the default configuration of a family of which no small checkpoint is made."""
    try:
        usual_config(family).save_pretrained(folder)
        source_of(folder)
    except InvalidArgument as error:
        note(family, "", error.message.replace(str(folder), "its folder"))
    except NotMade:
        note(family, "", f"not tried: {made}")
        pytest.skip(f"no small checkpoint: {made}")
    else:
        pytest.fail(f"{family} is not refused, and no small checkpoint tries it: {made}")


def as_advised(folder: Path) -> ModelSource:
    """Return what computes a checkpoint, with the context that a refusal advises, if one does."""
    try:
        return source_of(folder)
    except InvalidArgument as error:
        advice = re.search(r"--max-model-len (\d+)", error.message)
        if advice is None:
            raise
        return source_of(folder, max_model_len=int(advice[1]))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in ALWAYS else pytest.mark.chaos)
        for each in (*FAMILIES, *WRAPPERS)
    ],
)
def test_a_family_is_served_or_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select_always(monkeypatch)
    try:
        model = small_model(family)
    except NotMade as error:
        check_refused_in_usual_sizes(family, tmp_path, error)
        return
    folder = write(model, tmp_path / "m")
    try:
        source = as_advised(folder)
        served = source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
    except InvalidArgument as error:
        note(family, "", error.message.replace(str(folder), "its folder"))
        return
    prefix, answered = clear_prompt(model, 70, NEW_TOKENS)
    other, wanted_of_other = clear_prompt(model, 33, NEW_TOKENS)
    prompt, wanted = clear_prompt(model, 9, NEW_TOKENS, before=[*prefix, *answered])
    layout = ArenaLayout.of(served.shape, chunk_tokens=CHUNK, has_activations=True)
    cached = len(prefix) + NEW_TOKENS - 1
    with store_runner(layout, tmp_path, 200) as runner:
        cold = [admission("prefix", prefix, GREEDY), admission("other", other, GREEDY)]
        found = runner.run(make_engine(served, has_activations=True), cold).tokens
        assert found == {"prefix": answered, "other": wanted_of_other}
        restored_tokens: list[int] = []

        def count(output: StepOutput) -> None:
            restored_tokens.extend(
                each.loaded_tokens + each.rebuilt_tokens for each in output.restores
            )

        runner.after_step = count
        ask = admission("prompt", prompt, GREEDY)
        for split, residency, answer in restored(runner, served, ask, cached):
            assert answer == wanted, (split, residency)
        rows: list[int] = []

        def count_rows(output: StepOutput) -> None:
            rows.extend(each.usage.fetched_row_count for each in output.selections)

        runner.after_step = count_rows
        asks = admission("prompt", prompt, GREEDY)
        asks = replace(asks, residency=Residency.STREAMED, selection=EVERY_TOKEN)
        done = runner.run(make_engine(served, has_activations=True), [asks]).tokens
        assert done["prompt"] == wanted, "by selection"
        # Layers with windows read what they see.
        has_full_layer = any(layer.window is None for layer in served.layers[1:])
        assert not has_full_layer or sum(rows) > 0
        rows.clear()
        drafts = Speculation(DraftMethod.SELF, num_speculative_tokens=4)
        asks = replace(asks, selection=DRAFTING, speculation=drafts)
        drafted = runner.run(self_drafting(served, CHUNK, 1, SerialLanes(CPU)), [asks])
        assert drafted.tokens["prompt"] == wanted, "by verified selection"
        if has_full_layer:
            assert sum(rows) > 0
            assert sum(each.accepted for each in drafted.drafts) > 0
        # A resident request has all of the prefix on its device.
        assert sum(tokens >= cached for tokens in restored_tokens) == 3
    note(family, source.backend.value, selects=sum(rows) > 0)


@pytest.mark.parametrize(
    "family", ["mamba", "bloom", "mimo_v2_flash", "diffllama", "jamba", "unlimited_ocr"]
)
def test_a_refusal_names_the_family_and_the_reason(family: str, tmp_path: Path) -> None:
    folder = write(small_model(family), tmp_path)
    with pytest.raises(InvalidArgument) as caught:
        source_of(folder).load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
    assert caught.value.reason == "UNSUPPORTED_MODEL"
    assert f"model_type '{family}'" in caught.value.message


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_code_computes_what_our_decoder_does(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    folder = write(model, tmp_path)
    prompt, wanted = clear_prompt(model, 40, NEW_TOKENS)
    for backend in (ModelBackend.OWN, ModelBackend.TRANSFORMERS):
        source = source_of(folder, backend=backend)
        assert source.backend is backend
        served = source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
        done = run_all(make_engine(served), [admission("a", prompt, GREEDY)])
        assert done.tokens["a"] == wanted
