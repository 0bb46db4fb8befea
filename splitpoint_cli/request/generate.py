"""`splitpoint generate`: one request to a running scheduler, streamed to the terminal."""

from __future__ import annotations

import enum
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.markup import escape

from splitpoint.client import Client, Generation
from splitpoint.client.answers import Completion
from splitpoint.client.requests import GenerateOptions, Prompt
from splitpoint.config import DEFAULT_ADDRESS
from splitpoint.errors import Cancelled, Internal, InvalidArgument
from splitpoint.planning.planner import Residency, RestoreMethod
from splitpoint.transport.tls import client_identity
from splitpoint_cli.identity import CaFile, TokenFile
from splitpoint_cli.output import EXIT_HELP, err
from splitpoint_cli.report import AsJson, OutputFile, hand_over, print_table
from splitpoint_cli.request.generate_output import (
    capped_split,
    completion_json,
    logprobs_table,
    summary,
)
from splitpoint_cli.stack.up import ResidencyChoice

_SAMPLING = "Sampling"


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
    max_tokens: Annotated[
        int, typer.Option(help="Generate at most this many tokens; above 0.")
    ] = 128,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Ignore the end-of-sequence token and stops before this many tokens; at least 0; "
            "absent: 0.",
            metavar="N",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End before this text; up to 16 times, each 1 to 256 bytes.", metavar="TEXT"
        ),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(help="End after this token; up to 64 times.", metavar="ID"),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Report the log-probability of each token and of this many of the likeliest "
            "there; 0 to 20; absent: none.",
            metavar="N",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0: greedy; at least 0.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(help="Keep the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Keep the likeliest tokens that have this probability together; above 0, at "
            "most 1.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens below this share of the likeliest one's probability; 0 to 1; "
            "absent: 0.",
            metavar="P",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            help="Subtract this from the logits of tokens generated before; -2 to 2; absent: 0.",
            metavar="X",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            help="Subtract this for each time that the token was generated before; -2 to 2; "
            "absent: 0.",
            metavar="X",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divide positive and multiply negative logits of tokens seen before, in the "
            "prompt, too; above 0; absent: 1.",
            metavar="X",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            help="Add this to the logit of one token: -100 to 100; up to 1,024 times.",
            metavar="ID=BIAS",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same draws; absent: drawn by the server.", rich_help_panel=_SAMPLING
        ),
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
    request_id: Annotated[
        str | None,
        typer.Option(
            help="Name of the request, 1 to 64 characters; sent again with the same options it "
            "gets the same answer; absent: drawn.",
            metavar="ID",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Give up after this many seconds.", metavar="SECONDS")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    output: OutputFile = None,
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
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "logprobs": logprobs,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": parse_logit_bias(logit_bias or []),
        "seed": seed,
        "worker": worker,
        "split": None if split == "auto" else parse_split(split),
        "restore": None if restore is RestoreChoice.AUTO else RestoreMethod(restore.value),
        "residency": None if residency is ResidencyChoice.AUTO else Residency(residency.value),
        "cache_salt": os.fsencode(cache_salt),
        "model": model,
        "request_id": request_id,
        "timeout": timeout,
    }
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
    _report(
        completion, options.get("split"), as_json=as_json, output=output, with_reason=with_reason
    )


generate.__doc__ = f"{generate.__doc__}\n\n{EXIT_HELP}"


def _report(
    completion: Completion,
    split: int | None,
    *,
    as_json: bool,
    output: Path | None,
    with_reason: bool,
) -> None:
    """All that follows the text."""

    def show() -> None:
        if completion.logprobs:
            print_table(logprobs_table(completion))

    # On one line: indented, every token id would get a line of its own.
    hand_over(completion_json(completion), show, as_json=as_json, output=output, indent=None)
    capped = capped_split(completion, split)
    if capped is not None:
        err.print(escape(capped))
    if with_reason or (sys.stderr.isatty() and not as_json):
        err.print(f"[dim]{escape(summary(completion))}[/dim]")
    if with_reason and completion.plan is not None:
        err.print(f"why: {escape(completion.plan.reason)}")


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
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the prompt on stdin is not UTF-8 text: the byte at {error.start:,} is none of it",
            field="prompt",
        ) from None


def parse_logit_bias(entries: list[str]) -> dict[int, float] | None:
    """`--logit-bias ID=BIAS`, each given once or more; None: none. Raises InvalidArgument."""
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidArgument(
                f"--logit-bias {entry!r} is not ID=BIAS, such as 50=-100", field="logit_bias"
            ) from None
    return biases or None


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
