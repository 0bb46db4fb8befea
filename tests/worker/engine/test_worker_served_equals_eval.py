"""What a served step attends by alpha is what `eval --guess previous` reads, row for row.

Over 200 steps of a model with RoPE and grouped queries, of one without, and of a trained one whose
share of read tokens grows with alpha. Here all tokens on the device are among those that the
selection always reads; served steps attend others there, too.
"""

from __future__ import annotations

import asyncio.base_events
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, make_engine
from selecting import select_always
from store_runner import StoreRunner, store_runner, streamed
from tiny_models import VOCABULARY, write_tiny
from tokenizers import Tokenizer

from splitpoint.selection import Selection
from splitpoint.shapes import ArenaLayout
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.evaluation import teacher_forced
from worker_service.evaluation.teacher_forced import GuessRule, TeacherForced
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder
from worker_service.selection.columns import ColumnScreen
from worker_service.selection.guess import GuessFrom
from worker_service.selection.screen import LayerScreen
from worker_service.selection.screen_factory import Screens
from worker_service.selection.token_choice import choose

CHUNK, PROMPT, STEPS = 16, 300, 200
# The tail is at most a chunk that is written back, and one that is not full.
RECENT = 48
LOOKUP_OPT = Path(__file__).parents[3] / "models/lookup-opt"

pytestmark = pytest.mark.usefixtures("one_thread")


class Served:
    """What each step of the only request attended: of each layer, tokens by KV head."""

    def __init__(self, runner: StoreRunner, engine: Engine) -> None:
        self.steps: list[dict[int, list[set[int]]]] = []
        # Position of the first of them; steps before it read everything.
        self.first = 0
        self.columns: dict[int, torch.Tensor] = {}
        self.read_tokens = 0
        self._engine = engine
        runner.after_step = self._note

    def _note(self, output: StepOutput) -> None:
        running = self._engine.queues.running
        # Behind its last step the request is gone.
        if not output.selections or not running:
            return
        (event,), (sequence,) = output.selections, running
        self.read_tokens += event.usage.read_token_count
        reads = sequence.reads
        assert reads is not None
        # The newest token's own row was computed in this step.
        position = sequence.computed - 1
        first, end = reads.first_position, reads.first_position + reads.stored_tokens
        self.first = self.first or position
        on_device = {*range(first), *range(end, position + 1)}
        assert on_device <= {*range(position + 1 - RECENT, position + 1)}
        self.steps.append(
            {
                layer: [
                    on_device | {first + token for token in head.tolist() if token >= 0}
                    for head in reads.tokens(layer)
                ]
                for layer in reads.layers
            }
        )
        for layer in reads.layers:
            screen = reads._built[layer]
            assert isinstance(screen, ColumnScreen)
            assert screen._columns is not None
            self.columns[layer] = screen._columns


class SameColumns(Screens):
    """Screens of the columns that were served: an evaluation learns them of the whole prompt."""

    def __init__(
        self, model: Decoder, selection: Selection, columns: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(model.config, selection)
        self._served = columns

    def layer(self, index: int, blocks: object = None) -> LayerScreen | None:
        screen = super().layer(index)
        if isinstance(screen, ColumnScreen):
            screen._columns = self._served[index]
        return screen


@dataclass(frozen=True, slots=True)
class Comparison:
    """Served steps beside the evaluation of the same tokens.

    Attributes:
        rows: pairs of a step and a KV head.
        differing: rows that read other tokens.
        sizes: numbers of tokens that rows read.
        served: tokens that the answer says were read.
        evaluated: tokens that the evaluation read, a mean over layers and heads.
        whole: tokens that full attention reads.
    """

    rows: int
    differing: int
    sizes: set[int]
    served: float
    evaluated: float
    whole: float


def by_alpha(alpha: float) -> Selection:
    return Selection.parsed(
        f"columns:alpha={alpha:g},cap=0.5,sinks=4,recent={RECENT},full_layers=1"
    )


def compared(
    model: Decoder,
    prompt: list[int],
    selection: Selection,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Comparison:
    select_always(monkeypatch)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, folder, 80) as runner:
        engine = make_engine(
            model,
            has_activations=True,
            lanes=SerialLanes(CPU),
            staging_pages=48,
            cache_pages=80,
            max_batched_tokens=128,
        )
        served = Served(runner, engine)
        sampling = Sampling(max_tokens=STEPS + 5, ignore_eos=True)
        request = streamed("1", prompt, sampling, selection=selection)
        transcript = runner.run(engine, [request])
    assert transcript.finishes["1"].selection_off_reason == ""
    assert len(served.steps) >= STEPS
    tokens = [*prompt, *transcript.tokens["1"]][: served.first + len(served.steps)]

    found: list[torch.Tensor] = []

    def noting(scores: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        chosen = choose(scores, *args, **more)  # type: ignore[arg-type]
        found.append(chosen)
        return chosen

    monkeypatch.setattr(teacher_forced, "choose", noting)
    screens = SameColumns(model, selection, served.columns)
    with torch.inference_mode():
        text = TeacherForced(model, tokens, served.first)
        counts = text.read(screens, GuessRule(GuessFrom.PREVIOUS)).counts
    blocks = len(found) // len(served.columns)
    heads, layers = model.shape.kv_head_count, len(served.columns)
    differing, sizes = 0, set()
    for place, layer in enumerate(served.columns):
        rows = [row for block in found[place * blocks : (place + 1) * blocks] for row in block]
        for row, step in zip(rows, served.steps, strict=True):
            for read, attended in zip(row, step[layer], strict=True):
                differing += set(read.nonzero().flatten().tolist()) != attended
                sizes.add(len(attended))
    return Comparison(
        rows=heads * layers * len(served.steps),
        differing=differing,
        sizes=sizes,
        served=served.read_tokens,
        evaluated=counts.screened_read / layers / heads,
        whole=sum(range(served.first + 1, served.first + 1 + len(served.steps))),
    )


@pytest.mark.parametrize("name", ["llama-3", "opt"])
def test_rows_are_those_of_the_evaluation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder.load(write_tiny(name, tmp_path / "model"), CPU, torch.float32)
    drawn = torch.randint(3, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(1))
    found = compared(model, drawn.tolist(), by_alpha(4), tmp_path, monkeypatch)
    # Sums in another order may decide between tokens of nearly the same score.
    assert found.differing <= 2, f"of {found.rows}"
    assert len(found.sizes) > 20
    # What the answer reports is the share that was read.
    assert found.served == pytest.approx(found.evaluated, rel=1e-3)


def test_a_larger_alpha_reads_more_as_in_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder.load(LOOKUP_OPT, CPU, torch.float32)
    source = inspect.getsource(asyncio.base_events)
    prompt = Tokenizer.from_file(str(LOOKUP_OPT / "tokenizer.json")).encode(source).ids[:PROMPT]
    shares = []
    for alpha in (2, 3, 4, 5):
        folder = tmp_path / str(alpha)
        folder.mkdir()
        with monkeypatch.context() as patch:
            found = compared(model, prompt, by_alpha(alpha), folder, patch)
        assert found.differing <= 0.01 * found.rows
        assert found.served == pytest.approx(found.evaluated, rel=1e-2)
        # The newest tokens are always read: what alpha decides is the rest.
        shares.append((found.served - RECENT * STEPS) / found.whole)
    assert shares == sorted(shares)
    assert shares[-1] > 1.5 * shares[0] > 0
