"""What `splitpoint eval` computes: every text, under every selection.

How far a difference of perplexities may be chance is told by a bootstrap over blocks of tokens:
losses of neighbouring tokens are correlated, so that whole blocks are drawn (Kunsch 1989).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.checkpoint.decoder import DecoderConfig, read_decoder
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument, NotFound
from splitpoint.selection import FULL, Selection, SelectionMethod
from splitpoint.shapes import DataType
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.pooled import load_pooled, pooled_shape
from splitpoint_cli.bench.texts import beginnings, read_unseen
from splitpoint_cli.eval.report import Answers, SelectionResult, Texts
from splitpoint_cli.eval.tasks import Task, TaskKind, extraction, needle
from splitpoint_cli.eval.workload import EvalWorkload
from worker_service.device.cache import TORCH_TYPES
from worker_service.evaluation.counts import SelectionCounts
from worker_service.evaluation.teacher_forced import GuessRule, Reading, TeacherForced
from worker_service.selection.guess import GuessFrom, GuessNorm
from worker_service.selection.screen_factory import Screens

BLOCK_TOKENS = 64
_DRAWS = 2000
_BOUNDS = (0.025, 0.975)


def perplexity_interval(
    differences: Sequence[npt.NDArray[np.float64]], seed: int
) -> tuple[float, float]:
    """Return the 95 % interval of a perplexity over another, as a ratio minus 1.

    Args:
        differences: of each text, the losses of its tokens minus those of the other reading.
        seed: of the draws; equal texts then have equal intervals.
    """
    blocks = [
        part for text in differences for part in np.array_split(text, -(-len(text) // BLOCK_TOKENS))
    ]
    sums = np.array([part.sum() for part in blocks])
    counts = np.array([len(part) for part in blocks])
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(_DRAWS, len(blocks)))
    means = sums[drawn].sum(-1) / counts[drawn].sum(-1)
    low, high = np.expm1(np.quantile(means, _BOUNDS))
    return float(low), float(high)


CPU = torch.device("cpu")
# What a model reads that sees nearby tokens only: tokens that it gets wrong, and that the whole
# context gets right, need distant ones.
_NEARBY = Selection(method=SelectionMethod.WINDOW, budget_tokens=64, full_layers=0)


@dataclass(slots=True)
class _Tally:
    """Sums over the texts and tasks under one selection."""

    screens: Screens
    loss: float = 0.0
    tokens: int = 0
    # The losses of each text minus those of `full`.
    differences: list[npt.NDArray[np.float64]] = field(default_factory=list)
    agreeing: int = 0
    far_right: int = 0
    far: int = 0
    answers: dict[TaskKind, list[tuple[bool, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    counts: SelectionCounts = field(default_factory=SelectionCounts)
    recalls: list[float] = field(default_factory=list)
    kept: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    def add_text(self, reading: Reading, full: Reading, far: torch.Tensor) -> None:
        """Add a text; `far` bool `[N - 1]` says which tokens need distant ones."""
        self.loss += float(reading.losses.double().sum())
        self.differences.append((reading.losses.double() - full.losses.double()).numpy())
        self.tokens += len(reading.losses)
        same = reading.choices == full.choices
        self.agreeing += int(same.sum())
        self.far_right += int((same & far).sum())
        self.far += int(far.sum())
        self.counts.add(reading.counts)
        self.recalls.append(reading.counts.recall)

    def add_task(self, task: Task, reading: Reading) -> None:
        """Add the tokens of a task's answers."""
        for positions in task.answers:
            for position in positions:
                # The first loss is of the second token behind the prompt.
                index = position - task.prompt_tokens - 1
                is_right = int(reading.choices[index]) == task.token_ids[position]
                self.answers[task.kind].append((is_right, float(reading.losses[index])))

    def result(self, seed: int) -> SelectionResult:
        """Return what the sums come to; `seed`: of the interval's draws."""
        counts = self.counts
        kept, whole = self.kept
        return SelectionResult(
            selection=str(self.screens.selection),
            method=str(self.screens.selection.method),
            perplexity=math.exp(self.loss / self.tokens),
            interval=perplexity_interval(self.differences, seed),
            agreement=self.agreeing / self.tokens,
            far_right=self.far_right / self.far if self.far else None,
            read_ratio=counts.read_ratio,
            screened_ratio=counts.screened_ratio,
            device_ratio=kept / whole if whole else 0.0,
            recall=counts.recall,
            recalls=tuple(self.recalls),
            held_weight=counts.held_weight,
            overlap=counts.overlap,
            evicted=counts.evicted_ratio,
            needle=self._answers(TaskKind.NEEDLE),
            extraction=self._answers(TaskKind.EXTRACTION),
            seconds=self.seconds,
        )

    def _answers(self, kind: TaskKind) -> Answers | None:
        found = self.answers[kind]
        if not found:
            return None
        return Answers(
            tokens=len(found),
            right=sum(is_right for is_right, _ in found) / len(found),
            logprob=-sum(loss for _, loss in found) / len(found),
        )


@torch.inference_mode()
def run_all(workload: EvalWorkload, progress: Progress) -> tuple[Texts, list[SelectionResult]]:
    """Return what was read, and the results of `full` and of each selection, in their order."""
    torch.set_num_threads(workload.threads)
    folder = resolve_model(workload.model)
    tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        raise InvalidArgument(f"{folder} has no tokenizer", field="model")
    config = _read_config(folder, workload.kv_heads)
    if workload.tokens > config.shape.context_length:
        raise InvalidArgument(
            f"{folder.name} has a context of {counted(config.shape.context_length, 'token')}, and "
            f"{workload.tokens:,} are wanted",
            field="tokens",
        )
    tallies = [_Tally(each) for each in _open_screens(workload, config, folder, progress)]
    files, windows = _read_windows(workload, tokenizer, folder)
    tasks = list(_make_tasks(workload, tokenizer, windows))
    model = load_pooled(folder, workload.kv_heads, CPU, DataType.FLOAT32)
    rule = GuessRule(GuessFrom(workload.guess), GuessNorm(workload.norm))
    stored_type = TORCH_TYPES[config.shape.data_type]
    for window in progress.track("texts", windows):
        forced = TeacherForced(model, window, workload.prompt)
        _read_window(forced, tallies, Screens(config, _NEARBY), rule)
        if window is windows[0]:
            for tally in tallies:
                tally.kept = forced.kept_bytes(tally.screens, stored_type)
    for task in progress.track("tasks", tasks):
        forced = TeacherForced(model, task.token_ids, task.prompt_tokens)
        for tally in tallies:
            tally.add_task(task, forced.read(tally.screens, rule))
    texts = Texts(
        files=files, windows=len(windows), far_tokens=tallies[0].far, tasks=workload.tasks
    )
    return texts, [tally.result(workload.seed) for tally in tallies]


def _read_window(
    forced: TeacherForced, tallies: Sequence[_Tally], nearby: Screens, rule: GuessRule
) -> None:
    """Read a text under every selection; the first one is `full`."""
    full: Reading | None = None
    far = torch.empty(0)
    for tally in tallies:
        began = time.perf_counter()
        reading = forced.read(tally.screens, rule)
        tally.seconds += time.perf_counter() - began
        if full is None:
            full = reading
            is_right = full.choices == forced.targets
            far = is_right & (forced.read(nearby).choices != forced.targets)
        tally.add_text(reading, full, far)


def _read_config(folder: Path, kv_heads: int | None) -> DecoderConfig:
    """Return the model's config in the checkpoint's element type, with averaged KV heads."""
    config = read_decoder(folder, None)
    if kv_heads is None:
        return config
    return replace(config, shape=pooled_shape(config.shape, kv_heads))


def _open_screens(
    workload: EvalWorkload, config: DecoderConfig, folder: Path, progress: Progress
) -> Iterator[Screens]:
    """Yield those of `full` and of each selection.

    Where the selections are the default ones, those that need calibration are left out without it.
    Averaged KV heads have none.
    """
    yield Screens(config, FULL)
    missing: dict[SelectionMethod, str] = {}
    for selection in workload.selections:
        try:
            if workload.kv_heads is not None and selection.method.is_calibrated:
                raise NotFound(f"{selection.method} has no artefacts for averaged KV heads")
            yield Screens.open(config, selection, folder, artifacts=workload.artifacts, device=CPU)
        except NotFound as error:
            if not workload.is_default:
                raise
            missing[selection.method] = error.message
    for message in missing.values():
        progress.say(f"left out: {message}")


def _read_windows(
    workload: EvalWorkload, tokenizer: Tokenizer, folder: Path
) -> tuple[dict[str, list[str]], list[Sequence[int]]]:
    """Return the files by package (or the user's), and the texts as token ids."""
    if workload.text:
        cut = beginnings(workload.text, folder, workload.windows, workload.tokens)
        return {"text": [path.name for path in workload.text]}, list(cut)
    samples = list(read_unseen(tokenizer, workload.windows, workload.tokens))
    windows = [window for sample in samples for window in sample.windows]
    if not windows:
        raise InvalidArgument(
            f"no unseen file has {counted(workload.tokens, 'token')}: give --text", field="tokens"
        )
    return {sample.package: sample.files for sample in samples}, list(windows)


def _make_tasks(
    workload: EvalWorkload, tokenizer: Tokenizer, windows: Sequence[Sequence[int]]
) -> Iterator[Task]:
    """Yield needles at evenly spread depths in the texts, and tables."""
    for number in range(workload.tasks):
        seed = workload.seed + number
        depth = (number + 0.5) / workload.tasks
        filler = windows[number % len(windows)]
        yield needle(tokenizer, filler, workload.tokens, depth, seed)
        yield extraction(tokenizer, workload.tokens, seed)
