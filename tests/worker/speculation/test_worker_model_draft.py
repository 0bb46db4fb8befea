"""A draft model guesses what it would generate itself, whatever was accepted before.

Takes about 10 seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, admission
from tiny_models import CONTEXT, VOCABULARY, build_tiny, write_tiny

from splitpoint.host.processor import compiler
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import ArenaLayout
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan
from worker_service.engine.sampling import Sampling, SamplingRow, choose
from worker_service.engine.sequence import Sequence
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.lanes.timeline import Span
from worker_service.model.decoder import Decoder
from worker_service.speculation.model_draft import ModelDrafter

CHUNK = 16
GREEDY = Sampling(max_tokens=100, ignore_eos=True)


def make_drafter(
    model: Decoder,
    *,
    pages: int = 60,
    most_tokens: int = 512,
    least_chance: float = 0.0,
    eos_token_ids: tuple[int, ...] = (),
    lanes: Lanes | None = None,
) -> ModelDrafter:
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=False)
    plan = MemoryPlan(
        budget_bytes=0,
        weight_bytes=0,
        workspace_bytes=0,
        page_bytes=model.shape.page_bytes(CHUNK),
        page_count=pages,
        input_page_count=0,
    )
    return ModelDrafter(
        model,
        DeviceCache(layout, plan, CPU),
        max_batched_tokens=most_tokens,
        eos_token_ids=eos_token_ids,
        least_chance=least_chance,
        lanes=lanes,
    )


def sequence_of(name: str, length: int, sampling: Sampling = GREEDY) -> Sequence:
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return Sequence(admission(name, prompt, sampling))


def load(case: str, folder: Path) -> Decoder:
    return Decoder.load(write_tiny(case, folder), CPU, torch.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load("llama-3", tmp_path_factory.mktemp("draft"))


class NotingLanes(SerialLanes):
    """Keep the spans that are counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.spans: list[Span] = []

    def count_spans(self, spans: list[Span]) -> list[Span]:
        self.spans += spans
        return super().count_spans(spans)


class Oracle:
    """Continues tokens with transformers' model, greedily or by a request's seed."""

    def __init__(self, case: str) -> None:
        self._model = build_tiny(case)

    @torch.inference_mode()
    def __call__(
        self, tokens: Rows[int], count: int, sampling: Sampling = GREEDY, prompt: int = 0
    ) -> list[int]:
        known = list(tokens)
        for _ in range(count):
            logits = self._model(torch.tensor([known])).logits[:, -1].float()
            [choice] = choose(logits, [SamplingRow(sampling, known, prompt)])
            known.append(choice.token_id)  # type: ignore[union-attr]
        return known[len(tokens) :]


@pytest.fixture(params=[Decode.PRODUCTS, Decode.FUSED])
def kernels(request: pytest.FixtureRequest) -> None:
    if request.param is Decode.FUSED and compiler() is None:
        pytest.skip("no C++ compiler")
    use(Choice(request.param, Prefill.SDPA, Layout.PACKED))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["llama-3", "opt", "mistral", "gemma2", "qwen3"])
def test_it_drafts_what_the_model_generates_for_all_sequences_together(
    case: str, tmp_path: Path
) -> None:
    """Prompts below, at and above a page; rounds that accept any part, then another token."""
    oracle, rng = Oracle(case), random.Random(5)
    drafter = make_drafter(load(case, tmp_path))
    sequences = [sequence_of(str(n), n) for n in (1, 15, 16, 40)]
    for _ in range(6):
        counts = [rng.choice([0, 1, 3, 8]) for _ in sequences]
        drafts = drafter.propose(list(zip(sequences, counts, strict=True)))
        for sequence, count, draft in zip(sequences, counts, drafts, strict=True):
            assert draft == oracle(sequence.tokens, count)
            sequence.tokens += draft[: rng.randrange(len(draft) + 1)]
            sequence.tokens.append(rng.randrange(VOCABULARY))


def test_sampled_drafts_are_the_draws_of_the_requests_own_seed(model: Decoder) -> None:
    oracle, drafter = Oracle("llama-3"), make_drafter(model)
    samplings = [
        Sampling(temperature=0.8, seed=7, max_tokens=50, ignore_eos=True),
        Sampling(temperature=1.2, top_k=20, top_p=0.9, seed=3, ignore_eos=True, logprobs=2),
        Sampling(repetition_penalty=1.5, frequency_penalty=0.5, ignore_eos=True),
    ]
    sequences = [sequence_of(str(n), 20 + n, each) for n, each in enumerate(samplings)]
    drafts = drafter.propose([(sequence, 5) for sequence in sequences])
    for sequence, sampling, draft in zip(sequences, samplings, drafts, strict=True):
        assert draft == oracle(sequence.tokens, 5, sampling, len(sequence.tokens))


def test_no_draft_follows_a_token_that_ends_the_text(model: Decoder) -> None:
    """End by a stop token of the request and by the model's own, unless these are ignored."""
    oracle, prompt = Oracle("llama-3"), sequence_of("prompt", 20).tokens
    whole = oracle(prompt, 8)
    last = 3
    assert whole[last] not in whole[:last]
    samplings = {
        "stop": Sampling(max_tokens=100, ignore_eos=True, stop_token_ids=(1, whole[last])),
        "eos": Sampling(max_tokens=100),
        "ignored": Sampling(max_tokens=100, ignore_eos=True),
        "not yet": Sampling(max_tokens=100, min_tokens=last + 1),
    }
    drafter = make_drafter(model, eos_token_ids=(whole[last],))
    targets = {name: sequence_of(name, 20, each) for name, each in samplings.items()}
    drafts = drafter.propose([(each, 8) for each in targets.values()])
    found = dict(zip(targets, drafts, strict=True))
    assert found["stop"] == found["eos"] == whole[: last + 1]
    assert found["ignored"] == whole
    assert found["not yet"][:last] == whole[:last]
    assert found["not yet"][last] != whole[last]


def test_the_span_of_a_call_counts_drafted_tokens(model: Decoder) -> None:
    """A call that only computes a long prompt takes time and drafts nothing."""
    lanes = NotingLanes(CPU)
    drafter = make_drafter(model, most_tokens=32, lanes=lanes)
    long, short = sequence_of("long", 50), sequence_of("short", 5)
    for wanted in ([(long, 4)], [(long, 4), (short, 3)], [(short, 0)]):
        drafter.propose(wanted)
    assert [(span.name, span.tokens) for span in lanes.spans] == [("draft", 0), ("draft", 7)]
    assert all(span.lane is Lane.COMPUTE and span.seconds > 0 for span in lanes.spans)


def test_a_long_prompt_is_computed_over_several_calls(model: Decoder) -> None:
    oracle, drafter = Oracle("llama-3"), make_drafter(model, most_tokens=32)
    long, short = sequence_of("long", 70), sequence_of("short", 20)
    assert drafter.propose([(long, 4)]) == [[]]
    # Half of the tokens are left for the other one in the third call.
    assert drafter.propose([(long, 4)]) == [[]]
    drafts = drafter.propose([(long, 4), (short, 4)])
    assert drafts == [oracle(long.tokens, 4), oracle(short.tokens, 4)]


def test_the_longest_unused_sequence_gives_way_and_those_in_use_do_not(model: Decoder) -> None:
    """Seven pages: two for each of three sequences of up to 32 tokens, and one left."""
    oracle, drafter = Oracle("llama-3"), make_drafter(model, pages=7)
    first, second, third, fourth = (sequence_of(str(n), n) for n in (20, 21, 22, 23))
    for each in (first, second, third, first):
        assert drafter.propose([(each, 4)]) == [oracle(each.tokens, 4)]
    # The second one was not drafted for the longest.
    assert drafter.propose([(fourth, 4)]) == [oracle(fourth.tokens, 4)]
    assert drafter.cache.pages.used_count == 6
    together = drafter.propose([(each, 4) for each in (first, third, fourth, second)])
    assert together[:3] == [oracle(each.tokens, 4) for each in (first, third, fourth)]
    assert together[3] == []
    for each in (first, third, fourth, second):
        drafter.forget(each.key, has_ended=True)
    assert drafter.cache.pages.free_count == 7
    drafter.cache.pages.check_integrity()
    assert drafter.propose([(second, 4)]) == [oracle(second.tokens, 4)]


def test_random_calls_lose_no_page_and_draft_right_or_not_at_all(model: Decoder) -> None:
    """100 calls for any of 8 sequences that grow, end, and want more pages than there are."""
    oracle, rng = Oracle("llama-3"), random.Random(11)
    drafter = make_drafter(model, pages=9, most_tokens=48)
    sequences = [sequence_of(str(n), rng.randrange(1, 40)) for n in range(8)]
    drafted = 0
    for round_number in range(100):
        chosen = rng.sample(sequences, rng.randrange(1, 6))
        drafts = drafter.propose([(each, rng.choice([1, 3, 8])) for each in chosen])
        drafter.cache.pages.check_integrity()
        for sequence, draft in zip(chosen, drafts, strict=True):
            if draft and round_number % 5 == 0:
                assert draft == oracle(sequence.tokens, len(draft))
            drafted += len(draft)
            sequence.tokens += draft[: rng.randrange(len(draft) + 1)]
            sequence.tokens.append(rng.randrange(VOCABULARY))
        for index, sequence in enumerate(sequences):
            if len(sequence.tokens) > 90 or rng.random() < 0.02:
                drafter.forget(sequence.key, has_ended=True)
                sequences[index] = sequence_of(f"{round_number}.{index}", rng.randrange(1, 40))
    assert drafted > 250
    for sequence in sequences:
        drafter.forget(sequence.key, has_ended=True)
    assert drafter.cache.pages.used_count == 0


def test_nothing_is_drafted_beyond_the_draft_models_context(model: Decoder) -> None:
    oracle, drafter = Oracle("llama-3"), make_drafter(model)
    sequence = sequence_of("end", CONTEXT - 2)
    assert drafter.propose([(sequence, 8)]) == [oracle(sequence.tokens, 3)]
    sequence.tokens += [5, 5, 5]
    assert drafter.propose([(sequence, 8)]) == [[]]
    assert drafter.cache.pages.used_count == 0


def test_it_stops_where_it_is_unsure(model: Decoder) -> None:
    """The first token is always drafted; the next ones while all before are likely enough."""
    sequences = [sequence_of(str(n), n) for n in range(20, 30)]
    bold = make_drafter(model).propose([(each, 8) for each in sequences])
    careful = make_drafter(model, least_chance=0.05).propose([(each, 8) for each in sequences])
    reference = build_tiny("llama-3")
    assert {len(draft) for draft in bold} == {8}
    for sequence, long, short in zip(sequences, bold, careful, strict=True):
        known = torch.tensor([[*sequence.tokens, *long]])
        with torch.inference_mode():
            logits = reference(known).logits[0, -9:-1].float()
        largest = torch.softmax(logits, dim=-1).amax(dim=-1).cumprod(dim=0)
        sure = int((largest >= 0.05).sum())
        assert short == long[: 1 + min(sure, 7)]
    assert len({len(draft) for draft in careful}) > 1


def test_values_that_are_not_finite_draft_nothing_and_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    oracle = Oracle("llama-3")
    model = load("llama-3", tmp_path)
    drafter = make_drafter(model, pages=2)
    weight = model.layers[0].attention_norm.weight
    kept = weight.clone()
    weight.fill_(torch.nan)
    sequence = sequence_of("spoiled", 20)
    assert drafter.propose([(sequence, 4)]) == [[]]
    weight.copy_(kept)
    assert drafter.propose([(sequence, 4)]) == [oracle(sequence.tokens, 4)]
    # Others get the same pages.
    other = sequence_of("other", 18)
    assert drafter.propose([(other, 4)]) == [oracle(other.tokens, 4)]
