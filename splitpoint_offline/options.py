"""The options of an LLM: those of the services that run in its process, by their own names."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from splitpoint import config
from splitpoint.checkpoint.decoder import ModelBackend, read_decoder, support_of
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import InvalidArgument
from splitpoint.host.memory import available_cores, default_host_memory
from splitpoint.options import scheduler, store, worker
from splitpoint.options.option import RATE, SIZE, Option, Section, all_options
from splitpoint.options.speculation import read_speculative_config
from splitpoint.residency.batch_size import SIZES
from splitpoint.shapes import DataType


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`: the options of `splitpoint up` that make sense without clients.

    Sizes are bytes or texts such as "4GiB". None, and what is left out, is the option's default.
    """

    # Device of the worker: cpu, cuda, cuda:N, or auto: a GPU if there is one.
    device: str | None
    # Element type of weights and cache; auto: the checkpoint's.
    dtype: str | None
    # Format of the weights: native or int8.
    weights: str | None
    # Size of the arena in /dev/shm. Absent: a quarter of the available memory, at most 8 GiB.
    host_memory: int | str | None
    # Device memory for weights, caches and workspace. Absent: the worker decides.
    device_memory: int | str | None
    # Tokens of a page of the cache and of a chunk of the store.
    page_tokens: int | None
    activations: str | None
    kv_encoding: str | None
    eviction: str | None
    admission: str | None
    huge_pages: str | None
    numa_node: str | None
    pin_limit: int | str | None
    # CPU threads of the worker. Absent: all cores of this process.
    threads: int | None
    cpu_kernels: str | None
    model_backend: str | None
    # Longest context, at most the model's own.
    max_model_len: int | None
    numerics: str | None
    # Most sequences (absent: the worker chooses), and most prompt tokens, of one engine step.
    max_batch: int | None
    max_batched_tokens: int | None
    weight_objective: str | None
    verify_rate: float | None
    no_device_prefix_cache: bool | None
    enforce_eager: bool | None
    serial: bool | None
    link_rate: str | None
    # Drafts, with vLLM's names, as a mapping or as JSON.
    speculative_config: Mapping[str, Any] | str | None
    draft_model: str | Path | None
    artifacts: str | Path | None
    # File with the chat template. Absent: the model's own.
    chat_template: str | Path | None
    residency: str | None
    objective: str | None
    answer_charge: str | None
    policy: str | None


# The options behind EngineOptions, by the argument's name.
_NAMES = {"page_tokens": store.CHUNK_TOKENS.field}
_SERVED = {
    option.field: option
    for sections in (worker.SECTIONS, scheduler.SECTIONS, store.SECTIONS)
    for option in all_options(sections)
}
DECLARED: dict[str, Option[Any]] = {
    name: _SERVED[_NAMES.get(name, name)] for name in EngineOptions.__annotations__
}
# Open requests for each place in the batch: the scheduler chooses among those that wait.
_OPEN_FOR_EACH_PLACE = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """What the three services are started with, and where their files are.

    Attributes:
        open_requests: most requests that the scheduler is given at a time.
        runtime: folder of the sockets.
        arena: file of the arena, in a folder of its own.
    """

    model: Path
    open_requests: int
    runtime: Path
    arena: Path
    scheduler_address: str
    store: argparse.Namespace
    worker: argparse.Namespace
    scheduler: argparse.Namespace


def settings_of(model: str | Path | None, options: Mapping[str, Any]) -> Settings:
    """Decide what is left open. Makes no file and no folder.

    Raises TypeError for an unknown argument or a value of the wrong type, InvalidArgument for a
    value that its option refuses or a checkpoint that this version does not serve, and the errors
    of `resolve_model`.
    """
    given = _checked(options)
    drafts = read_speculative_config(
        given.get("speculative_config"), given.pop("draft_model", None)
    )
    if drafts is not None:
        if drafts.model is not None:
            draft = resolve_model(drafts.model)
            try:
                read_decoder(draft)
            except InvalidArgument as error:
                message = f"the draft model {drafts.model}: {error.message}"
                raise InvalidArgument(message, field="draft_model") from error
            drafts = replace(drafts, model=str(draft))
        given["speculative_config"] = drafts.text
    given.setdefault("threads", available_cores())
    given.setdefault("host_memory", str(default_host_memory()))
    places = given.get("max_batch", SIZES[-1])
    folder = resolve_model(None if model is None else str(model))
    # Refused before a thread or a process starts.
    backend = ModelBackend(given.get("model_backend", ModelBackend.AUTO))
    dtype = given.get("dtype", "auto")
    data_type = None if dtype == "auto" else DataType(dtype)
    if support_of(folder, data_type, backend).decoder is None:
        # Takes seconds to import, for checkpoints that transformers' code would compute.
        from worker_service.startup.model_source import source_of

        source_of(folder, data_type, backend, max_model_len=given.get("max_model_len"))
    instance = f"llm-{os.getpid()}-{secrets.token_hex(4)}"
    runtime, arena = config.runtime_path(instance), config.arena_path(instance)
    sockets = {
        name: config.check_address(f"unix:{runtime}/{name}.sock")
        for name in ("store", "worker", "scheduler")
    }
    open_requests = _OPEN_FOR_EACH_PLACE * places
    given |= {
        "model": folder,
        "chunk_tokens": given.pop("page_tokens", store.CHUNK_TOKENS.default),
        "arena": arena,
        "kvstore": sockets["store"],
        "queue_capacity": open_requests,
        "grace_seconds": 0.0,
    }
    return Settings(
        model=folder,
        open_requests=open_requests,
        runtime=runtime,
        arena=arena,
        scheduler_address=sockets["scheduler"],
        store=_namespace(store.SECTIONS, {**given, "listen": sockets["store"]}),
        worker=_namespace(worker.SECTIONS, {**given, "listen": sockets["worker"]}),
        scheduler=_namespace(
            scheduler.SECTIONS,
            {
                **given,
                "model": str(folder),
                "listen": sockets["scheduler"],
                "worker": [sockets["worker"]],
            },
        ),
    )


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are given, each as its command line would give it."""
    unknown = sorted(options.keys() - DECLARED.keys())
    if unknown:
        raise TypeError(f"LLM() got unexpected keyword arguments: {', '.join(unknown)}")
    return {
        name: _value(name, value, DECLARED[name])
        for name, value in options.items()
        if value is not None
    }


def _value(name: str, value: Any, option: Option[Any]) -> Any:
    if name == "speculative_config" and isinstance(value, Mapping):
        value = json.dumps(dict(value))
    if isinstance(value, Path) or (_is_int(value) and option.unit in (SIZE, RATE)):
        value = str(value)
    if option.kind is float and _is_int(value):
        value = float(value)
    if not isinstance(value, option.kind) or (isinstance(value, bool) and option.kind is not bool):
        raise TypeError(f"{name} must be {option.kind.__name__}, not {type(value).__name__}")
    try:
        option.check(value)
    except InvalidArgument as error:
        raise InvalidArgument(_named(error.message, option, name), field=name) from error
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(message: str, option: Option[Any], name: str) -> str:
    """Return the message of an option with the argument's name instead of the option's."""
    return message.replace(option.flag, name, 1)


def _namespace(sections: Iterable[Section], given: Mapping[str, Any]) -> argparse.Namespace:
    """Return every option of a service: as given, else its default."""
    return argparse.Namespace(
        **{
            option.field: given.get(option.field, option.default)
            for option in all_options(sections)
        }
    )
