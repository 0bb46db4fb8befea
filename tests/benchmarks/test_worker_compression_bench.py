"""The benchmark of compressed stores on a tiny model: it measures what the formulas say."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import VOCABULARY, write_tiny

from benchmarks.compression import CHUNK, CPU, PREFIX, WINDOW, Reader, link_bytes
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.shapes import Encoding
from splitpoint_cli.bench.shared.passages import read_unseen
from worker_service.model.decoder import Decoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_tiny("llama", tmp_path_factory.mktemp("model"))
    return Decoder.load(folder, CPU, torch.bfloat16)


@torch.inference_mode()
def test_bytes_and_losses(model: Decoder) -> None:
    rng = random.Random(0)
    window = [rng.randrange(3, VOCABULARY) for _ in range(WINDOW)]
    losses = {}
    for encoding in Encoding:
        reader = Reader(model, encoding)
        try:
            losses[encoding] = (reader.restored(window, 0), reader.restored(window, 2 * CHUNK + 5))
            written, loaded, sent = link_bytes(reader, window)
        finally:
            reader.lanes.close()
        layout = reader.cache.layout
        kv, x = (
            layout.stored_kv_bytes_per_token_layer,
            layout.stored_activation_bytes_per_token_layer,
        )
        assert (written, loaded, sent) == (3 * (kv + x), 3 * kv, 2 * x)
    for whole, split in losses.values():
        # The last position of a window predicts nothing.
        assert len(whole) == len(split) == WINDOW - PREFIX - 1
    # Restoring what was stored natively changes nothing; the others are near and not equal.
    exact = losses[Encoding.NATIVE][0]
    plain = Reader(model, Encoding.NATIVE)
    computed = plain.compute(window, 0, WINDOW).log_softmax(-1)
    plain.lanes.close()
    targets = torch.tensor(window[PREFIX + 1 :]).unsqueeze(-1)
    wanted = -computed[PREFIX:-1].gather(-1, targets).squeeze(-1)
    torch.testing.assert_close(exact, wanted, rtol=0.05, atol=0.05)
    for encoding, allowed in ((Encoding.INT8, 0.1), (Encoding.INT4, 0.6)):
        for found in losses[encoding]:
            assert 0 < (found - exact).abs().mean() < allowed


def test_what_is_read_was_never_trained_on() -> None:
    tokenizer = Tokenizer.load(resolve_model(None))
    assert tokenizer is not None
    samples = list(read_unseen(tokenizer, 2, WINDOW))
    # Two packages that its training held out, two that never were in the library.
    assert [each.package for each in samples] == ["asyncio", "unittest", "_pytest", "hypothesis"]
    for sample in samples:
        assert [len(window) for window in sample.windows] == [WINDOW, WINDOW]
        assert len(set(sample.files)) == 2
        assert all(name.startswith(f"{sample.package}/") for name in sample.files)
