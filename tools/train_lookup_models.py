"""Train small models that look things up in their context: what selections are judged by.

The bundled model writes code and retrieves little, so what a selection loses hardly shows in it.
These two copy passages and find values of tables and assignments (the tasks of `splitpoint eval`)
hundreds of tokens back: one like OPT (learned positions, multi-head), one like Llama (RoPE, grouped
queries). They read the tasks and the running interpreter's own library; no network is needed.

Looking up needs two heads that work together: one that attends to the token before, one that finds
where the present token stood before. Nothing rewards either alone, so training stays on a plateau,
where any token of the passage is as likely, until both exist. What shortens it: few different
tokens at first, and repetitions of every length, which no fixed distance explains. The number of
different tokens doubles as the model succeeds; then longer rows, tables, and text join.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from splitpoint.checkpoint.text import Tokenizer as TaskTokenizer
from splitpoint_cli.eval import tasks
from tools import train_stdlib_model as base

FAMILIES = ("opt", "llama")
_SPECIAL = 3  # tokens below this are no content of a passage


@dataclass(frozen=True)
class Settings:
    """Sizes and schedule of one model."""

    family: str
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocabulary: int = 1024
    context: int = 8192
    tokens: int = 12_000_000
    tokens_per_step: int = 2048
    # Different tokens of the first passages; they double until all are in use.
    first_width: int = 32
    # Mean accuracy of the last `judged_steps` from which the passages get harder.
    passed: float = 0.7
    judged_steps: int = 30
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    peak_rate: float = 2e-3  # of AdamW
    matrix_rate: float = 2e-2  # of Muon
    text_weight: float = 0.3
    most_files: int = 300
    task_texts: int = 200  # for the tokenizer
    evaluated_lengths: tuple[int, ...] = (512, 1024, 2048)
    seed: int = 0


_SMOKE = {
    "layers": 2,
    "hidden": 64,
    "heads": 2,
    "vocabulary": 512,
    "context": 1024,
    "tokens": 40 * 512,
    "tokens_per_step": 512,
    "passed": 0.0,
    "judged_steps": 2,
    "lengths": (256,),
    "most_files": 10,
    "task_texts": 4,
    "evaluated_lengths": (512,),
}


# -- data -------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row of a batch: ids `[n]`, and which of them can be looked up; text has none of these."""

    ids: torch.Tensor
    is_answer: torch.Tensor

    @classmethod
    def of(cls, ids: Sequence[int], answers: Sequence[range], length: int) -> Row:
        """Cut ids to a length, or fill it up with ends of documents."""
        padded = torch.ones(length, dtype=torch.int64)
        padded[: len(ids)] = torch.tensor(ids[:length])
        is_answer = torch.zeros(length, dtype=torch.bool)
        for each in answers:
            is_answer[each.start : each.stop] = True
        return cls(padded, is_answer)


class Rows:
    """Draws rows of all kinds."""

    def __init__(self, tokenizer: TaskTokenizer, text: torch.Tensor, settings: Settings) -> None:
        """`text`: one stream of ids, longer than any row."""
        self._tokenizer = tokenizer
        self._text = text
        self._vocabulary = settings.vocabulary
        self._random = random.Random(settings.seed)
        self._generator = torch.Generator().manual_seed(settings.seed)

    def passage(self, length: int, width: int) -> Row:
        """Random tokens out of the first `width`, repeated: after how many differs by row."""
        period = self._random.randint(length // 5, length // 2)
        return self._repeated(self._drawn(width, period) + _SPECIAL, length, known=period + 1)

    def mixed(self, length: int) -> Row:
        """Return a row of any kind: a passage of any tokens, a table, needles, or text."""
        kinds = (self._any_passage, self._table, self._needles, self._text_row)
        return self._random.choices(kinds, weights=(0.25, 0.3, 0.2, 0.25))[0](length)

    def window(self, length: int) -> list[int]:
        """Return consecutive ids of the text."""
        first = self._random.randrange(len(self._text) - length)
        window: list[int] = self._text[first : first + length].tolist()
        return window

    def _any_passage(self, length: int) -> Row:
        """A passage of some tokens: with few of them, more than the last one decides the next."""
        width = round(2 ** self._random.uniform(4, math.log2(self._vocabulary - _SPECIAL)))
        chosen = torch.randperm(self._vocabulary - _SPECIAL, generator=self._generator)[:width]
        period = self._random.randint(max(4, length // 8), length // 2)
        ids = chosen[self._drawn(width, period)] + _SPECIAL
        return self._repeated(ids, length, known=period + 4)

    def _table(self, length: int) -> Row:
        task = tasks.extraction(self._tokenizer, length, self._random.getrandbits(40))
        return Row.of(task.token_ids, task.answers, length)

    def _needles(self, length: int) -> Row:
        """One needle after the other, each in text of its own."""
        ids: list[int] = []
        answers: list[range] = []
        while length - len(ids) >= 64:
            tokens = self._random.randint(64, length - len(ids))
            filler, depth = self.window(tokens), self._random.random()
            seed = self._random.getrandbits(40)
            task = tasks.needle(self._tokenizer, filler, tokens, depth, seed)
            answers += [range(each.start + len(ids), each.stop + len(ids)) for each in task.answers]
            ids += task.token_ids
        return Row.of(ids, answers, length)

    def _text_row(self, length: int) -> Row:
        return Row.of(self.window(length), (), length)

    def _drawn(self, width: int, count: int) -> torch.Tensor:
        return torch.randint(width, (count,), generator=self._generator)

    def _repeated(self, ids: torch.Tensor, length: int, known: int) -> Row:
        repeated = ids.repeat(-(-length // len(ids)))[:length]
        return Row(repeated, torch.arange(length) >= known)


class _Letters:
    """A tokenizer whose tokens are letters: it gives the tasks' texts."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def task_texts(count: int) -> list[str]:
    """Return texts of tasks, for the tokenizer to learn their words from."""
    made = []
    for seed in range(count):
        table = tasks.extraction(_Letters(), 4096, seed)  # type: ignore[arg-type]
        needle = tasks.needle(_Letters(), [ord(" ")] * 64, 96, 0.5, seed)  # type: ignore[arg-type]
        made += ["".join(map(chr, each.token_ids)) for each in (table, needle)]
    return made


# -- model ------------------------------------------------------------------------


def make_model(settings: Settings) -> OPTForCausalLM | LlamaForCausalLM:
    """Return an untrained model; the embeddings are tied."""
    common: dict[str, Any] = {
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "max_position_embeddings": settings.context,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }
    if settings.family == "llama":
        config = LlamaConfig(
            intermediate_size=3 * settings.hidden,
            num_key_value_heads=settings.heads // 2,
            initializer_range=_START,
            **common,
        )
        llama = LlamaForCausalLM(config)
        llama.model.embed_tokens.weight.data.normal_(0, _EMBEDDED)
        return llama
    opt = OPTForCausalLM(
        OPTConfig(
            ffn_dim=4 * settings.hidden,
            word_embed_proj_dim=settings.hidden,
            dropout=0.0,
            attention_dropout=0.0,
            do_layer_norm_before=True,
            init_std=_START,
            **common,
        )
    )
    opt.model.decoder.embed_tokens.weight.data.normal_(0, _EMBEDDED)
    _set_positions(opt.model.decoder.embed_positions.weight)
    return opt


# Standard deviations of weights and of embeddings at the start.
_START, _EMBEDDED = 0.06, 0.1


def _set_positions(table: nn.Parameter) -> None:
    """Give an OPT model positions that stay as they are, sines and cosines.

    Half of the frequencies are spread evenly: products of such rows single out one distance. They
    are not trained, because rows are short beside the context: most positions are seldom seen.
    """
    count, width = table.shape
    quarter = width // 4
    random_ones = torch.rand(quarter, generator=torch.Generator().manual_seed(1)) * math.pi
    slow = torch.exp(-math.log(count / 2) * torch.arange(width // 2 - quarter) / quarter)
    angles = torch.arange(count).unsqueeze(-1) * torch.cat((random_ones, slow))
    table.data = _EMBEDDED * math.sqrt(2) * torch.cat((angles.sin(), angles.cos()), 1)
    table.requires_grad_(False)


# -- training ---------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonal (Jordan et al., 2024).

    torch.optim.Muon multiplies in bfloat16, which takes most of a step on a CPU. This one
    multiplies in float32, all matrices of a shape at once.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change each matrix by its direction times the rate."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for each in group["params"]:
                by_shape.setdefault(each.shape, []).append(each)
            for shape, matrices in by_shape.items():
                directions = _orthogonal(
                    torch.stack([self._momentum(each, group["momentum"]) for each in matrices])
                )
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, direction in zip(matrices, directions, strict=True):
                    matrix.add_(direction, alpha=-rate)

    def _momentum(self, matrix: nn.Parameter, share: float) -> torch.Tensor:
        gradient = matrix.grad
        assert gradient is not None
        mean: torch.Tensor = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
        mean.lerp_(gradient, 1 - share)
        return gradient.lerp(mean, share)


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices `[n, rows, columns]` with singular values near 1 (Newton-Schulz)."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x: torch.Tensor = matrices.mT if is_tall else matrices
    x /= x.norm(dim=(1, 2), keepdim=True) + 1e-7
    for _ in range(5):
        product = x @ x.mT
        x = 3.4445 * x + (2.0315 * product @ product - 4.7750 * product) @ x
    return x.mT if is_tall else x


class _Course:
    """What the next step trains on: harder once the last steps went well."""

    def __init__(self, rows: Rows, settings: Settings) -> None:
        self._rows = rows
        self._settings = settings
        self._recent: deque[float] = deque(maxlen=settings.judged_steps)
        # Different tokens of passages; above all of them: rows of all kinds.
        self._width = settings.first_width
        self._most = settings.vocabulary - _SPECIAL
        self._random = random.Random(settings.seed)

    @property
    def is_mixed(self) -> bool:
        return self._width > self._most

    @property
    def accuracy(self) -> float:
        return sum(self._recent) / max(1, len(self._recent))

    def draw(self, progress: float) -> list[Row]:
        """Return a batch; `progress` in [0, 1) of the whole training."""
        lengths = self._settings.lengths
        newest = min(int(progress * len(lengths)), len(lengths) - 1)
        if not self.is_mixed:
            length = lengths[0] // 2
        else:
            # Shorter ones go on, so that nothing learned before is lost.
            at = newest if self._random.random() < 0.6 else self._random.randint(0, newest)
            length = lengths[at]
        count = max(1, self._settings.tokens_per_step // length)
        if self.is_mixed:
            return [self._rows.mixed(length) for _ in range(count)]
        return [self._rows.passage(length, self._width) for _ in range(count)]

    def learn(self, accuracy: float) -> None:
        """Take a step's accuracy of what can be looked up."""
        self._recent.append(accuracy)
        is_full = len(self._recent) == self._recent.maxlen
        if not self.is_mixed and is_full and self.accuracy >= self._settings.passed:
            last = self._width == self._most
            self._width = self._most + 1 if last else min(2 * self._width, self._most)
            self._recent.clear()

    def __str__(self) -> str:
        what = "all kinds" if self.is_mixed else f"passages of {self._width} tokens"
        return f"{what}, {self.accuracy:.1%} right"


def train(
    model: OPTForCausalLM | LlamaForCausalLM,
    rows: Rows,
    settings: Settings,
    *,
    minutes: float | None,
    keep: Callable[[], None],
) -> int:
    """Train in place; return the tokens that it took. `keep`: is called every few minutes."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    matrices = [each for name, each in trained.items() if each.dim() == 2 and "embed" not in name]
    others = [each for name, each in trained.items() if each.dim() != 2 or "embed" in name]
    optimizers = {
        Muon(matrices, lr=settings.matrix_rate, momentum=0.95): settings.matrix_rate,
        torch.optim.AdamW(
            others, lr=settings.peak_rate, betas=(0.9, 0.98), weight_decay=0.01
        ): settings.peak_rate,
    }
    course = _Course(rows, settings)
    began = shown = kept = time.monotonic()
    done = step = 0
    model.train()
    while done < settings.tokens:
        now = time.monotonic()
        progress = done / settings.tokens
        if minutes is not None:
            progress = max(progress, (now - began) / (60 * minutes))
            if progress >= 1:
                break
        batch = course.draw(progress)
        loss, accuracy = _loss(model, batch, settings)
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for optimizer, peak in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step + 1) / 100, 2.1 - 2 * progress)
            optimizer.step()
        if accuracy is not None:
            course.learn(accuracy)
        step += 1
        done += sum(len(row.ids) for row in batch)
        if now - shown > 30:
            shown = now
            spent = f"{done / 1e6:.2f} M tokens, {now - began:.0f} s"
            print(f"{spent}: {course}, loss {loss.item():.2f}", file=sys.stderr, flush=True)
        if now - kept > 300:
            kept = now
            keep()
    return done


def _loss(
    model: OPTForCausalLM | LlamaForCausalLM, batch: Sequence[Row], settings: Settings
) -> tuple[torch.Tensor, float | None]:
    """Return a batch's loss, and the share of right answers; None if there is none to give."""
    ids = torch.stack([row.ids for row in batch])
    is_answer = torch.stack([row.is_answer for row in batch])
    is_text = ~is_answer.any(1, keepdim=True).expand_as(is_answer)
    # Somewhere in the context, so that every position is learned.
    first = torch.randint(settings.context - ids.shape[1] + 1, (len(batch), 1))
    logits = model(input_ids=ids, position_ids=first + torch.arange(ids.shape[1])).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    loss = losses.new_zeros(())
    if is_text.any():
        loss = loss + settings.text_weight * losses[is_text[:, 1:]].mean()
    if not is_answer.any():
        return loss, None
    is_right = (logits.argmax(-1) == ids[:, 1:])[is_answer[:, 1:]]
    return loss + losses[is_answer[:, 1:]].mean(), is_right.float().mean().item()


@torch.inference_mode()
def right_answers(
    model: OPTForCausalLM | LlamaForCausalLM,
    tokenizer: TaskTokenizer,
    unseen: Rows,
    length: int,
    count: int,
) -> dict[str, float]:
    """Return the share of answers of tasks that are right in all of their tokens, by kind."""
    model.train(False)
    right: dict[str, list[bool]] = {kind.value: [] for kind in tasks.TaskKind}
    for number in range(count):
        seed = -1 - number  # training draws others
        filler, depth = unseen.window(length), (number + 0.5) / count
        made = tasks.needle(tokenizer, filler, length, depth, seed)
        for task in (made, tasks.extraction(tokenizer, length, seed)):
            ids = torch.tensor([task.token_ids])
            choices = model(ids).logits[0, :-1].argmax(-1)
            right[task.kind.value] += [
                bool(
                    (
                        choices[each.start - 1 : each.stop - 1] == ids[0, each.start : each.stop]
                    ).all()
                )
                for each in task.answers
            ]
    return {kind: sum(each) / len(each) for kind, each in right.items()}


# -- result -----------------------------------------------------------------------


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=base.HelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: seconds, and no use")
    parser.add_argument("--minutes", type=_above_zero, help="end the schedule after this time")
    parser.add_argument("--tokens", type=int, help="train on this many tokens; default: 12 M")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch threads")
    options = parser.parse_args()

    changed = {"seed": options.seed}
    if options.tokens is not None:
        changed["tokens"] = options.tokens
    settings = Settings(options.family, **{**(_SMOKE if options.smoke else {}), **changed})
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(settings.seed)
    began = time.monotonic()

    files, held_out = base.library_files(Path(sysconfig.get_paths()["stdlib"]))
    files = [path for path in files if "test" not in path.parts]
    random.Random(settings.seed).shuffle(files)
    texts = base.read_sources(files[: settings.most_files])
    made: Tokenizer = base.train_tokenizer(
        [*texts, *task_texts(settings.task_texts)], settings.vocabulary
    )
    model = make_model(settings)

    def keep() -> None:
        base.save(copy.deepcopy(model), made, options.out)  # it rounds what it saves

    keep()  # also what the tasks' tokenizer is loaded from
    tokenizer = TaskTokenizer.load(options.out)
    assert tokenizer is not None
    rows = Rows(tokenizer, base.encode(made, texts), settings)
    done = train(model, rows, settings, minutes=options.minutes, keep=keep)
    keep()
    unseen_texts = base.read_sources([path for each in base.EVALUATED for path in held_out[each]])
    unseen = Rows(tokenizer, base.encode(made, unseen_texts), settings)
    print(
        json.dumps(
            {
                "settings": asdict(settings),
                "python": platform.python_version(),
                "parameters": model.num_parameters(),
                "trained_tokens": done,
                "right_answers": {
                    length: right_answers(model, tokenizer, unseen, length, count=16)
                    for length in settings.evaluated_lengths
                },
                "seconds": time.monotonic() - began,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
