"""Text under a selection: what decoding step by step gives."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from selecting import maple_artifacts
from tiny_models import VOCABULARY, write_tiny
from torch.nn import functional
from transformers import AutoModelForCausalLM

from splitpoint.selection import FULL, Selection, SelectionMethod
from worker_service.evaluation import teacher_forced
from worker_service.evaluation.counts import LayerCounts, SelectionCounts
from worker_service.evaluation.teacher_forced import GuessRule, TeacherForced
from worker_service.model.decoder import Decoder
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.guess import GuessFrom, GuessNorm, guess_of
from worker_service.selection.pool import TokenPool
from worker_service.selection.screen import Guess, LayerScreen, TokenRows
from worker_service.selection.screen_factory import Screens
from worker_service.selection.token_choice import choose

CPU = torch.device("cpu")
# More later tokens than one block of queries has.
PROMPT, TOKENS = 27, 100
CASES = ("opt", "llama-3", "mistral", "qwen3", "gemma2")
# Tiny models have three or four layers: all but the first select.
CHAOS = pytest.mark.chaos
SETTINGS = {"sinks": 2, "recent": 5, "full_layers": 1}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return Decoder.load(folder, CPU, torch.float32)


def text() -> list[int]:
    drawn = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return [int(each) for each in drawn]


def random_artifacts(model: Decoder, method: SelectionMethod) -> Artifacts:
    """Factors that rank tokens by chance; reading everything must not depend on them."""
    random = torch.Generator().manual_seed(3)
    shape = model.shape
    heads, width, rank = shape.kv_head_count, shape.head_dim, 4
    sizes_of: dict[SelectionMethod, dict[str, tuple[int, ...]]] = {
        SelectionMethod.INFINIGEN: {"skew": (heads, width, width)},
        SelectionMethod.LOWRANK: dict.fromkeys(("query_map", "key_map"), (heads, width, rank)),
    }
    if method is SelectionMethod.MAPLE:
        return maple_artifacts(shape, rank, projection=16)
    tensors = {
        f"layers.{index}.{name}": torch.randn(size, generator=random)
        for index in range(shape.layer_count)
        for name, size in sizes_of[method].items()
    }
    return Artifacts(method, tensors, {})


def screens_of(model: Decoder, selection: Selection) -> Screens:
    method = selection.method
    found = random_artifacts(model, method) if method.is_calibrated else None
    return Screens(model.config, selection, found)


@torch.inference_mode()
def test_full_is_the_plain_model(folder: Path, model: Decoder) -> None:
    ids = text()
    reading = TeacherForced(model, ids, PROMPT).read(Screens(model.config, FULL))
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logits = plain(torch.tensor([ids])).logits[0, PROMPT:-1].float()
    wanted = functional.cross_entropy(logits, torch.tensor(ids[PROMPT + 1 :]), reduction="none")
    torch.testing.assert_close(reading.losses, wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(reading.choices, logits.argmax(-1))
    assert reading.counts.read_ratio == reading.counts.screened_ratio == 1


BUDGETS: list[dict[str, float]] = [
    {"ratio": 1.0},
    {"budget_tokens": TOKENS},
    {"alpha": math.inf, "cap": 1.0},
]
CHANGES: list[dict[str, float]] = [{}, {"pool": 1.0}]


# Every budget with every change in one family; each of both in the others.
@pytest.mark.parametrize(
    ("folder", "number", "change"),
    [
        pytest.param(*each, marks=[] if each[0] == "llama-3" or each[1] == each[2] else CHAOS)
        for each in itertools.product(CASES, range(3), range(2))
    ],
    indirect=["folder"],
)
@torch.inference_mode()
def test_reading_everything_gives_the_bits_of_full(
    model: Decoder, number: int, change: int
) -> None:
    budget, changes = BUDGETS[number], CHANGES[change]
    forced = TeacherForced(model, text(), PROMPT)
    full = forced.read(Screens(model.config, FULL))
    for method in SelectionMethod:
        if method.has_logits or (method is not SelectionMethod.FULL and "alpha" not in budget):
            if method is SelectionMethod.H2O and "pool" in changes:
                continue
            selection = Selection(method=method, **changes, **SETTINGS, **budget)  # type: ignore[arg-type]
            found = forced.read(screens_of(model, selection))
            assert torch.equal(found.losses, full.losses), method
            assert found.counts.recall == found.counts.screened_ratio == 1


@dataclass
class Step:
    """What one query of one layer could read, read, and would have weighed; per KV head."""

    visible: set[int]
    read: list[set[int]]
    weights: torch.Tensor  # [n_q, S]


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: Step,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Attend one token's heads one by one, in double precision, to what they read."""
    parts = []
    for head in range(len(query)):
        kv_head = head * keys.shape[1] // len(query)
        scores = keys[:, kv_head].double() @ query[head].double() * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)

        def masked(tokens: set[int], scores: torch.Tensor = scores) -> torch.Tensor:
            places = sorted(tokens)
            found = torch.full_like(scores, -math.inf)
            found[places] = scores[places]
            return found.softmax(-1)

        step.weights[head] = masked(step.visible)
        parts.append(masked(step.read[kv_head]) @ values[:, kv_head].double())
    return torch.cat(parts).float()


def decoded(model: Decoder, screens: Screens, rule: GuessRule) -> tuple[list[float], list[Step]]:
    """Decode the text token by token, its prompt exactly; return losses and the screened steps."""
    ids = text()
    layers = model.layers
    screen = [screens.layer(index) for index in range(len(layers))]
    pools = [pool_of(model, screens.selection, index) for index in range(len(layers))]
    keys: list[torch.Tensor] = [torch.empty(0)] * len(layers)
    values, first_rows = list(keys), [list[TokenRows]() for _ in layers]
    losses: list[float] = []
    steps: list[Step] = []
    for position, token in enumerate(ids):
        at = torch.tensor([position])
        hidden = model.embed(torch.tensor([token]), at)
        before = None
        rotary = model.rotary(at)
        for index, layer in enumerate(layers):
            inputs = layer.attention_input(hidden)
            query, key, value = layer.project(inputs, rotary)
            rows = TokenRows(inputs, query, key)
            keys[index] = torch.cat((keys[index], key)) if position else key
            values[index] = torch.cat((values[index], value)) if position else value
            least = 0 if layer.window is None else max(0, position + 1 - layer.window)
            visible = set(range(least, position + 1))
            step = Step(
                visible, [visible] * key.shape[1], torch.zeros((query.shape[1], position + 1))
            )
            mine = screen[index]
            if position < PROMPT:
                first_rows[index].append(rows)
            elif mine is not None:
                pool = pools[index]
                if first_rows[index]:
                    prompt = joined(first_rows[index])
                    mine.extend(prompt)
                    first_rows[index] = []
                    if pool is not None:
                        start_pool(pool, mine, prompt, screens.selection, layer.window)
                mine.extend(rows)
                guess = Guess(inputs, query, position)
                if rule.source is GuessFrom.PREVIOUS and before is not None:
                    norm_of = layer if rule.norm is GuessNorm.OWN else layers[index - 1]
                    guess = guess_of(before, layer, norm_of, rotary, position)
                scores = mine.scores(guess)
                if pool is not None:
                    scores = pool.masked(scores)
                chosen = choose(
                    scores,
                    screens.selection,
                    first_position=position,
                    tokens=position + 1,
                    kv_heads=key.shape[1],
                    window=layer.window,
                )
                if pool is not None:
                    chosen &= pool.left(position + 1)
                    pool.read(chosen, position)
                    if (position - PROMPT) % teacher_forced.BLOCK == teacher_forced.BLOCK - 1:
                        pool.admit(teacher_forced.BLOCK)
                        pool.evict()
                step.read = [set(head.nonzero().flatten().tolist()) for head in chosen[0]]
                steps.append(step)
            result = attended(query[0], keys[index], values[index], step, layer.scale, layer.cap)
            before, hidden = hidden, layer.finish(hidden, result.unsqueeze(0))
        if PROMPT <= position < TOKENS - 1:
            losses.append(-float(model.logits(hidden)[0].log_softmax(-1)[ids[position + 1]]))
    return losses, steps


def pool_of(model: Decoder, selection: Selection, index: int) -> TokenPool | None:
    if selection.pool is None:
        return None
    return TokenPool(selection, model.shape.kv_head_count, model.layers[index].window)


def start_pool(
    pool: TokenPool,
    screen: LayerScreen,
    prompt: TokenRows,
    selection: Selection,
    window: int | None,
) -> None:
    """Let the prompt's queries, fewer than the pool learns of, choose one by one."""
    pool.admit(PROMPT)
    for position in range(PROMPT):
        one = slice(position, position + 1)
        scores = screen.scores(Guess(prompt.inputs[one], prompt.queries[one], position))
        chosen = choose(
            scores,
            selection,
            first_position=position,
            tokens=PROMPT,
            kv_heads=prompt.keys.shape[1],
            window=window,
        )
        pool.read(chosen, position)
    pool.evict()


def joined(rows: list[TokenRows]) -> TokenRows:
    return TokenRows(
        torch.cat([each.inputs for each in rows]),
        torch.cat([each.queries for each in rows]),
        torch.cat([each.keys for each in rows]),
    )


PREVIOUS = GuessRule(GuessFrom.PREVIOUS)


@pytest.mark.parametrize(
    ("case", "words", "rule"),
    [
        ("llama-3", "columns:0.2", GuessRule()),
        ("opt", "columns:0.2", PREVIOUS),
        ("qwen3", "columns:alpha=1.0,cap=0.5", GuessRule(GuessFrom.PREVIOUS, GuessNorm.PREVIOUS)),
        ("gemma2", "window:0.5", GuessRule()),
        ("opt", "h2o:0.3", GuessRule()),
        ("llama-3", "columns:0.2,pool=0.7", PREVIOUS),
        ("mistral", "columns:0.2,pool=0.6,policy=lru", GuessRule()),
        ("mistral", "window:0.5,pool=0.5,policy=fifo", GuessRule()),
    ],
)
@torch.inference_mode()
def test_one_pass_is_decoding_step_by_step(
    case: str, words: str, rule: GuessRule, tmp_path: Path
) -> None:
    model = Decoder.load(write_tiny(case, tmp_path), CPU, torch.float32)
    text_form = words + "".join(f",{name}={value}" for name, value in SETTINGS.items())
    screens = Screens(model.config, Selection.parsed(text_form))
    reading = TeacherForced(model, text(), PROMPT).read(screens, rule)
    losses, steps = decoded(model, screens, rule)
    torch.testing.assert_close(reading.losses, torch.tensor(losses), rtol=1e-3, atol=1e-3)
    check_counts(reading.counts, steps, screened=len(model.layers) - 1)
    assert (reading.counts.evicted_ratio > 0.1) == ("pool" in words)


def check_counts(counts: SelectionCounts, steps: list[Step], screened: int) -> None:
    """The sums are those of sets, the steps being in order of position, then of layer."""
    read = sum(len(head) for step in steps for head in step.read)
    assert counts.screened_read == read
    assert counts.screened_visible == sum(len(step.visible) * len(step.read) for step in steps)
    later = list(zip(steps, steps[screened:], strict=False))
    pairs = [pair for old, new in later for pair in zip(old.read, new.read, strict=True)]
    assert counts.kept == sum(len(old & new) for old, new in pairs)
    assert counts.kept_of == sum(len(new) for _, new in pairs)
    measured = [steps[first * screened : (first + 1) * screened] for first in sampled()]
    hits = wanted = 0
    weight = 0.0
    for step in (each for layer in measured for each in layer):
        for head, weights in enumerate(step.weights):
            mine = step.read[head * len(step.read) // len(step.weights)]
            best = set(weights.topk(len(mine)).indices.tolist())
            hits += len(best & mine)
            wanted += len(mine)
            weight += float(weights[sorted(mine)].sum())
    assert (counts.hits, counts.wanted) == (hits, wanted)
    assert counts.weight == pytest.approx(weight, rel=1e-3)
    assert counts.held_weight == pytest.approx(
        weight / sum(len(each.weights) for layer in measured for each in layer), rel=1e-3
    )


def sampled() -> list[int]:
    """Queries behind the prompt that are measured by weights: every eighth of each block."""
    places = range(TOKENS - PROMPT)
    return [place for place in places if place % teacher_forced.BLOCK % 8 == 0]


def test_ratios_of_counts() -> None:
    counts = SelectionCounts()
    layer = LayerCounts(counts)
    visible = torch.ones((2, 1, 4), dtype=torch.bool)
    everything = torch.ones((2, 1, 4), dtype=torch.bool)
    layer.add(everything, visible, is_screened=False)
    chosen = torch.tensor([[[1, 1, 0, 0]], [[1, 0, 1, 0]]], dtype=torch.bool)
    layer = LayerCounts(counts)
    layer.add(chosen, visible, is_screened=True)
    # The next block sees one token more, and reads one of the two tokens that were read before.
    layer.add(
        torch.tensor([[[0, 0, 1, 0, 1]]], dtype=torch.bool),
        torch.ones((1, 1, 5), dtype=torch.bool),
        is_screened=True,
    )
    assert counts.read_ratio == 14 / 21
    assert counts.screened_ratio == 6 / 13
    assert counts.overlap == 2 / 4
    scores = torch.tensor([[[5.0, 1.0, 4.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])
    layer.add_weights(chosen, visible, scores)
    # Only the first query is measured: it read the best token, and the third best.
    assert counts.recall == 1 / 2
    assert counts.held_weight == pytest.approx(float(scores[0, 0].softmax(-1)[:2].sum()))
    other = SelectionCounts()
    other.add(counts)
    other.add(counts)
    assert other.recall == counts.recall
    assert other.read == 2 * counts.read


def test_a_prompt_leaves_two_tokens(model: Decoder) -> None:
    for prompt in (0, TOKENS - 1):
        with pytest.raises(ValueError, match="a prompt of"):
            TeacherForced(model, text(), prompt)


@torch.inference_mode()
def test_bytes_that_screens_keep(model: Decoder) -> None:
    forced = TeacherForced(model, text(), PROMPT)
    shape = model.shape
    layers = shape.layer_count - 1
    selection = Selection.parsed("columns:0.1,columns=6,full_layers=1")
    kept, whole = forced.kept_bytes(Screens(model.config, selection), torch.bfloat16)
    assert whole == layers * PROMPT * shape.kv_head_count * shape.head_dim * 2 * 2
    assert kept == layers * PROMPT * shape.kv_head_count * 6 * 2
    assert forced.kept_bytes(Screens(model.config, FULL), torch.bfloat16) == (0, 0)
