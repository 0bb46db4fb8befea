"""The checkpoint: present, of a known family, readable, with a tokenizer, not too large."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from splitpoint.chat.renderer import ChatRenderer
from splitpoint.chat.source import read_template_file, read_templates
from splitpoint.checkpoint.config import (
    TEXT_ONLY,
    UNSUPPORTED_MODEL,
    model_name,
    read_config,
    reads_more_than_text,
    text_part,
)
from splitpoint.checkpoint.decoder import ModelBackend, support_of
from splitpoint.checkpoint.resolve import resolve_model, weight_files
from splitpoint.checkpoint.tensors import read_header
from splitpoint.config import counted, format_size
from splitpoint.errors import InvalidArgument, NotFound, SplitpointError
from splitpoint.shapes import ModelShape, WeightFormat
from splitpoint_cli.checks.finding import Finding, Verdict, one_line
from splitpoint_cli.models import cpu_format, find_draft, parse_dtype, served_shape


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The model of --model; folder and shape are None if it is absent or of an unknown family."""

    finding: Finding
    folder: Path | None = None
    shape: ModelShape | None = None


def find_model(
    text: str | None,
    dtype: str,
    backend: str = ModelBackend.AUTO,
    weights: WeightFormat = WeightFormat.NATIVE,
    max_model_len: int | None = None,
) -> FoundModel:
    """Return folder and shape of the model, as far as they are present."""
    name = "model"
    try:
        data_type = parse_dtype(dtype)
        folder = resolve_model(text, download=False)
    except NotFound:
        return FoundModel(_to_be_downloaded(str(text)))
    except SplitpointError as error:
        return FoundModel(Finding(name, Verdict.PROBLEM, error.message, _advice(error, text)))
    try:
        shape = served_shape(folder, data_type, ModelBackend(backend), max_model_len)
        support = support_of(folder, data_type, ModelBackend(backend))
        cpu_format(support, weights)
    except InvalidArgument as error:
        found = f"{model_name(folder)}: {error.message}"
        return FoundModel(Finding(name, Verdict.PROBLEM, found, _advice(error, text)), folder)
    how = support.quantization
    found = (
        f"{shape.name}: {shape.family}, {shape.layer_count} layers, {shape.data_type.value}, "
        f"{'' if how is None else f'{how.text}, '}"
        f"context {shape.context_length:,}"
    )
    if reads_more_than_text(read_config(folder)):
        found += f", {TEXT_ONLY}"
    if support.decoder is None:
        found += ", computed by transformers' code"
    return FoundModel(Finding(name, Verdict.OK, found), folder, shape)


def find_draft_model(text: str, served: FoundModel) -> FoundModel:
    """Return folder and shape of a draft model that fits the served one, as far as present.

    Nothing is compared with a served model that is absent or of an unknown family.
    """
    name = "draft model"
    if served.folder is None or served.shape is None:
        return FoundModel(Finding(name, Verdict.NOTE, f"{text}: there is no model to compare with"))
    try:
        folder, shape = find_draft(text, served.folder, served.shape, download=False)
    except NotFound:
        return FoundModel(_to_be_downloaded(text, name))
    except SplitpointError as error:
        field = error.field if isinstance(error, InvalidArgument) else ""
        advice = (
            "Choose a draft model of our own decoder's families and of the same vocabulary "
            "(docs/models.md), or leave --draft-model out"
            if field == "draft_model"
            else _advice(error, text)
        )
        return FoundModel(Finding(name, Verdict.PROBLEM, error.message, advice))
    weights = check_weights(folder)
    if weights.verdict is not Verdict.OK:
        return FoundModel(replace(weights, name=name), folder, shape)
    found = f"{shape.name}: {counted(shape.layer_count, 'layer')}, vocabulary of the model"
    return FoundModel(Finding(name, Verdict.OK, found), folder, shape)


def _to_be_downloaded(text: str, name: str = "model") -> Finding:
    # The hub's own folder, wherever its variables put it; it may not be there yet.
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    while not home.exists():
        home = home.parent
    free = format_size(shutil.disk_usage(home).free)
    return Finding(
        name,
        Verdict.NOTE,
        f"{text} is not on this host: `splitpoint up` downloads it; {free} are free for it",
        f"Download it beforehand: hf download {text.partition('@')[0]}",
    )


def _advice(error: SplitpointError, text: str | None) -> str:
    field = error.field if isinstance(error, InvalidArgument) else ""
    if field == "model_type":
        return "Choose another model: docs/models.md lists the families that are served"
    if field == "quantization_config":
        return "Choose the checkpoint that this one was quantized from, or one of another format"
    if field == "weights":
        return "Leave --weights out"
    if field == "text_config":
        return "Write the defaults into config.json, as said above"
    if error.reason == UNSUPPORTED_MODEL:
        return f"Choose another checkpoint: this version cannot compute its {field}"
    if field == "max_model_len":
        return "Leave --max-model-len out, or give a smaller one"
    if field == "dtype":
        return "Choose one that the CPU or GPU has, or --dtype auto"
    if text is not None and not Path(text).expanduser().exists():
        return "Name a folder that exists, or a model of the Hugging Face hub (owner/name)"
    return "Copy or download the checkpoint again (hf download OWNER/NAME --local-dir DIR)"


def check_weights(folder: Path) -> Finding:
    """Check that every safetensors file is present, with the length in its header."""
    name = "weights"
    try:
        is_plain = text_part(read_config(folder)).get("quantization_config") is None
        files = [read_header(path, floats_only=is_plain) for path in weight_files(folder)]
    except InvalidArgument as error:
        pickled = (
            ""
            if "no safetensors" not in error.message
            else ("Convert it: transformers' from_pretrained(DIR).save_pretrained(NEW), or ")
        )
        again = "copy or download these files again (hf download OWNER/NAME --local-dir DIR)"
        return Finding(
            name,
            Verdict.PROBLEM,
            error.message,
            pickled + (again if pickled else again[0].upper() + again[1:]),
        )
    tensors, size = sum(f.tensor_count for f in files), sum(f.file_bytes for f in files)
    many = f"{len(files)} files" if len(files) > 1 else "1 file"
    return Finding(name, Verdict.OK, f"{many}, {tensors:,} tensors, {format_size(size)}")


def check_tokenizer(folder: Path, vocabulary_size: int) -> Finding:
    """Check the tokenizer, without which only token ids can be served."""
    from splitpoint.checkpoint.text import Tokenizer  # loads the tokenizers library

    name = "tokenizer"
    try:
        tokenizer = Tokenizer.load(folder)
    except InvalidArgument as error:
        return Finding(
            name,
            Verdict.PROBLEM,
            one_line(error.message),
            "Copy or download the checkpoint's tokenizer files again",
        )
    if tokenizer is None:
        return Finding(
            name,
            Verdict.WARNING,
            "there is none: requests can only bring token ids, and get ids back",
            "Copy tokenizer.json of the model into its folder",
        )
    if tokenizer.vocabulary_size > vocabulary_size:
        return Finding(
            name,
            Verdict.WARNING,
            f"it has {tokenizer.vocabulary_size:,} tokens, the model knows {vocabulary_size:,}: "
            "is it another model's?",
            "Copy tokenizer.json of this model into its folder",
        )
    return Finding(name, Verdict.OK, f"{tokenizer.vocabulary_size:,} tokens")


def check_chat_template(folder: Path, given: Path | None = None) -> Finding:
    """Check the chat template, `given` or the model's own, by compiling it."""
    name = "chat template"
    try:
        found = read_templates(folder) if given is None else read_template_file(given, folder)
        if found is None:
            return Finding(
                name,
                Verdict.NOTE,
                "there is none: prompts are served, chats are refused",
                "Name one: splitpoint up --chat-template FILE",
            )
        ChatRenderer(found).close()
    except SplitpointError as error:
        # With a broken one of its own the model serves prompts still.
        verdict = Verdict.WARNING if given is None else Verdict.PROBLEM
        return Finding(
            name,
            verdict,
            one_line(error.message),
            "Repair it, or name another one: splitpoint up --chat-template FILE",
        )
    calls = found.tool_call_format
    taught = f"it teaches calls of tools ({calls})" if calls else "it teaches no calls of tools"
    return Finding(name, Verdict.OK, f"{given or 'of the model'}: {taught}")
