"""Structured output through real services: schemas, drafts, deaths of workers, resumed answers.

Random schemas on a tiny model (24, and 500 in `make chaos`), then the small model in processes
of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kept_fleet import KeptFleet, kept_fleet
from local_stack import LocalStack, StackShape, local_stack
from long_runs import scaled
from random_schemas import random_schema
from tiny_models import write_tiny

from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion, FinishReason, Tokens
from splitpoint.client.requests import GenerateOptions
from splitpoint.errors import InvalidArgument
from splitpoint.options.speculation import SpeculativeConfig
from splitpoint.speculation import DraftMethod

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
SCHEMAS = scaled(24, chaos=500)
OPEN_AT_ONCE = 48
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["module", "class", "function"]},
    },
    "required": ["name", "tags", "size", "kind"],
    "additionalProperties": False,
}


@pytest.mark.scaled
async def test_every_whole_answer_satisfies_its_schema(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "m", vocab_size=4096, eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(None) / name, folder / name)
    shape = StackShape(max_batch_size=32, speculation=SpeculativeConfig())
    sockets = tmp_path / "s"
    sockets.mkdir()
    async with local_stack(folder, sockets, shape) as stack:
        places = asyncio.Semaphore(OPEN_AT_ONCE)

        async def ask(seed: int) -> Completion:
            async with places:
                return await ask_for(stack, seed)

        answers = await asyncio.gather(*(ask(seed) for seed in range(SCHEMAS)))
        await stack.assert_clean()
    whole = 0
    for seed, answer in enumerate(answers):
        assert answer.finish_reason in (STOP, LENGTH)
        if answer.finish_reason is STOP:
            whole += 1
            jsonschema.validate(json.loads(answer.text), random_schema(seed))
    print("whole", whole, "of", SCHEMAS)
    assert whole > 0.7 * SCHEMAS
    assert sum(answer.usage.speculation.draft_token_count for answer in answers) > 0


async def ask_for(stack: LocalStack, seed: int) -> Completion:
    # Half of them with drafts from their own text.
    drafts: dict[str, Any] = {"speculate": DraftMethod.SUFFIX, "speculative_tokens": 3}
    return await stack.client.generate(
        f"{json.dumps(random_schema(seed))[:300]}\nanswer = ",
        json_schema=random_schema(seed),
        max_tokens=224,
        temperature=1.0,
        seed=seed,
        **(drafts if seed % 2 else {}),
    ).complete()


@pytest.fixture(scope="module")
def running() -> Iterator[KeptFleet]:
    with kept_fleet("--speculative-config", '{"method": "suffix"}') as stack:
        yield stack


def prompt_of(index: int) -> str:
    return f"# {index}\nimport json\n\nrecord = json.loads('''"


async def answers_of(client: AsyncClient, count: int, **more: Any) -> list[Completion]:
    return await asyncio.gather(
        *(
            client.generate(
                prompt_of(index),
                json_schema=PERSON,
                max_tokens=120,
                temperature=0.7 * (index % 2),
                seed=index,
                **more,
            ).complete()
            for index in range(count)
        )
    )


async def test_a_worker_that_dies_changes_no_answer(running: KeptFleet) -> None:
    async with AsyncClient(running.address) as client:
        wanted = await answers_of(client, 8)
        whole = [answer for answer in wanted if answer.finish_reason is STOP]
        assert len(whole) >= 4
        for answer in whole:
            jsonschema.validate(json.loads(answer.text), PERSON)
        tokens = 0

        async def watched(index: int) -> Completion:
            nonlocal tokens
            async for event in client.generate(
                prompt_of(index),
                json_schema=PERSON,
                max_tokens=120,
                temperature=0.7 * (index % 2),
                seed=index,
            ):
                if isinstance(event, Tokens):
                    tokens += len(event.token_ids)
                if isinstance(event, Completion):
                    return event
            raise AssertionError("no completion")

        tasks = [asyncio.create_task(watched(index)) for index in range(8)]
        while tokens < 40:
            assert not any(task.done() and task.exception() for task in tasks)
            await asyncio.sleep(0.01)
        await running.kill_busiest_worker(client)
        answers = await asyncio.gather(*tasks)
        assert [answer.token_ids for answer in answers] == [each.token_ids for each in wanted]
        assert [answer.text for answer in answers] == [each.text for each in wanted]
    running.until(lambda found: found.ready_count == 2)


async def test_kinds_and_their_errors(running: KeptFleet) -> None:
    async with AsyncClient(running.address) as client:
        asked: dict[str, GenerateOptions] = {
            "choice": {"choice": ["apples", "pears, ripe", "日本"]},
            "regex": {"regex": "[0-9]{2,4}-[a-f]{3}"},
            "grammar": {"grammar": 'start: "(" start ")" | /[0-9]/'},
            "object": {"json_object": True, "max_tokens": 60},
        }
        done = await asyncio.gather(
            *(client.generate("x = ", **each).complete() for each in asked.values())
        )
        answers = dict(zip(asked, done, strict=True))
        assert answers["choice"].text in ["apples", "pears, ripe", "日本"]
        assert answers["regex"].text.count("-") == 1
        assert answers["grammar"].finish_reason in (STOP, LENGTH)
        if answers["object"].finish_reason is STOP:
            assert isinstance(json.loads(answers["object"].text), dict)
        model = (await client.list_models())[0]
        assert model.has_structured_output
        wrong: tuple[tuple[GenerateOptions, str], ...] = (
            ({"regex": "a("}, "regex"),
            ({"json_schema": {"type": "objct"}}, "json_schema"),
            ({"grammar": "start: x"}, "grammar"),
        )
        for options, field in wrong:
            with pytest.raises(InvalidArgument) as refused:
                await client.generate("x", **options).complete()
            assert refused.value.field == f"sampling.structured_output.{field}"
