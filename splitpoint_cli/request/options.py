"""Options of `splitpoint generate` and `chat`, and what becomes of their values."""

from __future__ import annotations

import enum
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from splitpoint.client.requests import GenerateOptions, Prompt
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.selection import Selection
from splitpoint.speculation import ALIASES, DraftMethod

_SAMPLING = "Sampling"
_SPECULATION = "Speculation"
_SELECTION = "Selection"
_STRUCTURE = "Structured output, one of these"


class ResidencyChoice(enum.StrEnum):
    AUTO = "auto"
    RESIDENT = "resident"
    STREAMED = "streamed"


class RestoreChoice(enum.StrEnum):
    AUTO = "auto"
    LOAD = "load"
    TOKENS = "tokens"


PromptText = Annotated[
    str | None, typer.Argument(help="Absent: read from stdin.", show_default=False)
]
PromptIds = Annotated[str | None, typer.Option(help="Token ids instead of text.", metavar="1,2,3")]
MaxTokens = Annotated[int, typer.Option(help="Generate at most this many tokens; above 0.")]
MinTokens = Annotated[
    int | None,
    typer.Option(
        help="Ignore the end-of-sequence token and stops before this many tokens; at least 0; "
        "absent: 0.",
        metavar="N",
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
]
FillContext = Annotated[
    bool,
    typer.Option(
        "--fill-context", help="Generate until the context is full, whatever --max-tokens says."
    ),
]
KeepSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--keep-special-tokens",
        help="Print special tokens as text, except the one that ends the answer.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; up to 16 times, each 1 to 256 bytes.", metavar="TEXT"),
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="End after this token; up to 64 times.", metavar="ID")
]
IncludeStop = Annotated[
    bool,
    typer.Option(
        "--include-stop", help="Print the stop string or stop token that ends the answer, too."
    ),
]
LogprobCount = Annotated[
    int | None,
    typer.Option(
        help="Report the log-probability of each token and of this many of the likeliest there; "
        "0 to 20; absent: none.",
        metavar="N",
    ),
]
Temperature = Annotated[
    float, typer.Option(help="0: greedy; at least 0.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int, typer.Option(help="Keep the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        help="Keep the likeliest tokens that have this probability together; above 0, at most 1.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this share of the likeliest one's probability; 0 to 1; absent: 0.",
        metavar="P",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        help="Subtract this from the logits of tokens generated before; -2 to 2; absent: 0.",
        metavar="X",
        rich_help_panel=_SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        help="Subtract this for each time that the token was generated before; -2 to 2; absent: 0.",
        metavar="X",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Divide positive and multiply negative logits of tokens seen before, in the prompt, "
        "too; from 0.01 to 100; absent: 1.",
        metavar="X",
        rich_help_panel=_SAMPLING,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        help="Add this to the logit of one token: -100 to 100; up to 1,024 times.",
        metavar="ID=BIAS",
        rich_help_panel=_SAMPLING,
    ),
]
AllowedTokenId = Annotated[
    list[int] | None,
    typer.Option(
        help="Choose only this token; repeat it for each token that is allowed.",
        metavar="ID",
        rich_help_panel=_SAMPLING,
    ),
]
BadWord = Annotated[
    list[str] | None,
    typer.Option(
        help="Never write this text; may be repeated.", metavar="TEXT", rich_help_panel=_SAMPLING
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Same seed, same draws; absent: drawn by the server.", rich_help_panel=_SAMPLING
    ),
]
JsonObject = Annotated[
    bool,
    typer.Option("--json-object", help="Answer with a JSON object.", rich_help_panel=_STRUCTURE),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        help="Answer with JSON of the schema in this file (docs/openai-api.md).",
        metavar="FILE",
        rich_help_panel=_STRUCTURE,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        help="Answer with a text that matches this, from its start to its end.",
        metavar="REGEX",
        rich_help_panel=_STRUCTURE,
    ),
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        help="Answer with a text of the grammar in this file.",
        metavar="FILE",
        rich_help_panel=_STRUCTURE,
    ),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(
        help="Answer with this text, or another one that is given so; up to 1,024 times.",
        metavar="TEXT",
        rich_help_panel=_STRUCTURE,
    ),
]
WorkerId = Annotated[
    str, typer.Option(help="Run on this worker; absent: the scheduler chooses.", metavar="ID")
]
Split = Annotated[
    str,
    typer.Option(
        help="Cached tokens to rebuild from activations; auto: as planned.", metavar="N|auto"
    ),
]
Restore = Annotated[
    RestoreChoice,
    typer.Option(
        help="How the cached prefix comes back; tokens: recomputed from the front while the rest "
        "is loaded from the back; auto: as planned."
    ),
]
ResidencyOption = Annotated[
    ResidencyChoice, typer.Option(help="Where the cache lives while decoding.")
]


def _draft_method(text: str) -> DraftMethod:
    """Return the method of this name, which may be vLLM's. Raises BadParameter."""
    try:
        return DraftMethod(text)
    except ValueError:
        names = ", ".join([*DraftMethod, *ALIASES])
        raise typer.BadParameter(f"{text!r} is not one of {names}.") from None


Speculate = Annotated[
    DraftMethod | None,
    typer.Option(
        help="What drafts the tokens that a step verifies; the text does not depend on it; vLLM's "
        "ngram means suffix, draft_model means model; absent: as the worker is configured "
        "(docs/speculation.md).",
        parser=_draft_method,
        metavar="|".join(DraftMethod),
        rich_help_panel=_SPECULATION,
    ),
]
SpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        help="Draft at most this many tokens for one step; 0 to 32; absent: as the worker measures "
        "or is configured.",
        metavar="N",
        rich_help_panel=_SPECULATION,
    ),
]
PromptLookupMin = Annotated[
    int | None,
    typer.Option(
        help="With suffix: draft only if this many of the newest tokens occurred before; 1 to 64; "
        "absent: as the worker is configured.",
        metavar="N",
        rich_help_panel=_SPECULATION,
    ),
]
Select = Annotated[
    str | None,
    typer.Option(
        help="Read only the cached tokens that matter, while the cache is streamed: the answer is "
        "approximate; columns:0.1 reads a tenth of them; absent: all (docs/selection.md).",
        metavar="METHOD:RATIO",
        rich_help_panel=_SELECTION,
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="With --select: only draft by the selection, and verify by reading everything: exact.",
        rich_help_panel=_SELECTION,
    ),
]
Priority = Annotated[
    int,
    typer.Option(
        min=-10, max=10, help="Larger ones of the tenant start first; the policy fifo ignores it."
    ),
]
CacheSalt = Annotated[
    str, typer.Option(help="Share cached prefixes only with requests of the same salt.")
]
ModelName = Annotated[str, typer.Option(help="Served model; absent: the only one.")]
RequestId = Annotated[
    str | None,
    typer.Option(
        help="Name of the request, 1 to 64 characters; sent again with the same options it gets "
        "the same answer; absent: drawn.",
        metavar="ID",
    ),
]
Timeout = Annotated[
    float | None, typer.Option(help="Give up after this many seconds.", metavar="SECONDS")
]
RetrySeconds = Annotated[
    float,
    typer.Option(
        help="Try to go on for this long after the scheduler was lost. 0: not at all.",
        metavar="SECONDS",
        min=0,
    ),
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Also print on stderr what was done, its time beside the predicted one, and why.",
    ),
]


def read_prompt(prompt: str | None, prompt_ids: str | None) -> Prompt:
    """Return the prompt from the argument, the ids, or stdin. Raises InvalidArgument."""
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


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What `generate` and `chat` both offer, besides the length of an answer."""

    min_tokens: MinTokens = None
    ignore_eos: IgnoreEos = False
    keep_special_tokens: KeepSpecialTokens = False
    stop: Stop = None
    stop_token_id: StopTokenId = None
    include_stop: IncludeStop = False
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    repetition_penalty: RepetitionPenalty = None
    logit_bias: LogitBias = None
    allowed_token_id: AllowedTokenId = None
    bad_word: BadWord = None
    seed: Seed = None
    json_object: JsonObject = False
    json_schema: JsonSchema = None
    regex: Regex = None
    grammar: Grammar = None
    choice: Choice = None
    priority: Priority = 0
    worker: WorkerId = ""
    residency: ResidencyOption = ResidencyChoice.AUTO
    speculate: Speculate = None
    speculative_tokens: SpeculativeTokens = None
    prompt_lookup_min: PromptLookupMin = None
    cache_salt: CacheSalt = ""
    model: ModelName = ""
    timeout: Timeout = None


def request_of(
    given: RequestOptions,
    *,
    max_tokens: int | None,
    fill_context: bool,
    logprobs: int | None = None,
    split: str = "auto",
    restore: RestoreChoice = RestoreChoice.AUTO,
    select: str | None = None,
    verify: bool = False,
    request_id: str | None = None,
) -> GenerateOptions:
    """Return a request's options from the values of a command's. Raises InvalidArgument."""
    return GenerateOptions(
        max_tokens=None if fill_context else max_tokens,
        fills_context=fill_context,
        min_tokens=given.min_tokens,
        ignore_eos=given.ignore_eos,
        keeps_special_tokens=given.keep_special_tokens,
        stop=given.stop,
        stop_token_ids=given.stop_token_id,
        include_stop_str_in_output=given.include_stop,
        logprobs=logprobs,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=parse_logit_bias(given.logit_bias or []),
        allowed_token_ids=given.allowed_token_id,
        bad_words=given.bad_word,
        seed=given.seed,
        json_object=given.json_object,
        json_schema=_content("json_schema", given.json_schema),
        regex=given.regex,
        grammar=_content("grammar", given.grammar),
        choice=given.choice,
        priority=given.priority,
        worker=given.worker,
        split=parse_split(split),
        restore=restore_of(restore),
        residency=residency_of(given.residency),
        speculate=given.speculate,
        speculative_tokens=given.speculative_tokens,
        prompt_lookup_min=given.prompt_lookup_min,
        select=selection_of(select, verify=verify),
        cache_salt=os.fsencode(given.cache_salt),
        model=given.model,
        request_id=request_id,
        timeout=given.timeout,
    )


def _content(name: str, path: Path | None) -> str | None:
    """Return the text in a file; None without one. Raises InvalidArgument."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidArgument(
            f"--{name.replace('_', '-')} takes a file, and {path} cannot be read: {reason}",
            field=name,
        ) from None


def parse_logit_bias(entries: list[str]) -> dict[int, float] | None:
    """Return biases by token id from ID=BIAS entries; None if empty. Raises InvalidArgument."""
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


def restore_of(choice: RestoreChoice) -> RestoreMethod | None:
    """Return the method of `--restore`; None for `auto`."""
    return None if choice is RestoreChoice.AUTO else RestoreMethod(choice.value)


def residency_of(choice: ResidencyChoice) -> Residency | None:
    """Return the residency of `--residency`; None for `auto`."""
    return None if choice is ResidencyChoice.AUTO else Residency(choice.value)


def selection_of(text: str | None, *, verify: bool) -> Selection | None:
    """Return the selection of both options; None for neither. Raises InvalidArgument."""
    if text is None:
        if verify:
            raise InvalidArgument("--verify needs --select", field="verify")
        return None
    selection = Selection.parsed(text)
    return replace(selection, verify=True) if verify else selection


def parse_split(text: str) -> int | None:
    """Return the count of `--split`; None for `auto`. Raises InvalidArgument."""
    if text == "auto":
        return None
    try:
        split = int(text)
    except ValueError:
        split = -1
    if split < 0:
        raise InvalidArgument(
            f"--split {text!r} is neither auto nor a number of tokens", field="split_tokens"
        )
    return split
