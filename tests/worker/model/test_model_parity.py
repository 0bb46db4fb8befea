"""Logits equal transformers', for every family and setting, in prefill and decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import PagedRunner
from tiny_models import CASES, VOCABULARY, build_tiny, write_tiny

from worker_service.model.decoder import Decoder
from worker_service.weights.matrices import weight_sizes

CPU = torch.device("cpu")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {case: write_tiny(case, root / case) for case in CASES}


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator).tolist()


def scattered(count: int) -> list[int]:
    """Page numbers far apart and out of order, so that they must be gathered."""
    return [(7 * page) % count * 3 for page in range(count)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["contiguous", "scattered"])
def test_prefill_and_decode_logits(case: str, order: str, folders: dict[str, Path]) -> None:
    """Two sequences of different lengths: chunked prefill, then batched decode."""
    reference = build_tiny(case)
    model = Decoder.load(folders[case], CPU)
    runner = PagedRunner(model, list(range(32)) if order == "contiguous" else scattered(32))
    texts = [tokens(60, seed=1), tokens(45, seed=2)]
    cuts = [(21, 47), (13, 13)]  # end of the first prefill chunk, of the whole prefill
    with torch.inference_mode():
        wanted = [reference(torch.tensor([text])).logits[0] for text in texts]
    page_tables: list[list[int]] = [[], []]
    for text, pages, (cut, end), logits in zip(texts, page_tables, cuts, wanted, strict=True):
        got = runner.prefill(text[:cut], pages, 0)
        if end > cut:
            got = torch.cat((got, runner.prefill(text[cut:end], pages, cut)))
        torch.testing.assert_close(got, logits[:end], atol=TOLERANCE, rtol=0)
    for step in range(13):
        at = [end + step for _, end in cuts]
        got = runner.decode(
            [text[position] for text, position in zip(texts, at, strict=True)], page_tables, at
        )
        expected = torch.stack([logits[p] for logits, p in zip(wanted, at, strict=True)])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["opt", "llama-3"])
def test_a_lower_context_changes_no_logit(case: str, folders: dict[str, Path]) -> None:
    """Neither a table of positions nor scaled rotary positions depend on --max-model-len."""
    text = tokens(20, seed=6)
    whole, lowered = (
        Decoder.load(folders[case], CPU, context_length=length) for length in (None, 20)
    )
    assert lowered.shape.context_length == 20 < whole.shape.context_length
    got, wanted = (PagedRunner(each, [0, 1, 2]).prefill(text, [], 0) for each in (lowered, whole))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("case", CASES)
def test_keys_and_values_rebuilt_from_activations(case: str, folders: dict[str, Path]) -> None:
    """K and V from the stored X equal those of the prefill (KVPR Eq. 7), at any cut."""
    model = Decoder.load(folders[case], CPU)
    runner = PagedRunner(model, list(range(16)))
    pages: list[int] = []
    runner.prefill(tokens(40, seed=3), pages, 0)
    with torch.inference_mode():
        for index, layer in enumerate(model.layers):
            inputs = runner.inputs[index][0]
            for first, last in ((0, 1), (0, 40), (16, 33)):
                keys, values = layer.project_kv(
                    inputs[first:last], model.rotary(torch.arange(first, last))
                )
                rows = torch.arange(first, last)
                at = torch.tensor(pages)[rows // 8], slice(None), rows % 8
                for pool, rebuilt in ((runner.keys, keys), (runner.values, values)):
                    torch.testing.assert_close(rebuilt, pool[index][at], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["opt", "llama-3", "qwen3", "gemma2", "gemma3"])
def test_half_precision_stays_near(case: str, dtype: torch.dtype, folders: dict[str, Path]) -> None:
    """Half precision is not exact, but as near to the model as transformers' own is."""
    text = tokens(40, seed=4)
    with torch.inference_mode():
        wanted = build_tiny(case)(torch.tensor([text])).logits[0]
        theirs = build_tiny(case).type(dtype)(torch.tensor([text])).logits[0]
    runner = PagedRunner(Decoder.load(folders[case], CPU, dtype), list(range(16)))
    pages: list[int] = []
    got = [runner.prefill(text[:30], pages, 0)]
    got += [runner.decode([text[at]], [pages], [at]) for at in range(30, 40)]
    # Which rounding comes of it is the processor's: the peer runs on the same one.
    assert (torch.cat(got) - wanted).norm() < 1.25 * (theirs - wanted).norm()
    assert torch.cat(got).dtype == torch.float32


def test_weight_bytes_are_counted(folders: dict[str, Path]) -> None:
    for case in CASES:
        model = Decoder.load(folders[case], CPU)
        parameters = sum(p.numel() for p in build_tiny(case).parameters())
        assert model.weight_bytes == weight_sizes(model.config, CPU, torch.float32).total
        half = Decoder.load(folders[case], CPU, torch.bfloat16)
        assert half.weight_bytes == weight_sizes(half.config, CPU, torch.bfloat16).total
        # As held: tied embeddings twice, and matrices in whole blocks.
        assert 4 * parameters <= model.weight_bytes <= 6 * parameters
