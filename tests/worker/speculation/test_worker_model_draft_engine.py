"""An engine with a draft model answers as without it: rejections, cancellation, preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, Transcript, admission, make_engine, run_all
from long_runs import scaled
from store_runner import store_runner
from test_worker_model_draft import make_drafter
from tiny_models import VOCABULARY, write_tiny

from splitpoint.planning.plan import Residency
from splitpoint.shapes import ArenaLayout
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Cancel
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.model.decoder import Decoder
from worker_service.speculation.model_draft import ModelDrafter

LENGTHS = (1, 15, 16, 17, 40, 64, 65, 100)
NEW = scaled(32, chaos=64)

pytestmark = [pytest.mark.scaled, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(
        write_tiny("llama-3", tmp_path_factory.mktemp("served")), CPU, torch.float32
    )


@pytest.fixture(scope="module")
def companion(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model of another family with the same vocabulary, which is hardly ever right."""
    return Decoder.load(write_tiny("opt", tmp_path_factory.mktemp("draft")), CPU, torch.float32)


def requests(count: int, **changes: object) -> list[Admission]:
    """Return requests, every other one sampled, with prompts around page borders."""
    found = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        generator = torch.Generator().manual_seed(100 * index + length)
        prompt = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        temperature = 0.8 if index % 2 else 0.0
        sampling = Sampling(max_tokens=NEW, ignore_eos=True, temperature=temperature, seed=index)
        changed = replace(sampling, **changes)  # type: ignore[arg-type]
        found.append(admission(str(index), prompt, changed))
    return found


def speculating(admissions: Sequence[Admission], k: int) -> list[Admission]:
    speculation = Speculation(DraftMethod.MODEL, num_speculative_tokens=k)
    return [replace(each, speculation=speculation) for each in admissions]


def engine_with(served: Decoder, drafter: ModelDrafter, cache_pages: int | None = None) -> Engine:
    return make_engine(served, cache_pages=cache_pages, drafters={DraftMethod.MODEL: drafter})


def is_clean(engine: Engine, drafter: ModelDrafter) -> None:
    """Check that no page is lost. Sequences that ended are forgotten before the next draft."""
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
    run_all(engine, speculating(requests(1, max_tokens=8), 3))
    assert drafter.cache.pages.used_count <= 1
    drafter.cache.pages.check_integrity()


@pytest.fixture(scope="module")
def plain(served: Decoder) -> Transcript:
    """What eight requests answer without drafts."""
    return run_all(make_engine(served), requests(8))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_texts_are_those_of_plain_decoding(
    served: Decoder, companion: Decoder, plain: Transcript, k: int
) -> None:
    """With a draft model that is nearly always wrong, and with one that is always right."""
    for model in (companion, served):
        drafter = make_drafter(model, pages=200)
        engine = engine_with(served, drafter)
        found = run_all(engine, speculating(requests(8), k))
        assert found.tokens == plain.tokens
        drafted = sum(event.drafted for event in found.drafts)
        accepted = sum(event.accepted for event in found.drafts)
        assert drafted > 8 * NEW / 3
        if model is served:
            # Greedy and drawn drafts alike.
            assert accepted == drafted
            assert found.steps < plain.steps
        else:
            assert accepted < 0.2 * drafted
        is_clean(engine, drafter)


def test_more_requests_than_either_cache_holds(served: Decoder, companion: Decoder) -> None:
    """16 requests leave the device for each other, and the drafter has pages for three."""
    plain = run_all(make_engine(served), requests(16))
    for model in (companion, served):
        drafter = make_drafter(model, pages=3 * 11)
        engine = engine_with(served, drafter, cache_pages=30)
        found = run_all(engine, speculating(requests(16), 3))
        assert found.tokens == plain.tokens
        assert found.drafts
        is_clean(engine, drafter)


def test_streamed_requests_answer_the_same(
    served: Decoder, companion: Decoder, tmp_path: Path
) -> None:
    """Where the cache of a sequence is does not matter to a draft model."""
    plain = run_all(make_engine(served), requests(6))
    layout = ArenaLayout.of(served.shape, chunk_tokens=16, has_activations=False)
    for model in (companion, served):
        drafter = make_drafter(model, pages=200)
        engine = engine_with(served, drafter, cache_pages=60)
        each = [
            replace(request, residency=Residency.STREAMED)
            for request in speculating(requests(6), 3)
        ]
        folder = tmp_path / str(model.config.shape.family)
        folder.mkdir()
        with store_runner(layout, folder, 400) as runner:
            found = runner.run(engine, each)
        assert found.tokens == plain.tokens
        accepted = sum(event.accepted for event in found.drafts)
        assert accepted > 3 * NEW or model is companion
        assert found.drafts


def test_cancelled_requests_leave_the_others_as_they_are(served: Decoder) -> None:
    # Long enough for those that are cancelled to be under way.
    asked = requests(8, max_tokens=64)
    plain = run_all(make_engine(served), asked)
    drafter = make_drafter(served, pages=200)
    engine = engine_with(served, drafter)
    found = Transcript()
    for each in speculating(asked, 3):
        engine.admit(each)
    for step in range(2000):
        found.add(engine.step())
        if step in (4, 9, 13):
            engine.post(Cancel((str(step // 2), 0, 0)))
        if step > 20 and engine.is_idle:
            break
    cancelled = {str(step // 2) for step in (4, 9, 13)}
    for name, tokens in plain.tokens.items():
        if name in cancelled:
            assert found.tokens.get(name, []) == tokens[: len(found.tokens.get(name, []))]
            assert len(found.tokens.get(name, [])) < len(tokens)
        else:
            assert found.tokens[name] == tokens
    is_clean(engine, drafter)


def test_the_answer_ends_within_an_accepted_draft_at_the_same_token(
    served: Decoder, plain: Transcript
) -> None:
    free = plain.tokens
    for place in (9, 12):
        ended = [
            replace(each, sampling=replace(each.sampling, stop_token_ids=(free[name][place],)))
            for each in requests(8)
            for name in [each.request_id]
        ]
        wanted = run_all(make_engine(served), ended)
        engine = engine_with(served, make_drafter(served, pages=200))
        assert run_all(engine, speculating(ended, 8)).tokens == wanted.tokens
