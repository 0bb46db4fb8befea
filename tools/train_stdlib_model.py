"""Train a small Llama on the source files of Python's standard library.

Reads only the running interpreter's own library; needs no network. Writes a
Hugging Face folder (config.json, safetensors, tokenizer.json) that Splitpoint
and transformers load. Knows nothing of serving.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

BOS, EOS = "<s>", "</s>"
# Never trained on: what is measured must be unseen.
HELD_OUT = ("asyncio", "unittest", "idlelib", "lib2to3", "tomllib", "wsgiref")
EVALUATED = ("asyncio", "unittest")
SKIPPED = ("site-packages", "__pycache__", "turtledemo")


@dataclass(frozen=True)
class Settings:
    """Sizes and schedule; the defaults are the bundled model's."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    mlp: int = 704
    vocabulary: int = 4096
    context: int = 4096
    tokens: int = 20_000_000
    tokens_per_step: int = 8192
    # Short sequences first: most of what is learned early is local.
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    peak_rate: float = 1.5e-3
    warmup: float = 0.02
    weight_decay: float = 0.1
    most_files: int = 0  # 0: all
    evaluated_length: int = 1024
    evaluated_tokens: int = 100_000
    seed: int = 0


SMOKE = Settings(
    layers=2,
    hidden=64,
    heads=2,
    mlp=128,
    vocabulary=512,
    context=256,
    tokens=40 * 512,
    tokens_per_step=512,
    lengths=(64, 128),
    peak_rate=5e-3,
    most_files=40,
    evaluated_length=128,
    evaluated_tokens=2048,
)


# -- data -------------------------------------------------------------------------


def library_files(root: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """(files to train on, held-out files by package), in a stable order."""
    train: list[Path] = []
    held_out: dict[str, list[Path]] = {name: [] for name in HELD_OUT}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(skipped in parts for skipped in SKIPPED):
            continue
        # Tests of a held-out package talk about it: they are held out, too.
        package = next((n for n in HELD_OUT if n in parts or f"test_{n}" in parts), None)
        if package is not None:
            if parts[0] == package:
                held_out[package].append(path)
            continue
        train.append(path)
    return train, held_out


def read_sources(files: Sequence[Path]) -> list[str]:
    """Read the texts that are UTF-8; a few test files are not, on purpose."""
    texts = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append(text)
    return texts


def choose_files(files: list[Path], settings: Settings, generator: random.Random) -> list[Path]:
    """Half of the tests, which would otherwise be most of the library; all else."""
    chosen = [path for path in files if "test" not in path.parts or generator.random() < 0.5]
    generator.shuffle(chosen)
    return chosen[: settings.most_files or None]


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE; a document starts with BOS, which every encoding adds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Return one stream of ids: BOS document EOS BOS document EOS ..."""
    end = tokenizer.token_to_id(EOS)
    assert end is not None
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        stream += encoding.ids
        stream.append(end)
    return torch.tensor(stream)


# -- training ---------------------------------------------------------------------


def make_model(settings: Settings, tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def learning_rate(settings: Settings, progress: float) -> float:
    """Linear warm-up, then a cosine down to a tenth; progress in [0, 1)."""
    if progress < settings.warmup:
        return settings.peak_rate * (progress + 1e-3) / (settings.warmup + 1e-3)
    done = (progress - settings.warmup) / (1 - settings.warmup)
    return settings.peak_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def batches(stream: torch.Tensor, settings: Settings) -> Iterator[tuple[float, torch.Tensor]]:
    """(progress, ids [rows, length]) of random windows, equal tokens in every step."""
    generator = torch.Generator().manual_seed(settings.seed)
    steps = settings.tokens // settings.tokens_per_step
    for step in range(steps):
        progress = step / steps
        length = settings.lengths[int(progress * len(settings.lengths))]
        length = min(length, len(stream) - 1)
        rows = max(1, settings.tokens_per_step // length)
        starts = torch.randint(len(stream) - length, (rows,), generator=generator)
        yield progress, torch.stack([stream[start : start + length] for start in starts])


def optimizer_for(model: LlamaForCausalLM, settings: Settings) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak_rate, betas=(0.9, 0.95))


def train(
    model: LlamaForCausalLM, stream: torch.Tensor, settings: Settings, *, autocast: bool
) -> tuple[float, float]:
    """Train in place; returns (first loss, mean of the last tenth)."""
    optimizer = optimizer_for(model, settings)
    losses: list[float] = []
    began = shown = time.monotonic()
    model.train()
    for progress, ids in batches(stream, settings):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, progress)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{progress:6.1%}  loss {losses[-1]:.3f}  {shown - began:.0f} s", file=sys.stderr)
    last = losses[-max(1, len(losses) // 10) :]
    return losses[0], sum(last) / len(last)


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, stream: torch.Tensor, settings: Settings) -> float:
    """Over non-overlapping windows, each starting without context."""
    model.train(False)
    length = min(settings.evaluated_length, len(stream))
    total, count = 0.0, 0
    limit = min(len(stream), settings.evaluated_tokens)
    for start in range(0, limit - length + 1, length):
        ids = stream[start : start + length][None]
        total += model(input_ids=ids, labels=ids).loss.item() * (length - 1)
        count += length - 1
    return math.exp(total / count)


# -- result -----------------------------------------------------------------------


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers' Auto classes and Splitpoint load; weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    module: torch.nn.Module = model
    module.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: seconds, and no use")
    parser.add_argument("--tokens", type=int, help="train on this many tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 matmuls (AMX, AVX-512)")
    options = parser.parse_args()

    base = asdict(SMOKE if options.smoke else Settings())
    settings = Settings(
        **{**base, "seed": options.seed, "tokens": options.tokens or base["tokens"]}
    )
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(settings.seed)
    began = time.monotonic()

    root = Path(sysconfig.get_paths()["stdlib"])
    files, held_out = library_files(root)
    texts = read_sources(choose_files(files, settings, random.Random(settings.seed)))
    tokenizer = train_tokenizer(texts, settings.vocabulary)
    stream = encode(tokenizer, texts)
    model = make_model(settings, tokenizer)
    print(
        f"{len(texts):,} files, {len(stream):,} tokens, {model.num_parameters():,} parameters",
        file=sys.stderr,
    )
    first_loss, last_loss = train(model, stream, settings, autocast=options.autocast)
    measured = {
        package: perplexity(model, encode(tokenizer, read_sources(held_out[package])), settings)
        for package in EVALUATED
    }
    save(model, tokenizer, options.out)
    print(
        json.dumps(
            {
                "settings": asdict(settings),
                "python": platform.python_version(),
                "training_tokens_available": len(stream),
                "first_loss": first_loss,
                "last_loss": last_loss,
                "held_out_perplexity": measured,
                "seconds": time.monotonic() - began,
            }
        )
    )
    return 0


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())
