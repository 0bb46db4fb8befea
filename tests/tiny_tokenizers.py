"""Small tokenizers of the kinds that the supported families have, trained at import."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "def read(path):\n    with open(path) as file:\n        return file.read()\n",
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "naïve café, Straße, größer; 你好，世界; привет мир; 😀😃",
] * 20
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool call>", "日本"])  # not special: they are text
    return backend


def sentencepiece(*, metaspace: bool) -> tokenizers.Tokenizer:
    """Llama 2's form: ▁ for spaces, byte tokens for what the vocabulary lacks."""
    words = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained.train_from_iterator(CORPUS[:2], words)
    state = json.loads(trained.to_str())
    state["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    if metaspace:
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
    else:
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend
