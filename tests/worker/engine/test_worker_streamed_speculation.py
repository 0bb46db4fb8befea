"""Test drafts of sequences whose cache is in the store, and what the store holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_doubles import Change, KnowingDrafter, sometimes_wrong, wrong
from engine_runner import CPU, Transcript, admission, make_engine
from long_runs import scaled
from store_runner import StoreRunner, store_runner, streamed
from tiny_models import FAMILY_CASES, VOCABULARY, write_tiny

from splitpoint.keys import chunk_key
from splitpoint.shapes import ArenaLayout
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.model.decoder import Decoder

CHUNK = 16
NEW = scaled(40, chaos=64)
LENGTHS = (5, 17, 31, 32, 45, 60, 79, 100)

pytestmark = [pytest.mark.scaled, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(write_tiny("llama-3", tmp_path_factory.mktemp("llama")), CPU, torch.float32)


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def requests(k: int, *, residents: int = 2) -> list[Admission]:
    """Return 8 requests, the first ones resident, greedy and sampled in turn."""
    made = []
    for index, length in enumerate(LENGTHS):
        sampling = Sampling(
            max_tokens=NEW, ignore_eos=True, temperature=0.8 * (index % 2), seed=index
        )
        name, prompt = str(index), prompt_of(length)
        made.append(
            admission(name, prompt, sampling)
            if index < residents
            else streamed(name, prompt, sampling, split=CHUNK * (index % 3))
        )
    speculation = Speculation(DraftMethod.MODEL, num_speculative_tokens=k)
    return [replace(each, speculation=speculation) if k else each for each in made]


def engine_of(model: Decoder, lanes: Lanes, double: KnowingDrafter | None = None) -> Engine:
    engine = make_engine(
        model,
        has_activations=True,
        lanes=lanes,
        staging_pages=24,
        cache_pages=100,
        drafters={} if double is None else {DraftMethod.MODEL: double},
    )
    engine.tile_pages = 3
    return engine


@contextmanager
def store_of(model: Decoder, folder: Path) -> Iterator[StoreRunner]:
    folder.mkdir()
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, folder, 400) as runner:
        yield runner


def run(
    model: Decoder,
    folder: Path,
    admissions: Sequence[Admission],
    lanes: Lanes,
    double: KnowingDrafter | None = None,
) -> tuple[Transcript, dict[bytes, list[torch.Tensor]]]:
    """Run requests on a store of their own; return the transcript and the chunks it holds."""
    with store_of(model, folder) as runner:
        transcript = runner.run(engine_of(model, lanes, double), admissions)
        return transcript, sealed(runner, transcript, admissions)


def sealed(
    runner: StoreRunner, transcript: Transcript, admissions: Sequence[Admission]
) -> dict[bytes, list[torch.Tensor]]:
    """Return all planes of every chunk that the store holds, by key.

    Each holds tokens of one of the texts, and no more than a prefix of it.
    """
    layout, tensors = runner.layout, runner.connection.tensors
    known = set()
    for each in admissions:
        # The newest token of a text is never computed.
        tokens = [*each.prompt, *transcript.tokens[each.request_id]][:-1]
        parent = b""
        for first in range(0, len(tokens), CHUNK):
            chunk = tuple(tokens[first : first + CHUNK])
            parent = chunk_key(layout.layout_hash, each.salt, parent, chunk)
            known.add(parent)
    found = {}
    for entry in runner.store.pool.index:
        assert entry.key in known
        found[entry.key] = [
            tensors.plane(layer, name)[entry.slot].clone()
            for layer in range(layout.layer_count)
            for name in ("K", "V", "X")
        ]
    return found


def same(
    found: tuple[Transcript, dict[bytes, list[torch.Tensor]]],
    plain: tuple[Transcript, dict[bytes, list[torch.Tensor]]],
) -> None:
    assert found[0].tokens == plain[0].tokens
    assert found[1].keys() == plain[1].keys()
    for key, planes in plain[1].items():
        for mine, theirs in zip(found[1][key], planes, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.fixture
def lanes() -> Iterator[ThreadLanes]:
    opened = ThreadLanes(CPU)
    yield opened
    opened.close()


# What one family shows of each number of drafts, the others need not: plain heads and learned
# positions, windows below full layers. Rows that verify drafts are tried in all of them by
# tests/worker/engine/test_worker_speculation.py.
@pytest.mark.parametrize(
    ("case", "counts"),
    [
        ("llama-3", (1, 3, 8)),
        ("opt", (8,)),
        ("gemma3", (8,)),
        *(
            pytest.param(case, (1, 3, 8), marks=pytest.mark.chaos)
            for case in FAMILY_CASES
            if case != "llama-3"
        ),
    ],
)
def test_texts_and_chunks_are_those_of_plain_decoding(
    case: str, counts: Sequence[int], tmp_path: Path, lanes: ThreadLanes
) -> None:
    """Stream 6 of 8 requests, from a store that is cold at first."""
    model = Decoder.load(write_tiny(case, tmp_path / "model"), CPU, torch.float32)
    plain = run(model, tmp_path / "plain", requests(0), SerialLanes(CPU))
    assert len(plain[1]) > 30
    changes: dict[int, Change] = {
        1: list,
        3: wrong(VOCABULARY),
        8: sometimes_wrong(VOCABULARY, 1),
    }
    for k in counts:
        double = KnowingDrafter(plain[0].tokens, changes[k])
        found = run(model, tmp_path / str(k), requests(k), lanes, double)
        same(found, plain)
        accepted = sum(event.accepted for event in found[0].drafts)
        assert (accepted == 0) == (k == 3)
        assert len(found[0].drafts) > 50


def test_a_stored_page_is_read_once_for_all_rows_of_its_sequence(
    llama: Decoder, tmp_path: Path
) -> None:
    few = Sampling(max_tokens=NEW, ignore_eos=True)
    request = streamed("0", prompt_of(100), few)
    plain = run(llama, tmp_path / "plain", [request], SerialLanes(CPU))[0]
    speculation = Speculation(DraftMethod.MODEL, num_speculative_tokens=8)
    with store_of(llama, tmp_path / "drafts") as runner:
        engine = engine_of(llama, SerialLanes(CPU), KnowingDrafter(plain.tokens))
        loaded: list[tuple[int, int]] = []

        def note(output: StepOutput) -> None:
            for sequence in engine.queues.running:
                if output.drafts and engine.last_step is not None:
                    loaded.append((engine.last_step.loaded_tokens, len(sequence.stored)))

        runner.after_step = note
        found = runner.run(engine, [replace(request, speculation=speculation)])
    assert found.tokens == plain.tokens
    assert found.steps < 0.3 * plain.steps
    layers = llama.shape.layer_count
    assert loaded
    for tokens, chunks in loaded:
        assert tokens in (layers * CHUNK * chunks, layers * CHUNK * (chunks - 1))


def test_a_step_that_lost_chunks_counts_no_draft(llama: Decoder, tmp_path: Path) -> None:
    """Withdraw chunks while steps read them: sequences start over, with their tokens."""
    plain = run(llama, tmp_path / "plain", requests(0), SerialLanes(CPU))[0]
    with store_of(llama, tmp_path / "lost") as runner:
        double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 2))
        engine = engine_of(llama, SerialLanes(CPU), double)
        losses = lost_at = steps = 0

        def lose(output: StepOutput) -> None:
            nonlocal losses, steps, lost_at
            steps += 1
            losses += output.loss_count
            assert not any(each.drafts for each in engine.queues.running)
            readers = [each for each in engine.queues.running if each.read_chunks]
            if readers and steps - lost_at > 6 and losses < 3:
                lost_at = steps
                runner.lose(readers[0].read_chunks[-1])

        runner.after_step = lose
        found = runner.run(engine, requests(4))
    assert losses >= 3
    assert found.tokens == plain.tokens
    assert all(finish.error is None for finish in found.finishes.values())


def test_sequences_that_leave_the_device_are_restored_with_the_same_text(
    llama: Decoder, tmp_path: Path
) -> None:
    plain = run(llama, tmp_path / "plain", requests(0, residents=8), SerialLanes(CPU))[0]
    with store_of(llama, tmp_path / "few") as runner:
        double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 3))
        engine = make_engine(
            llama,
            has_activations=True,
            cache_pages=26,
            lanes=SerialLanes(CPU),
            drafters={DraftMethod.MODEL: double},
        )
        preemptions = 0

        def note(output: StepOutput) -> None:
            nonlocal preemptions
            preemptions += output.preemption_count

        runner.after_step = note
        found = runner.run(engine, requests(4, residents=8))
    assert preemptions > 0
    assert found.tokens == plain.tokens
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
