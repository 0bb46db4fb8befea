"""Distil a small draft model from the bundled one, on the same standard library.

The student has the teacher's vocabulary and tokenizer and two of its layers, with narrow MLPs. It
starts from the teacher's embeddings, attention and strongest MLP neurons, and learns the teacher's
distributions. Knows nothing of serving; the data and the schedule are train_stdlib_model's.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tools import train_stdlib_model as base

# Chooses between checkpoints; the other held-out package is only ever reported.
CHOSEN_BY, REPORTED = "unittest", "asyncio"


@dataclass(frozen=True)
class Distillation:
    """Sizes and schedule; the defaults are the shipped companion's."""

    layers: tuple[int, ...] = (0, 3)  # the teacher's, copied into the student in this order
    mlp: int = 176
    tokens: int = 12_000_000
    # The schedule ends here, if the tokens do not end before; time in which the process was
    # stopped does not count.
    minutes: float | None = None
    tokens_per_step: int = 2048
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    peak_rate: float = 2e-3
    # KL to the teacher's distribution, plus this much cross entropy to its greedy choice: what is
    # accepted when both choose greedily.
    greedy_weight: float = 0.3
    most_files: int = 0  # 0: all
    evaluated_length: int = 1024
    checked_tokens: int = 8192
    evaluated_tokens: int = 65_536
    check_seconds: float = 240.0
    seed: int = 0


# A step that took longer was interrupted.
_LONGEST_STEP_SECONDS = 20.0

SMOKE = Distillation(
    layers=(0, 1),
    mlp=32,
    tokens=40 * 256,
    tokens_per_step=256,
    lengths=(64, 128),
    most_files=40,
    evaluated_length=128,
    checked_tokens=1024,
    evaluated_tokens=2048,
)


# -- the student ------------------------------------------------------------------


def make_student(teacher: LlamaForCausalLM, settings: Distillation) -> LlamaForCausalLM:
    """Build the student from the teacher's embeddings, norms, attention and strongest neurons."""
    config = type(teacher.config)(**teacher.config.to_dict())
    config.num_hidden_layers = len(settings.layers)
    config.intermediate_size = settings.mlp
    student = LlamaForCausalLM(config)
    with torch.no_grad():
        student.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight)
        student.model.norm.weight.copy_(teacher.model.norm.weight)
        for layer, number in zip(student.model.layers, settings.layers, strict=True):
            _copy_layer(layer, teacher.model.layers[number], settings.mlp)
    return student


def _copy_layer(layer: Any, source: Any, neurons: int) -> None:
    """Copy a layer; of its MLP the neurons whose three weight vectors are longest."""
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn"):
        getattr(layer, name).load_state_dict(getattr(source, name).state_dict())
    gate, up, down = source.mlp.gate_proj, source.mlp.up_proj, source.mlp.down_proj
    strength = gate.weight.norm(dim=1) * up.weight.norm(dim=1) * down.weight.norm(dim=0)
    chosen = strength.topk(neurons).indices
    layer.mlp.gate_proj.weight.copy_(gate.weight[chosen])
    layer.mlp.up_proj.weight.copy_(up.weight[chosen])
    layer.mlp.down_proj.weight.copy_(down.weight[:, chosen])


# -- training ---------------------------------------------------------------------


def windows(stream: torch.Tensor, settings: Distillation) -> Iterator[tuple[float, torch.Tensor]]:
    """(progress, ids [rows, length]) of random windows, until the tokens or the minutes end."""
    generator = torch.Generator().manual_seed(settings.seed)
    steps = settings.tokens // settings.tokens_per_step
    seconds, last = 0.0, time.monotonic()
    for step in range(steps):
        now = time.monotonic()
        seconds, last = seconds + min(now - last, _LONGEST_STEP_SECONDS), now
        progress = step / steps
        if settings.minutes is not None:
            progress = max(progress, seconds / (60 * settings.minutes))
        if progress >= 1:
            return
        length = settings.lengths[int(progress * len(settings.lengths))]
        length = min(length, len(stream) - 1)
        rows = max(1, settings.tokens_per_step // length)
        starts = torch.randint(len(stream) - length, (rows,), generator=generator)
        yield progress, torch.stack([stream[start : start + length] for start in starts])


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, greedy_weight: float
) -> torch.Tensor:
    """Mean over rows of KL(teacher | student) and the cross entropy to the teacher's choice.

    Both logits [rows, vocabulary].
    """
    predicted = F.log_softmax(student.float(), dim=-1)
    wanted = F.log_softmax(teacher.float(), dim=-1)
    distance = F.kl_div(predicted, wanted, reduction="batchmean", log_target=True)
    return distance + greedy_weight * F.nll_loss(predicted, teacher.argmax(dim=-1))


class Best:
    """The student that agreed most with the teacher so far, written to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agreement = -1.0

    def offer(self, student: LlamaForCausalLM, agreement: float) -> None:
        """Write the student if it agrees more than what is there."""
        if agreement > self.agreement:
            self.agreement = agreement
            # A copy: what is written is bfloat16, what is trained stays float32.
            copied = LlamaForCausalLM(student.config)
            copied.load_state_dict(student.state_dict())
            module: torch.nn.Module = copied
            module.to(torch.bfloat16)
            copied.save_pretrained(self.folder)


def distil(
    student: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    stream: torch.Tensor,
    checked: torch.Tensor,
    settings: Distillation,
    best: Best,
    *,
    autocast: bool,
) -> tuple[float, float, int]:
    """Train the student in place; (first loss, mean of the last tenth, tokens seen)."""
    schedule = replace(base.Settings(), peak_rate=settings.peak_rate)
    optimizer = base.optimizer_for(student, schedule)
    quick = copy.deepcopy(teacher)
    if autocast:
        module: torch.nn.Module = quick
        module.to(torch.bfloat16)
    losses: list[float] = []
    tokens = 0
    began = looked = time.monotonic()
    for progress, ids in windows(stream, settings):
        student.train()
        for group in optimizer.param_groups:
            group["lr"] = base.learning_rate(schedule, progress)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with torch.no_grad():
                wanted = quick(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            predicted = student(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        loss = distillation_loss(predicted, wanted, settings.greedy_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        tokens += ids.numel()
        if time.monotonic() - looked > settings.check_seconds:
            looked = time.monotonic()
            agreed = agreement(student, teacher, checked, settings, settings.checked_tokens)
            best.offer(student, agreed)
            _show(progress, tokens, losses[-1], agreed, looked - began)
    best.offer(student, agreement(student, teacher, checked, settings, settings.checked_tokens))
    last = losses[-max(1, len(losses) // 10) :]
    return losses[0], sum(last) / len(last), tokens


def _show(progress: float, tokens: int, loss: float, agreed: float, seconds: float) -> None:
    print(
        f"{progress:6.1%}  {tokens:,} tokens  loss {loss:.3f}  agreement {agreed:.3f}"
        f"  {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


@torch.inference_mode()
def agreement(
    student: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    stream: torch.Tensor,
    settings: Distillation,
    most_tokens: int,
) -> float:
    """Share of positions at which both choose the same token greedily, in float32.

    Over windows of the evaluated length that do not overlap.
    """
    student.train(False)
    length = min(settings.evaluated_length, len(stream))
    equal = count = 0
    for start in range(0, min(len(stream), most_tokens) - length + 1, length):
        ids = stream[start : start + length][None]
        chosen = student(input_ids=ids, use_cache=False).logits.argmax(dim=-1)
        wanted = teacher(input_ids=ids, use_cache=False).logits.argmax(dim=-1)
        equal += int((chosen == wanted).sum())
        count += length
    return equal / count


# -- from files to files ----------------------------------------------------------


def held_out_stream(
    tokenizer: Tokenizer, held_out: dict[str, list[Path]], name: str
) -> torch.Tensor:
    """Return the ids of a held-out package's files, one document after another."""
    return base.encode(tokenizer, base.read_sources(held_out[name]))


def run(
    teacher_folder: Path,
    out: Path,
    settings: Distillation,
    *,
    autocast: bool,
    student_folder: Path | None = None,
) -> dict[str, object]:
    """Distil a student, or an earlier one further, into the folder; return the final report."""
    began = time.monotonic()
    torch.manual_seed(settings.seed)
    teacher = LlamaForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32)
    teacher.train(False)
    tokenizer = Tokenizer.from_file(str(teacher_folder / "tokenizer.json"))
    files, held_out = base.library_files(Path(sysconfig.get_paths()["stdlib"]))
    chosen_files = base.choose_files(
        files,
        replace(base.Settings(), most_files=settings.most_files),
        random.Random(settings.seed),
    )
    stream = base.encode(tokenizer, base.read_sources(chosen_files))
    checked = held_out_stream(tokenizer, held_out, CHOSEN_BY)
    student = (
        make_student(teacher, settings)
        if student_folder is None
        else LlamaForCausalLM.from_pretrained(student_folder, dtype=torch.float32)
    )
    print(f"{len(stream):,} tokens, {student.num_parameters():,} parameters", file=sys.stderr)

    out.mkdir(parents=True, exist_ok=True)
    best = Best(out)
    before = agreement(student, teacher, checked, settings, settings.checked_tokens)
    best.offer(student, before)
    first, last, tokens = distil(
        student, teacher, stream, checked, settings, best, autocast=autocast
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(teacher_folder / name, out / name)
    shipped = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    return {
        "settings": asdict(settings),
        "python": platform.python_version(),
        "trained_tokens": tokens,
        "first_loss": first,
        "last_loss": last,
        "agreement_before": before,
        "agreement": {
            name: agreement(
                shipped,
                teacher,
                held_out_stream(tokenizer, held_out, name),
                settings,
                settings.evaluated_tokens,
            )
            for name in (REPORTED, CHOSEN_BY)
        },
        "seconds": time.monotonic() - began,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=base.HelpFormatter)
    parser.add_argument("--teacher", type=Path, default=Path("models/stdlib-llama"))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--student", type=Path, help="train this one further")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: seconds, and no use")
    parser.add_argument("--layers", type=int, nargs="+", help="the teacher's layers to start from")
    parser.add_argument("--tokens", type=int, help="train on this many tokens")
    parser.add_argument("--rate", type=float, help="the highest learning rate")
    parser.add_argument("--minutes", type=float, help="or for this long, if that ends before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 matmuls (AMX, AVX-512)")
    options = parser.parse_args(arguments)
    settings = replace(SMOKE if options.smoke else Distillation(), seed=options.seed)
    if options.layers:
        settings = replace(settings, layers=tuple(options.layers))
    if options.tokens:
        settings = replace(settings, tokens=options.tokens)
    if options.rate:
        settings = replace(settings, peak_rate=options.rate)
    if options.minutes:
        settings = replace(settings, minutes=options.minutes)
    if options.threads:
        torch.set_num_threads(options.threads)
    report = run(
        options.teacher,
        options.out,
        settings,
        autocast=options.autocast,
        student_folder=options.student,
    )
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
