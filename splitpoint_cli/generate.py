"""`splitpoint generate`: one request to a running scheduler, streamed to the terminal."""

from __future__ import annotations

import enum
import signal
import sys
from types import FrameType
from typing import Annotated

import typer
from rich.markup import escape

from splitpoint.answers import Completion
from splitpoint.client import Client, Generation
from splitpoint.client_requests import GenerateOptions, Prompt
from splitpoint.config import DEFAULT_ADDRESS
from splitpoint.errors import Cancelled, Internal, InvalidArgument
from splitpoint.planner import Plan, Residency, RestoreMethod
from splitpoint.tls import client_identity
from splitpoint_cli.identity import CaFile, TokenFile
from splitpoint_cli.output import EXIT_HELP, err, print_json, seconds_text
from splitpoint_cli.up import ResidencyChoice


class RestoreChoice(enum.StrEnum):
    AUTO = "auto"
    LOAD = "load"
    TOKENS = "tokens"


Address = Annotated[
    str,
    typer.Option(help="Of the scheduler: host:port or unix:/path.", envvar="SPLITPOINT_ADDRESS"),
]


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Absent: read from stdin.", show_default=False)
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids instead of text.", metavar="1,2,3")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Generate at most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same draws; absent: drawn by the server.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; may be given up to 16 times.", metavar="S"),
    ] = None,
    worker: Annotated[
        str, typer.Option(help="Run on this worker; absent: the scheduler chooses.", metavar="ID")
    ] = "",
    split: Annotated[
        str,
        typer.Option(
            help="Cached tokens to rebuild from activations; auto: as planned.", metavar="N|auto"
        ),
    ] = "auto",
    restore: Annotated[
        RestoreChoice,
        typer.Option(
            help="How the cached prefix comes back; tokens: recomputed from the front while the "
            "rest is loaded from the back; auto: as planned."
        ),
    ] = RestoreChoice.AUTO,
    residency: Annotated[
        ResidencyChoice, typer.Option(help="Where the cache lives while decoding.")
    ] = ResidencyChoice.AUTO,
    cache_salt: Annotated[
        str, typer.Option(help="Share cached prefixes only with requests of the same salt.")
    ] = "",
    model: Annotated[str, typer.Option(help="Served model; absent: the only one.")] = "",
    timeout: Annotated[
        float | None, typer.Option(help="Give up after this many seconds.", metavar="SECONDS")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when all is done.")
    ] = False,
    with_reason: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also say on stderr what was done, what it took beside what was predicted, "
            "and why.",
        ),
    ] = False,
) -> None:
    """Complete a prompt, streaming the text."""
    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "ignore_eos": ignore_eos,
        "stop": stop or [],
        "worker": worker,
        "cache_salt": cache_salt.encode(),
        "model": model,
    }
    if seed is not None:
        options["seed"] = seed
    if split != "auto":
        options["split"] = parse_split(split)
    if restore is not RestoreChoice.AUTO:
        options["restore"] = RestoreMethod(restore.value)
    if residency is not ResidencyChoice.AUTO:
        options["residency"] = Residency(residency.value)
    if timeout is not None:
        options["timeout"] = timeout
    text_or_ids = read_prompt(prompt, prompt_ids)
    identity = client_identity(ca=ca, token_file=token_file)
    with (
        Client(address, identity=identity) as client,
        client.generate(text_or_ids, **options) as generation,
    ):
        interrupted = _cancel_on_signals(generation)
        try:
            completion = _collect(generation, stream=not as_json)
        except Cancelled:
            if not interrupted:
                raise
            raise Cancelled("interrupted") from None
    if as_json:
        # On one line: indented, every token id would get a line of its own.
        print_json(completion_json(completion), indent=None)
    if with_reason or (sys.stderr.isatty() and not as_json):
        err.print(f"[dim]{escape(_summary(completion))}[/dim]")
    if with_reason and completion.plan is not None:
        err.print(f"why: {escape(completion.plan.reason)}")


generate.__doc__ = f"{generate.__doc__}\n\n{EXIT_HELP}"


def read_prompt(prompt: str | None, prompt_ids: str | None) -> Prompt:
    """The prompt from the argument, the ids, or stdin. Raises InvalidArgument."""
    if prompt_ids is not None:
        if prompt is not None:
            raise InvalidArgument("give a PROMPT or --prompt-ids, not both", field="prompt")
        try:
            return [int(part) for part in prompt_ids.split(",")]
        except ValueError:
            raise InvalidArgument(
                f"--prompt-ids {prompt_ids!r} is not a list of token ids such as 1,2,3",
                field="prompt_ids",
            ) from None
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise InvalidArgument("no PROMPT was given, and stdin is a terminal", field="prompt")
    return sys.stdin.read()


def parse_split(text: str) -> int:
    """`--split N`. Raises InvalidArgument for anything but a count."""
    try:
        split = int(text)
    except ValueError:
        split = -1
    if split < 0:
        raise InvalidArgument(
            f"--split {text!r} is neither auto nor a number of tokens", field="split_tokens"
        )
    return split


def _cancel_on_signals(generation: Generation) -> list[int]:
    """Ctrl-C and SIGTERM cancel the request; the list tells whether one came."""
    seen: list[int] = []

    def cancel(number: int, _: FrameType | None) -> None:
        seen.append(number)
        generation.close()

    signal.signal(signal.SIGINT, cancel)
    signal.signal(signal.SIGTERM, cancel)
    return seen


def _collect(generation: Generation, *, stream: bool) -> Completion:
    if not stream:
        return generation.complete()
    is_line_open = False
    try:
        for event in generation:
            is_line_open = True
            if isinstance(event, Completion):
                if not event.text and event.token_ids:
                    # A model without a tokenizer answers in token ids.
                    sys.stdout.write(",".join(str(token) for token in event.token_ids))
                return event
            sys.stdout.write(event.text)
            sys.stdout.flush()
    finally:
        # An error on stderr starts on its own line.
        if is_line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
    raise Internal("the generation ended without an answer")


def _summary(completion: Completion) -> str:
    usage = completion.usage
    fetched = completion.plan.fetched_tokens if completion.plan is not None else 0
    restored = ""
    is_restored = usage.cached_tokens and completion.restore_seconds
    if completion.plan is not None and is_restored:
        restored = (
            f"restored in {seconds_text(completion.restore_seconds)} "
            f"({completion.plan.method.value}, "
            f"{seconds_text(completion.plan.predicted_restore_seconds)} predicted), "
        )
    steps = ""
    if completion.plan is not None and completion.step_seconds is not None:
        steps = (
            f"{seconds_text(completion.step_seconds)} a step "
            f"({seconds_text(completion.plan.predicted_step_seconds)} predicted), "
        )
    return (
        f"{usage.completion_tokens} tokens ({completion.finish_reason.value}), "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
        f"{f' ({fetched} fetched from another store)' if fetched else ''}, "
        f"{restored}{steps}worker {completion.worker}, "
        f"first token after {seconds_text(completion.ttft_seconds)}, "
        f"{seconds_text(completion.seconds)} in all, seed {completion.seed}"
    )


def completion_json(completion: Completion) -> dict[str, object]:
    """The object that `--json` prints."""
    usage = completion.usage
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "worker": completion.worker,
        "plan": None if completion.plan is None else plan_json(completion.plan),
        "restore_seconds": completion.restore_seconds,
        "step_seconds": completion.step_seconds,
        "ttft_seconds": completion.ttft_seconds,
        "seconds": completion.seconds,
    }


def plan_json(plan: Plan) -> dict[str, object]:
    return {
        "residency": plan.residency.value,
        "split_tokens": plan.split_tokens,
        "method": plan.method.value,
        "schedule": plan.schedule.value,
        "reason": plan.reason,
        "fetched_tokens": plan.fetched_tokens,
        "recomputed_tokens": plan.recomputed_tokens,
        "resident_tokens": plan.resident_tokens,
        "predicted_restore_seconds": plan.predicted_restore_seconds,
        "predicted_load_seconds": plan.predicted_load_seconds,
        "predicted_step_seconds": plan.predicted_step_seconds,
    }
