"""The whole stack against transformers: every family, split, residency and worker.

`make chaos` has every checkpoint, and every split with both residencies in all of them.
"""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from local_stack import LocalStack, StackShape, local_stack, prompt_of
from long_runs import scaled
from tiny_models import CASES, FAMILY_CASES, VOCABULARY, build_tiny, clear_prompt, write_tiny
from transformers import PreTrainedModel

from splitpoint.client.answers import Completion
from splitpoint.planning.plan import Residency

LENGTHS = (1, 15, 16, 17, 47, 64, 65, 130)
# Each answer crosses a border of chunks of 16.
NEW_TOKENS = scaled(18, chaos=64)

pytestmark = pytest.mark.scaled


async def greedy(
    stack: LocalStack, prompt: list[int], worker: str, split: int | None = None, **options: Any
) -> Completion:
    if split is not None:
        options["split"] = split
    return await stack.client.generate(
        prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker=worker, **options
    ).complete()


async def check_concurrent(stack: LocalStack, model: PreTrainedModel) -> None:
    prompts, wanted = zip(
        *(clear_prompt(model, length, NEW_TOKENS) for length in LENGTHS), strict=True
    )
    answers = await asyncio.gather(
        *(greedy(stack, prompt, str(i % 2)) for i, prompt in enumerate(prompts))
    )
    assert [list(answer.token_ids) for answer in answers] == list(wanted)
    # All of them again, each on the other worker, restored and split somewhere else.
    for residency in (Residency.RESIDENT, Residency.STREAMED):
        answers = await asyncio.gather(
            *(
                greedy(
                    stack,
                    prompt,
                    str((i + 1) % 2),
                    split=(0, 1, len(prompt) // 2, len(prompt))[i % 4],
                    residency=residency,
                )
                for i, prompt in enumerate(prompts)
            )
        )
        assert [list(answer.token_ids) for answer in answers] == list(wanted), residency
        assert [a.usage.cached_tokens for a in answers] == [len(p) - 1 for p in prompts]


async def check_restored(stack: LocalStack, model: PreTrainedModel, *, has_all_pairs: bool) -> None:
    """Worker 0 writes the prefix, worker 1 restores it at every split, alone and in one batch.

    `has_all_pairs`: every split with both residencies, instead of each with one.
    """
    prefix, answered = clear_prompt(model, 100, NEW_TOKENS)
    first = await greedy(stack, prefix, "0")
    assert list(first.token_ids) == answered
    # The second turn of a chat: prompt, answer, and more. Its prefix ends inside a chunk.
    prompt, wanted = clear_prompt(model, 9, NEW_TOKENS, before=[*prefix, *answered])
    cached = len(prefix) + NEW_TOKENS - 1
    cases = list(product((cached // 2, 0, 1, cached), (Residency.RESIDENT, Residency.STREAMED)))
    if not has_all_pairs:
        cases = cases[0:1] + cases[3:4] + cases[4:5] + cases[7:8]
    # Under salts of their own, or the first one's answer would be the next one's prefix.
    salts = [bytes([number]) for number in range(1, 1 + len(cases))]
    await asyncio.gather(*(greedy(stack, prefix, "0", cache_salt=salt) for salt in salts))

    async def check(split: int, residency: Residency, salt: bytes) -> None:
        answer = await greedy(stack, prompt, "1", split=split, residency=residency, cache_salt=salt)
        assert list(answer.token_ids) == wanted, (split, residency)
        assert answer.usage.cached_tokens == cached
        assert answer.plan is not None
        assert answer.plan.split_tokens == split
        assert answer.plan.residency is residency
        assert answer.worker == "1"

    salted = [(*case, salt) for case, salt in zip(cases, salts, strict=True)]
    for each in salted[:2]:
        await check(*each)
    await asyncio.gather(*(check(*each) for each in salted[2:]))


# Grouped queries, scaled rotations, shards, tied; windows below full layers, two rotations.
ALL_PAIRS = ("llama-3", "gemma3")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FAMILY_CASES else pytest.mark.chaos) for case in CASES],
)
async def test_every_checkpoint_through_the_stack(case: str, tmp_path: Path) -> None:
    """Restore each at every split; send all lengths side by side through some.

    `tests/worker/engine/test_worker_engine.py` runs all of them in batches of such lengths, and
    `tests/worker/pipeline/test_worker_restore.py` restores all of them at every split.
    """
    model, is_long = build_tiny(case), bool(scaled(0, chaos=1))
    async with local_stack(write_tiny(case, tmp_path / "m"), tmp_path) as stack:
        if case in ALL_PAIRS or (is_long and case in FAMILY_CASES):
            await check_concurrent(stack, model)
        await check_restored(stack, model, has_all_pairs=is_long or case in ALL_PAIRS)
        await stack.assert_clean()


async def test_logits_of_a_restored_prefix_are_within_1e_4(tmp_path: Path) -> None:
    """Log-probabilities of the top 20 at every position, against transformers'."""
    model = build_tiny("llama-3")
    async with local_stack(write_tiny("llama-3", tmp_path / "m"), tmp_path) as stack:
        prefix = prompt_of(90, 8, VOCABULARY)
        for split, residency in (
            (0, Residency.RESIDENT),
            (1, Residency.RESIDENT),
            (41, Residency.RESIDENT),
            (91, Residency.RESIDENT),
            (0, Residency.STREAMED),
            (41, Residency.STREAMED),
            (91, Residency.STREAMED),
        ):
            # Another prompt each time: the answer's own chunks are cached, too.
            await greedy(stack, prefix, "0")
            prompt = [
                *prefix,
                *prompt_of(5, 10 + split + 100 * (residency is Residency.STREAMED), VOCABULARY),
            ]
            answer = await greedy(stack, prompt, "1", split=split, residency=residency, logprobs=20)
            assert answer.usage.cached_tokens in (90, 91)  # a first token may agree by chance
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *answer.token_ids]])
                wanted = model(ids).logits[0].log_softmax(-1)
            for index, position in enumerate(answer.logprobs):
                row = wanted[len(prompt) - 1 + index]
                assert abs(position.chosen - row[answer.token_ids[index]].item()) < 1e-4
                for token_id, logprob in position.top:
                    assert abs(logprob - row[token_id].item()) < 1e-4
        await stack.assert_clean()


@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.STREAMED])
async def test_long_prompts_in_little_memory(tmp_path: Path, residency: Residency) -> None:
    """Streamed prefill beyond what the device could hold; resident where it just fits."""
    model = build_tiny("opt")
    shape = StackShape(device_memory_bytes=10 << 20, max_batched_tokens=32, max_batch_size=4)
    async with local_stack(write_tiny("opt", tmp_path / "m"), tmp_path, shape) as stack:
        prompts, wanted = zip(
            *(clear_prompt(model, length, NEW_TOKENS) for length in (400, 393, 386)), strict=True
        )
        answers = await asyncio.gather(
            *(greedy(stack, prompt, "0", residency=residency) for prompt in prompts)
        )
        assert [list(answer.token_ids) for answer in answers] == list(wanted)
        await stack.assert_clean()
