"""Drafts change no text: every method, greedy and sampled, through the deaths of processes.

One stack of real processes for all tests.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import SECONDS
from kept_fleet import KeptFleet, kept_fleet
from long_runs import scaled
from safetensors.torch import load_file, save_file
from small_model import small_model

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion, Tokens
from splitpoint.client.requests import GenerateOptions
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import ReasonKind, Residency
from splitpoint.speculation import DraftMethod

AUTO, SELF, SUFFIX, MODEL = (
    DraftMethod.AUTO,
    DraftMethod.SELF,
    DraftMethod.SUFFIX,
    DraftMethod.MODEL,
)
TOKENS = scaled(32, chaos=64)
# Long enough to be killed in the middle.
LONG = scaled(96, chaos=160)
BODY = "        self._loop.call_soon(callback, *args)\n        return self._waiter\n\n"
PROMPTS = [
    f"class Transport{index}:\n    def method_{index}(self, callback, *args):\n{BODY * (2 + index)}"
    f"    def method_{index + 1}(self,"
    for index in range(8)
]
# Each method with each number of tokens, and in turn both residencies, greedy and sampled.
CASES = [
    (method, count, residency, is_sampled)
    for which, method in enumerate((SELF, SUFFIX, MODEL, AUTO))
    for number, count in enumerate((0, 1, 3, 8))
    for residency in [list(Residency)[(which + number) % 2]]
    for is_sampled in [(which + number // 2) % 2 == 1]
]


pytestmark = pytest.mark.scaled


def like(model: Path, folder: Path) -> Path:
    """Write a model that often chooses as this one does, not always; return its folder."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for tensor in weights.values():
        tensor *= 1 + 0.03 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptFleet]:
    draft = like(small_model(), tmp_path_factory.mktemp("models") / "draft")
    config = {"method": "auto", "model": str(draft)}
    with kept_fleet(
        *("--speculative-config", json.dumps(config), "--device-memory", "256MiB"),
        store_options=("--host-memory", "128MiB"),
    ) as running:
        yield running


class Count:
    """Tokens of all requests of a test, and an event at `wanted`."""

    def __init__(self, wanted: int) -> None:
        self._left = wanted
        self.reached = asyncio.Event()

    def add(self, tokens: int) -> None:
        self._left -= tokens
        if self._left <= 0:
            self.reached.set()


async def ask(
    client: AsyncClient, index: int, *, is_sampled: bool, count: Count | None = None, **more: Any
) -> Completion:
    options: GenerateOptions = {"max_tokens": TOKENS, "ignore_eos": True, **more}  # type: ignore[typeddict-item]
    if is_sampled:
        options |= {"temperature": 0.8, "seed": 40 + index}
    async for event in client.generate(PROMPTS[index], **options):
        if isinstance(event, Tokens) and count is not None:
            count.add(len(event.token_ids))
        if isinstance(event, Completion):
            return event
    raise AssertionError("the stream ended without its completion")


async def ask_all(client: AsyncClient, count: int = len(PROMPTS), **more: Any) -> list[Completion]:
    """Ask for the first `count` prompts at once."""
    return await asyncio.gather(*(ask(client, index, **more) for index in range(count)))


async def plain_texts(address: str, *, is_sampled: bool) -> list[tuple[int, ...]]:
    async with AsyncClient(address) as client:
        answers = await ask_all(
            client, is_sampled=is_sampled, speculate=DraftMethod.OFF, max_tokens=LONG
        )
    assert all(answer.usage.speculation.draft_token_count == 0 for answer in answers)
    return [answer.token_ids for answer in answers]


# By whether they are sampled, LONG tokens for each prompt; shorter answers are their beginnings.
Texts = dict[bool, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def plain(stack: KeptFleet) -> Texts:
    """What plain decoding gives."""
    texts = {
        is_sampled: asyncio.run(plain_texts(stack.address, is_sampled=is_sampled))
        for is_sampled in (False, True)
    }
    assert texts[False] != texts[True]
    return texts


async def test_every_method_and_number_gives_the_text_of_plain_decoding(
    stack: KeptFleet, plain: Texts
) -> None:
    asked = scaled(4, chaos=len(PROMPTS))
    wanted = {key: [text[:TOKENS] for text in texts[:asked]] for key, texts in plain.items()}
    async with AsyncClient(stack.address) as client:
        accepted = dict.fromkeys((SELF, SUFFIX, MODEL, AUTO), 0)
        drafted = dict(accepted)
        for method, number, residency, is_sampled in CASES:
            answers = await ask_all(
                client,
                asked,
                is_sampled=is_sampled,
                residency=residency,
                speculate=method,
                speculative_tokens=number,
            )
            case = (method, number, residency, is_sampled)
            assert [answer.token_ids for answer in answers] == wanted[is_sampled], case
            for answer in answers:
                used, plan = answer.usage.speculation, answer.plan
                assert plan is not None
                assert plan.residency is residency
                assert used.accepted_token_count <= used.draft_token_count
                assert used.draft_token_count <= number * used.draft_count
                assert used.draft_token_count == 0 or ReasonKind.DRAFTED in dict(plan.reasons)
                assert number > 0 or used.method is DraftMethod.OFF
                accepted[method] += used.accepted_token_count
                drafted[method] += used.draft_token_count
        # AUTO drafts where measured times say that it pays.
        assert all(accepted[method] for method in (SELF, SUFFIX, MODEL)), accepted
        assert all(accepted[method] < drafted[method] for method in (SUFFIX, MODEL)), drafted


async def test_an_end_inside_a_draft_counts_no_token_behind_it(
    stack: KeptFleet, plain: Texts
) -> None:
    """Stop at different tokens of a text: most of the ends fall inside a draft of 8."""
    async with AsyncClient(stack.address) as client:
        accepted = 0
        for index, text in enumerate(plain[False]):
            place = text.index(text[12 + index])
            answer = await ask(
                client,
                index,
                is_sampled=False,
                stop_token_ids=[text[place]],
                speculate=SUFFIX,
                speculative_tokens=8,
            )
            assert answer.token_ids == text[: place + 1]
            assert answer.usage.completion_tokens == place + 1
            used = answer.usage.speculation
            # Each draft but the last one was followed by a token of the model.
            assert used.accepted_token_count + used.draft_count - 1 <= place + 1
            accepted += used.accepted_token_count
        assert accepted > 0


async def test_a_request_that_asks_for_nothing_gets_what_is_configured(stack: KeptFleet) -> None:
    async with AsyncClient(stack.address) as client:
        answers = await ask_all(client, is_sampled=False)
        for answer in answers:
            used, plan = answer.usage.speculation, answer.plan
            assert plan is not None
            assert used.draft_token_count or ReasonKind.NO_DRAFTS in dict(plan.reasons)
        [model] = await client.list_models()
        assert set(model.draft_methods) == {SELF, SUFFIX, MODEL}
        for worker in await client.list_workers():
            assert worker.speculation is not None
            assert worker.speculation.defaults.method is AUTO
            assert worker.speculation.draft_model == "draft"
        with pytest.raises(InvalidArgument) as caught:
            await ask(client, 0, is_sampled=False, speculative_tokens=33)
        assert caught.value.field == "speculation.num_speculative_tokens"


@pytest.mark.parametrize("residency", list(Residency))
@pytest.mark.parametrize("victim", ["worker_service", "kvstore_service"])
async def test_the_text_survives_a_kill_in_the_middle(
    stack: KeptFleet, plain: Texts, victim: str, residency: Residency
) -> None:
    stack.until(lambda found: found.ready_count == 2)
    methods = (SUFFIX, SELF, MODEL, AUTO)
    async with AsyncClient(stack.address) as client:
        before = await client.scheduler_status()
        count = Count(LONG)
        running = [
            asyncio.create_task(
                ask(
                    client,
                    index,
                    is_sampled=index % 2 == 1,
                    count=count,
                    speculate=methods[index // 2],
                    speculative_tokens=4,
                    residency=residency,
                    max_tokens=LONG,
                )
            )
            for index in range(len(PROMPTS))
        ]
        await asyncio.wait_for(count.reached.wait(), SECONDS)
        assert not all(task.done() for task in running)
        if victim == "worker_service":
            await stack.kill_busiest_worker(client)
        else:
            stack.kill_store()
        answers = await asyncio.wait_for(asyncio.gather(*running), 2 * SECONDS)
        for index, answer in enumerate(answers):
            assert answer.token_ids == plain[index % 2 == 1][index]
        assert any(answer.usage.speculation.accepted_token_count for answer in answers)
        if victim == "worker_service":
            after = await client.scheduler_status()
            assert after.failover_count > before.failover_count
