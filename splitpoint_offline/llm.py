"""`LLM`: a model in this process, without a server.

    from splitpoint import LLM, SamplingParams

    with LLM("models/llama", device="cpu", host_memory="2GiB") as llm:
        for result in llm.generate(prompts, SamplingParams(max_tokens=32)):
            print(result.text, result.usage.cached_tokens, result.plan.reason)

Store, worker and scheduler are those of `splitpoint up`, in one background thread, and speak over
sockets in a private folder. So answers, prefix reuse, plans and errors are those of a stack.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, Unpack

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion, FinishReason, Logprobs, Model, Tokenization, Usage
from splitpoint.client.clients import AsyncGeneration
from splitpoint.client.requests import Prompt, TemplateOptions
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.extras import need_all
from splitpoint.planning.words import ExplainedPlan
from splitpoint.tasks import run_all
from splitpoint_offline.engine import Engine
from splitpoint_offline.options import EngineOptions, settings_of
from splitpoint_offline.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Result:
    """The answers to one prompt, or why there are none.

    The properties are those of the first answer; they raise `error` if there is one.

    Attributes:
        prompt: as it was given: text, token ids, or a conversation.
        completions: `SamplingParams.n` answers in order; empty if `error` is set.
        error: None if every answer came.
    """

    prompt: Prompt | Conversation
    completions: tuple[Completion, ...]
    error: SplitpointError | None = None

    @property
    def completion(self) -> Completion:
        if self.error is not None:
            raise self.error
        return self.completions[0]

    @property
    def text(self) -> str:
        return self.completion.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completion.token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completion.finish_reason

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        return self.completion.logprobs

    @property
    def usage(self) -> Usage:
        return self.completion.usage

    @property
    def plan(self) -> ExplainedPlan | None:
        return self.completion.plan


Params = SamplingParams | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Request:
    """One prompt with its parameters; `begin` starts the answer of an index."""

    prompt: Prompt | Conversation
    params: SamplingParams
    begin: Callable[[AsyncClient, int], AsyncGeneration]


# Is called with each result as it comes.
OnResult = Callable[[Result], None]


@contextmanager
def shown(total: int, *, wanted: bool | None) -> Iterator[OnResult]:
    """Show the prompts that are done on stderr. `wanted`: None: if stderr is a terminal."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens=0)
        tokens = 0

        def on_result(result: Result) -> None:
            nonlocal tokens
            tokens += sum(len(each.token_ids) for each in result.completions)
            progress.update(task, advance=1, tokens=tokens)

        yield on_result


# Messages with `role` and `content`, as the model's chat template takes them.
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers in this process. Threads may share one; close it, or use `with`.

    Args:
        model: checkpoint folder, or a name on the Hugging Face hub; None: the bundled model.
        options: see EngineOptions.

    Returns once the model is loaded. An interpreter that ends closes it, and a small process of
    its own removes the arena if this one is killed. Raises MissingExtra without the extra `all`,
    TypeError and InvalidArgument for wrong options, and what the services raise at their start
    (ResourceExhausted if the arena or the model does not fit).
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> None:
        need_all("splitpoint.LLM")
        settings = settings_of(model, options)
        self._open_requests = settings.open_requests
        self._engine = Engine(settings)
        # The last reference may be dropped in any thread, the engine's own included.
        weakref.finalize(self, _close_in_thread, self._engine).atexit = False
        self._engine.start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Result]:
        """Return the answers to texts or lists of token ids, in the order of the prompts.

        A prompt that is refused gives a result with its error; the others are answered.

        Args:
            prompts: one prompt or several.
            sampling_params: for all prompts, or one for each.
            show_progress: None: if stderr is a terminal.

        Raises TypeError and InvalidArgument for arguments that are wrong before any prompt is
        sent, FailedPrecondition after `close`, and the error of a service that failed.
        """
        several = _prompts(prompts)
        return self._answer(
            [
                _Request(prompt, params, _completes(prompt, params))
                for prompt, params in zip(several, _params(sampling_params, several), strict=True)
            ],
            show_progress,
        )

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] = None,
        *,
        show_progress: bool | None = None,
        **template: Unpack[TemplateOptions],
    ) -> list[Result]:
        """Return the next message of each conversation, in their order; else as `generate`.

        Args:
            conversations: one list of messages or several; a message has `role` and `content`.
            template: what the model's chat template gets beside the messages, such as `tools`.
        """
        several = _conversations(conversations)
        return self._answer(
            [
                _Request(messages, params, _answers_chat(messages, params, template))
                for messages, params in zip(several, _params(sampling_params, several), strict=True)
            ],
            show_progress,
        )

    def tokenize(
        self, text: str | None = None, *, messages: Conversation | None = None
    ) -> Tokenization:
        """Return the token ids of a text or a conversation, with the model's special tokens."""
        return self._engine.call(lambda client: client.tokenize(text, messages=messages))

    def get_model(self) -> Model:
        """Return what is served: name, dimensions, what requests may ask for."""
        return self._engine.call(lambda client: client.get_model())

    def close(self) -> None:
        """Cancel what runs and give all memory back. May be called again."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, requests: list[_Request], show_progress: bool | None) -> list[Result]:
        with shown(len(requests), wanted=show_progress) as on_result:
            return self._engine.call(
                lambda client: _answer_all(client, requests, self._open_requests, on_result)
            )


def _close_in_thread(engine: Engine) -> None:
    threading.Thread(target=engine.close, name="splitpoint close").start()


async def _answer_all(
    client: AsyncClient, requests: list[_Request], open_requests: int, on_result: OnResult
) -> list[Result]:
    """Return the results in order, with at most this many answers open at a time."""
    results: list[Result | None] = [None] * len(requests)
    places = asyncio.Semaphore(open_requests)
    waiting: Iterator[tuple[int, _Request]] = iter(enumerate(requests))

    async def work() -> None:
        for index, request in waiting:
            results[index] = result = await _answered(client, request, places)
            on_result(result)

    # An error is of wrong arguments: the others say the same.
    await run_all(work() for _ in range(min(open_requests, len(requests))))
    return [result for result in results if result is not None]


async def _answered(client: AsyncClient, request: _Request, places: asyncio.Semaphore) -> Result:
    async def answer(index: int) -> Completion:
        async with places, request.begin(client, index) as generation:
            return await generation.complete()

    answers = await asyncio.gather(
        *(answer(index) for index in range(request.params.n)), return_exceptions=True
    )
    completions = []
    for each in answers:
        if isinstance(each, SplitpointError):
            return Result(request.prompt, (), each)
        if isinstance(each, BaseException):
            raise each
        completions.append(each)
    return Result(request.prompt, tuple(completions))


def _completes(
    prompt: Prompt, params: SamplingParams
) -> Callable[[AsyncClient, int], AsyncGeneration]:
    return lambda client, index: client.generate(prompt, **params.of_answer(index))


def _answers_chat(
    messages: Conversation, params: SamplingParams, template: TemplateOptions
) -> Callable[[AsyncClient, int], AsyncGeneration]:
    return lambda client, index: client.chat(messages, **params.of_answer(index), **template)


def _conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return the conversations of one or several. Raises TypeError."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise TypeError(
            f"conversations must be messages, or lists of messages, not {type(given).__name__}"
        )
    if given and isinstance(given[0], Mapping):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of one or several. Raises TypeError."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        several = list(prompts)
    except TypeError:
        raise TypeError(
            "prompts must be a text, token ids, or a sequence of these, not "
            f"{type(prompts).__name__}"
        ) from None
    if several and not isinstance(several[0], str) and not hasattr(several[0], "__iter__"):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]


def _params(given: Params | Sequence[Params], prompts: Sequence[object]) -> list[SamplingParams]:
    """Return the parameters of each prompt. Raises TypeError and InvalidArgument."""
    if isinstance(given, Sequence):
        if len(given) != len(prompts):
            raise InvalidArgument(
                f"{counted(len(prompts), 'prompt')} and "
                f"{counted(len(given), 'set')} of sampling_params",
                field="sampling_params",
            )
        return [SamplingParams.of(each) for each in given]
    return [SamplingParams.of(given)] * len(prompts)
