"""splitpoint.LLM: a model in this process answers as a stack does, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from small_model import small_model
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint import LLM, SamplingParams
from splitpoint.arena.files import ArenaLost
from splitpoint.client.answers import FinishReason
from splitpoint.client.requests import Prompt
from splitpoint.config import SHARED_MEMORY
from splitpoint.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from splitpoint.planning.plan import Residency
from splitpoint_offline.options import DECLARED, EngineOptions

SMALL = {"device": "cpu", "host_memory": "64MiB", "device_memory": "256MiB", "threads": 1}
PREFIX = '"""Read and write files."""\n\nimport os\nimport sys\n\n\n' * 8


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sizes = {"host_memory": "64MiB", "device_memory": 256 << 20, "threads": 1}
    with LLM(small_model(), device="cpu", **sizes) as model:  # type: ignore[arg-type]
        yield model


def test_answers_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    write_tiny("llama", folder)
    model = build_tiny("llama")
    prompts, wanted = zip(
        *(clear_prompt(model, length, 32) for length in (1, 17, 65, 130)), strict=True
    )
    options = {"max_tokens": 32, "ignore_eos": True}
    with LLM(folder, page_tokens=16, dtype="float32", **SMALL) as llm:  # type: ignore[arg-type]
        results = llm.generate(prompts, options)
        again = llm.generate(prompts[3], {**options, "residency": "streamed"})[0]
    assert [list(result.token_ids) for result in results] == list(wanted)
    assert [result.prompt for result in results] == list(prompts)
    # The same store: the second time the prompt comes from the arena, layer by layer.
    assert list(again.token_ids) == wanted[3]
    assert again.usage.cached_tokens == 129
    assert again.plan is not None
    assert again.plan.residency is Residency.STREAMED


def test_a_result_has_text_logprobs_usage_and_plan(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)
    first = llm.generate(PREFIX + "def first(", params)[0]
    assert first.text
    assert len(first.token_ids) == len(first.logprobs) == 6
    assert [len(each.top) for each in first.logprobs] == [2] * 6
    assert first.finish_reason is FinishReason.LENGTH
    assert first.plan is not None
    assert "nothing is cached" in first.plan.reason
    second = llm.generate(PREFIX + "def second(", params)[0]
    assert second.usage.cached_tokens >= 64
    assert second.plan is not None
    assert "nothing is cached" not in second.plan.reason


def test_several_prompts_run_in_one_batch_and_come_in_order(llm: LLM) -> None:
    # More than the scheduler is given at a time: four for each place in the batch.
    prompts = [f"def function_{index}(value):\n    return" for index in range(140)]
    params = {"max_tokens": 4, "ignore_eos": True}
    results = llm.generate(prompts, params)
    assert [result.prompt for result in results] == prompts
    # Each as alone: the bits of an answer do not depend on what runs beside it.
    for index in (0, 70, 139):
        assert llm.generate(prompts[index], params)[0].token_ids == results[index].token_ids


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    prompts: list[Prompt] = ["def a(", [5, 6, 7]]
    results = llm.generate(
        prompts, [{"max_tokens": 1}, SamplingParams(max_tokens=3, ignore_eos=True)]
    )
    assert [len(result.token_ids) for result in results] == [1, 3]
    assert results[1].prompt == [5, 6, 7]


def test_n_answers_have_seeds_in_a_row(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)
    answers = llm.generate("import", params)[0].completions
    assert [answer.seed for answer in answers] == [11, 12, 13]
    assert len({answer.token_ids for answer in answers}) == 3
    alone = SamplingParams(temperature=1.5, seed=12, max_tokens=12, ignore_eos=True)
    assert llm.generate("import", alone)[0].token_ids == answers[1].token_ids


def test_a_prompt_that_is_refused_leaves_the_others(llm: LLM) -> None:
    prompts: list[Prompt] = ["def f(", [7] * 5000, ""]
    good, long, empty = llm.generate(prompts, {"max_tokens": 2})
    assert good.error is None
    assert len(good.token_ids) == 2
    assert isinstance(long.error, InvalidArgument)
    assert "4,096" in long.error.message
    assert isinstance(empty.error, InvalidArgument)
    with pytest.raises(InvalidArgument, match="4,096"):
        _ = long.text


def test_chats_are_those_of_the_template(llm: LLM) -> None:
    turn = [{"role": "user", "content": "def reverse(items):"}]
    other = [{"role": "system", "content": "Short."}, *turn]
    params = {"max_tokens": 8, "ignore_eos": True}
    results = llm.chat([turn, other, [{"content": "x"}]], params)
    assert [result.prompt for result in results[:2]] == [turn, other]
    for result, messages in zip(results, (turn, other), strict=False):
        ids = llm.tokenize(messages=messages).token_ids
        assert result.usage.prompt_tokens == len(ids)
        assert llm.generate(list(ids), params)[0].token_ids == result.token_ids
    assert isinstance(results[2].error, InvalidArgument)
    (alone,) = llm.chat(turn, params)
    assert alone.token_ids == results[0].token_ids
    begun = [*turn, {"role": "assistant", "content": "    return items["}]
    (going_on,) = llm.chat(begun, params, continue_final_message=True)
    assert going_on.usage.prompt_tokens > results[0].usage.prompt_tokens
    with pytest.raises(TypeError, match="conversations must be"):
        llm.chat("hello", params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([object()],), "prompt"),
        ((5,), "prompts must be"),
        ((["a"], {"max_token": 3}), "max_token"),
        ((["a"], {"max_tokens": "3"}), "max_tokens must be an int"),
        ((["a"], {"request_id": "x"}), "request_id"),
        ((["a"], 7), "sampling_params"),
        ((["a"], {"n": True}), "n must be an int"),
    ],
)
def test_wrong_types_are_errors_of_the_call(
    llm: LLM, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(*arguments)  # type: ignore[arg-type]


def test_wrong_numbers_of_parameters_are_an_error(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"2 prompts and 1 set of"):
        llm.generate(["a", "b"], [{}])
    with pytest.raises(InvalidArgument, match="from 1 to 128"):
        SamplingParams(n=129)


async def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    """As in a notebook, whose cells run in one."""
    assert llm.generate("def f(", {"max_tokens": 2})[0].token_ids


def test_threads_may_share_one(llm: LLM) -> None:
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        answers[index] = llm.generate(f"x{index} =", {"max_tokens": 3})[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(8))


def test_no_port_is_open(llm: LLM) -> None:
    llm.generate("a", {"max_tokens": 1})
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(fields[9])
    ours = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        ours.add(target.removeprefix("socket:[").removesuffix("]"))
    assert not listening & ours


def test_the_model_and_its_tokens_can_be_asked_for(llm: LLM) -> None:
    assert llm.get_model().name == "small-llama"
    assert llm.get_model().has_chat_template
    ids = llm.tokenize("def f(").token_ids
    by_ids = llm.generate(list(ids), {"max_tokens": 3})[0]
    assert by_ids.token_ids == llm.generate("def f(", {"max_tokens": 3})[0].token_ids


def test_progress_is_shown_only_when_wanted(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], {"max_tokens": 1})
    assert capfd.readouterr().err == ""
    llm.generate(["a", "b"], {"max_tokens": 1}, show_progress=True)
    assert "2/2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devise": "cpu"}, TypeError, "devise"),
        ({"max_batch": "8"}, TypeError, "max_batch must be int"),
        ({"host_memory": "much"}, InvalidArgument, "host_memory: 'much' is not a size"),
        ({"dtype": "float8"}, InvalidArgument, "dtype: 'float8' is not one of"),
        ({"max_batch": 0}, InvalidArgument, "max_batch is at least 1"),
        ({"speculative_config": {"method": "magic"}}, InvalidArgument, "magic"),
        ({"device_memory": "1MiB"}, ResourceExhausted, "device memory 1 MiB is too small"),
        ({"host_memory": 1 << 50}, ResourceExhausted, "does not fit"),
    ],
)
def test_options_that_cannot_be_met_are_errors(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(small_model(), **{**SMALL, **options})  # type: ignore[arg-type]


def test_a_closed_model_answers_no_more() -> None:
    # The bundled model repeats what it read, so that there are drafts.
    llm = LLM(speculative_config={"method": "suffix"}, **SMALL)  # type: ignore[arg-type]
    result = llm.generate("a = 1\n" * 40, {"max_tokens": 24, "ignore_eos": True})[0]
    assert result.usage.speculation.draft_count > 0
    begun = threading.Event()
    errors: list[Exception] = []

    def ask() -> None:
        begun.set()
        try:
            llm.generate(["def"] * 50, {"max_tokens": 2000, "ignore_eos": True})
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait()
    time.sleep(0.3)
    llm.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert isinstance(errors[0], FailedPrecondition)
    llm.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        llm.generate("a")


def arenas() -> set[Path]:
    """The arenas of this process."""
    return set(SHARED_MEMORY.glob(f"splitpoint-*-llm-{os.getpid()}-*/arena"))


def test_a_service_that_fails_ends_the_calls() -> None:
    """Here the store's, whose arena another process removes."""
    before = arenas()
    with LLM(small_model(), **SMALL) as llm:  # type: ignore[arg-type]
        (arena,) = arenas() - before
        arena.unlink()
        with pytest.raises(ArenaLost):
            llm.generate(["def"] * 800, {"max_tokens": 200, "ignore_eos": True})
        with pytest.raises(ArenaLost):
            llm.generate("a")


def test_every_option_is_declared() -> None:
    assert EngineOptions.__optional_keys__ == DECLARED.keys()


def test_answers_follow_a_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 20]}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    params = {"json_schema": schema, "max_tokens": 200, "temperature": 1.0, "seed": 4}
    results = llm.generate(["x = ", "the answer:"], params)
    for result in results:
        assert result.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(result.text), schema)
