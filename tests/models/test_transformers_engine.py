"""The engine's mechanisms with models that transformers' code computes: none changes a text.

`test_every_family.py` has restores, streamed steps and selections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from any_models import VOCABULARY, clear_prompt, small_model, write
from drafter_doubles import KnowingDrafter, sometimes_wrong
from engine_runner import CPU, admission, make_engine, run_all
from store_runner import store_runner, streamed

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.shapes import ArenaLayout, Encoding, WeightFormat
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.model.model import Model
from worker_service.startup.model_source import source_of

NEW_TOKENS = 16
CHUNK = 16
GREEDY = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, backend: ModelBackend) -> Model:
    source = source_of(folder, backend=backend)
    assert source.backend is backend
    return source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)


# Experts; values narrower than keys; blocks in parallel, whose X is no sum.
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "cohere2"])
def test_drafts_and_shared_prefixes(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    served = load(write(model, tmp_path), ModelBackend.TRANSFORMERS)
    shared, _ = clear_prompt(model, 40, 1)
    prompts, wanted = {}, {}
    for length in (3, 8, 13, 17):
        name = f"{length} more"
        prompts[name], wanted[name] = clear_prompt(model, length, NEW_TOKENS, before=shared)
    drafter = KnowingDrafter(wanted, sometimes_wrong(VOCABULARY, 1))
    engine = make_engine(served, drafters={DraftMethod.MODEL: drafter})
    speculation = Speculation(DraftMethod.MODEL, num_speculative_tokens=3)
    # The first leaves the prefix on the device, for all others.
    [first, *others] = [admission(name, prompt, GREEDY) for name, prompt in prompts.items()]
    assert run_all(engine, [first]).tokens == {"3 more": wanted.pop("3 more")}
    found = run_all(engine, [replace(each, speculation=speculation) for each in others])
    assert found.tokens == wanted
    assert sum(event.accepted for event in found.drafts) > 0
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0


def texts_by_store(
    served: Model, folder: Path, encoding: Encoding, prefix: Sequence[int], prompt: Sequence[int]
) -> list[list[int]]:
    """Return the answer to a prefix, and those to what follows it, restored from the store."""
    layout = ArenaLayout.of(
        served.shape, chunk_tokens=CHUNK, has_activations=True, encoding=encoding
    )
    restored: list[int] = []
    texts = []

    def count(output: StepOutput) -> None:
        restored.extend(each.loaded_tokens + each.rebuilt_tokens for each in output.restores)

    folder.mkdir()
    with store_runner(layout, folder, 200) as runner:
        runner.after_step = count
        for ask in (
            admission("prefix", prefix, GREEDY),
            replace(admission("resident", prompt, GREEDY), split_tokens=2 * CHUNK),
            streamed("streamed", prompt, GREEDY, split=2 * CHUNK),
        ):
            engine = make_engine(served, has_activations=True, encoding=encoding)
            texts.append(runner.run(engine, [ask]).tokens[ask.request_id])
    assert max(restored) == len(prefix) + NEW_TOKENS - 1
    return texts


@pytest.mark.parametrize(
    ("family", "encoding"), [("llama", Encoding.INT8), ("qwen3", Encoding.INT4)]
)
def test_a_quantised_store_gives_what_our_own_decoder_gets_from_it(
    family: str, encoding: Encoding, tmp_path: Path
) -> None:
    model = small_model(family)
    folder = write(model, tmp_path / "m")
    prefix, answered = clear_prompt(model, 70, NEW_TOKENS)
    prompt, _ = clear_prompt(model, 9, NEW_TOKENS, before=[*prefix, *answered])
    own, transformers = (
        texts_by_store(load(folder, each), tmp_path / each.value, encoding, prefix, prompt)
        for each in (ModelBackend.OWN, ModelBackend.TRANSFORMERS)
    )
    assert transformers == own
    assert own[0] == answered
