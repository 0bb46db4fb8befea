"""A request's prompt as token ids: given as such, as a text, or as a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from splitpoint.chat.messages import Chat
from splitpoint.checkpoint.text import TooManyTokens
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.sampling import check_token_ids
from splitpoint.shapes import ModelShape
from splitpoint.transport.limits import MESSAGE_LIMIT_BYTES
from splitpoint.v1 import scheduler_pb2

# Converts a chat to text by the model's template. Raises InvalidArgument for what that refuses.
Render = Callable[[Chat], str]


class Encode(Protocol):
    """Converts text to at most `most` token ids; raises TooManyTokens if there are more."""

    def __call__(
        self, text: str, most: int, /, *, adds_special_tokens: bool = True
    ) -> list[int]: ...


def prompt_of(
    request: scheduler_pb2.GenerateRequest,
    model: ModelShape,
    encode: Encode | None,
    render: Render | None,
) -> tuple[int, ...]:
    """Return the prompt's tokens. They are counted before they are copied."""
    most = model.context_length - 1
    kept = _kept_tokens(request, model)
    if request.WhichOneof("prompt") == "token_ids":
        ids, field = request.token_ids.ids, "token_ids.ids"
        if len(ids) > most and kept is None:
            too_many = TooManyTokens(len(ids), is_exact=True)
            raise prompt_exceeds(too_many, field, model.context_length)
        if not ids:
            raise InvalidArgument("the prompt is empty", field=field)
        check_token_ids(ids, field, model.vocabulary_size)
        return tuple(ids if kept is None else ids[-kept:])
    field = "chat.messages" if request.HasField("chat") else "text"
    try:
        found = encoded_prompt(
            request, encode, render, most if kept is None else MESSAGE_LIMIT_BYTES
        )
    except TooManyTokens as error:
        raise prompt_exceeds(error, field, model.context_length) from None
    # A tokenizer may know more tokens than the checkpoint has rows for.
    if max(found) >= model.vocabulary_size:
        raise InvalidArgument("the text holds a token that the model lacks", field=field)
    return tuple(found if kept is None else found[-kept:])


def _kept_tokens(request: scheduler_pb2.GenerateRequest, model: ModelShape) -> int | None:
    """Return how many of the prompt's last tokens are kept at most; None: all or an error."""
    if not request.HasField("truncate_prompt_tokens"):
        return None
    kept, most = request.truncate_prompt_tokens, model.context_length - 1
    if kept == -1:
        new = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else 1
        return max(1, model.context_length - new)
    if not 1 <= kept <= most:
        raise InvalidArgument(f"must be -1, or from 1 to {most:,}", field="truncate_prompt_tokens")
    return kept


def encoded_prompt(
    request: scheduler_pb2.GenerateRequest | scheduler_pb2.TokenizeRequest,
    encode: Encode | None,
    render: Render | None,
    most: int,
) -> list[int]:
    """Return the token ids of a request's text or chat: at least 1, at most `most`.

    Raises InvalidArgument (neither is set, empty, refused by the template), FailedPrecondition
    (no tokenizer, no template), TooManyTokens.
    """
    if request.HasField("chat"):
        text, adds, field = _text_of(request.chat, encode, render), False, "chat.messages"
    elif request.WhichOneof("prompt") == "text" or isinstance(
        request, scheduler_pb2.TokenizeRequest
    ):
        text, adds, field = request.text, not request.omits_special_tokens, "text"
    else:
        raise InvalidArgument("neither text, token_ids nor chat is set", field="prompt")
    if not text:
        raise InvalidArgument("the text is empty", field=field)
    if encode is None:
        raise FailedPrecondition(
            "the model has no tokenizer: send token ids", reason="NO_TOKENIZER"
        )
    ids = encode(text, most, adds_special_tokens=adds)
    if not ids:
        raise InvalidArgument("the prompt is empty", field=field)
    return ids


def bad_word_tokens(texts: Sequence[str], encode: Encode | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each text, and those behind a space if they are as many others."""
    found: list[tuple[int, ...]] = []
    for index, text in enumerate(texts):
        if encode is None:
            continue  # was refused
        alone, spaced = (
            tuple(encode(each, MESSAGE_LIMIT_BYTES, adds_special_tokens=False))
            for each in (text, " " + text.lstrip())
        )
        if not alone:
            raise InvalidArgument("it has no tokens", field=f"sampling.bad_words[{index}]")
        found.append(alone)
        if spaced[:1] != alone[:1] and len(spaced) == len(alone):
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def prompt_exceeds(error: TooManyTokens, field: str, context_length: int) -> InvalidArgument:
    """Return the error for a prompt that fills the context or more."""
    return InvalidArgument(
        f"a prompt of {error} leaves no room in the context of {context_length:,}",
        field=field,
        reason="CONTEXT_EXCEEDED",
        prompt_tokens=error.count,
        context_length=context_length,
    )


def _text_of(chat: scheduler_pb2.ChatPrompt, encode: Encode | None, render: Render | None) -> str:
    if render is None:
        raise FailedPrecondition(
            "the model has no chat template: send a text"
            if encode is not None
            else "the model has no tokenizer: send token ids",
            reason="NO_CHAT_TEMPLATE" if encode is not None else "NO_TOKENIZER",
        )
    return render(
        Chat(
            chat.messages,
            chat.tools,
            chat.template_arguments,
            adds_generation_prompt=not chat.omits_generation_prompt,
            continues_final_message=chat.continues_final_message,
        )
    )
