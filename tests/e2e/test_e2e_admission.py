"""Store-on-second-use through the whole stack: one-shot prompts leave nothing behind."""

from __future__ import annotations

from pathlib import Path

from local_stack import LocalStack, StackShape, local_stack
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.client.answers import Completion
from splitpoint.planning.plan import Residency

SECOND_USE = StackShape(
    workers=1,
    store_arguments=("--admission", "second-use", "--eviction", "counter", "--evict-above", "0.9"),
)


async def ask(
    stack: LocalStack, prompt: list[int], residency: Residency = Residency.RESIDENT
) -> Completion:
    answer = await stack.client.generate(
        prompt, max_tokens=20, ignore_eos=True, residency=residency
    ).complete()
    await stack.assert_clean()
    return answer


async def test_what_is_asked_for_twice_is_stored_and_then_found(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    model = build_tiny("llama")
    (first, wanted), (other, other_wanted), (long, long_wanted) = (
        clear_prompt(model, length, 20, seed=seed) for length, seed in ((70, 1), (9, 2), (90, 3))
    )
    sockets = tmp_path / "s"
    sockets.mkdir()
    async with local_stack(folder, sockets, SECOND_USE) as stack:
        for prompt, tokens in ((first, wanted), (other, other_wanted)):
            answer = await ask(stack, prompt)
            assert list(answer.token_ids) == tokens
        stats = await stack.store_stats()
        assert stats.eviction_policy == "counter"
        assert (stats.sealed_slot_count, stats.sealed_chunk_count) == (0, 0)
        assert stats.unadmitted_chunk_count == 5 + 1  # with their tails

        answer = await ask(stack, first)
        assert list(answer.token_ids) == wanted
        assert answer.usage.cached_tokens == 0
        # All of the prompt was asked for before, so it is stored with its answer.
        stats = await stack.store_stats()
        assert stats.sealed_slot_count == 6  # 89 tokens of 16
        assert stats.unadmitted_chunk_count == 6

        answer = await ask(stack, first)
        assert list(answer.token_ids) == wanted
        assert answer.usage.cached_tokens == 69

        # A new ending to a stored beginning leaves nothing new behind.
        await ask(stack, [*first[:48], *other, *other, *other])
        assert (await stack.store_stats()).sealed_slot_count == 6

        answer = await ask(stack, long, Residency.STREAMED)
        assert list(answer.token_ids) == long_wanted
        stats = await stack.store_stats()
        assert stats.sealed_slot_count == 6 + 7  # streamed: stored whatever the filter says
