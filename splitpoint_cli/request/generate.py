"""`splitpoint generate`: one request to a running scheduler, streamed to the terminal."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from rich.markup import escape

from splitpoint.client import Client, Generation
from splitpoint.client.answers import Completion
from splitpoint.client.tries import DEFAULT_RETRY_SECONDS
from splitpoint.config import DEFAULT_ADDRESS
from splitpoint.errors import Cancelled, Internal, Retryable, Unavailable
from splitpoint.transport.tls import client_identity
from splitpoint_cli.identity import Address, CaFile, TokenFile
from splitpoint_cli.options import takes_options
from splitpoint_cli.output import EXIT_HELP, err, plain_reason
from splitpoint_cli.report import AsJson, OutputFile, hand_over, print_table, show_reason
from splitpoint_cli.request import options
from splitpoint_cli.request.generate_output import (
    approximation,
    capped_split,
    completion_json,
    logprobs_table,
    summary,
)


@takes_options
def generate(
    *,
    prompt: options.PromptText = None,
    prompt_ids: options.PromptIds = None,
    max_tokens: options.MaxTokens = 128,
    fill_context: options.FillContext = False,
    given: options.RequestOptions,
    logprobs: options.LogprobCount = None,
    split: options.Split = "auto",
    restore: options.Restore = options.RestoreChoice.AUTO,
    select: options.Select = None,
    verify: options.Verify = False,
    request_id: options.RequestId = None,
    retry_seconds: options.RetrySeconds = DEFAULT_RETRY_SECONDS,
    address: Address = DEFAULT_ADDRESS,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    output: OutputFile = None,
    with_reason: options.Explain = False,
) -> None:
    """Complete a prompt, streaming the text."""
    request = options.request_of(
        given,
        max_tokens=max_tokens,
        fill_context=fill_context,
        logprobs=logprobs,
        split=split,
        restore=restore,
        select=select,
        verify=verify,
        request_id=request_id,
    )
    text_or_ids = options.read_prompt(prompt, prompt_ids)
    who = client_identity(ca=ca, token_file=token_file)
    with (
        Client(address, identity=who, retry_seconds=retry_seconds, on_retry=tell_retry) as client,
        client.generate(text_or_ids, **request) as generation,
    ):
        completion = _collect_until_interrupted(generation, stream=not as_json)
    asked = request.get("split")
    _report(completion, asked, as_json=as_json, output=output, with_reason=with_reason)


generate.__doc__ = f"{generate.__doc__}\n\n{EXIT_HELP}"


def tell_retry(error: Retryable, address: str) -> None:
    """Say on stderr that another scheduler goes on."""
    state = "does not answer" if isinstance(error, Unavailable) else "is full"
    cause = plain_reason(" ".join(error.message.split()))
    err.print(escape(f"the scheduler {state} ({cause}): going on at {address}"))


def _report(
    completion: Completion,
    split: int | None,
    *,
    as_json: bool,
    output: Path | None,
    with_reason: bool,
) -> None:
    """Print all that follows the text."""

    def show() -> None:
        if completion.logprobs:
            print_table(logprobs_table(completion))

    # On one line: indented, every token id would get a line of its own.
    hand_over(completion_json(completion), show, as_json=as_json, output=output, indent=None)
    for remark in (capped_split(completion, split), approximation(completion)):
        if remark is not None:
            err.print(escape(remark))
    if with_reason or (sys.stderr.isatty() and not as_json):
        err.print(f"[dim]{escape(summary(completion))}[/dim]")
    if with_reason and completion.plan is not None:
        show_reason(completion.plan)


def _collect_until_interrupted(generation: Generation, *, stream: bool) -> Completion:
    """Return the answer; SIGINT and SIGTERM cancel the request."""
    seen: list[int] = []

    def cancel(number: int, _: FrameType | None) -> None:
        seen.append(number)
        generation.close()

    signal.signal(signal.SIGINT, cancel)
    signal.signal(signal.SIGTERM, cancel)
    try:
        return _collect(generation, stream=stream)
    except Cancelled:
        if not seen:
            raise
        raise Cancelled("interrupted") from None


def _collect(generation: Generation, *, stream: bool) -> Completion:
    """Return the answer; print its text as it comes if `stream`."""
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
