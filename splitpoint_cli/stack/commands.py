"""The commands of a stack's services: which options each gets, and what is decided for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitpoint.costs.page_choice import PageChoice
from splitpoint.options import gateway, scheduler, service, store, worker
from splitpoint.options.option import Option, Section, all_options
from splitpoint.options.speculation import SpeculativeConfig
from splitpoint.shapes import ModelShape
from splitpoint_cli.options import arguments_of, values_of
from splitpoint_cli.stack.api_key import ApiKey
from splitpoint_cli.stack.child import ServiceCommand
from splitpoint_cli.stack.devices import alone_visible
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.places import Places, socket_path, trace_path

# In addition to the grace of running requests; a worker also waits for write-back.
_GATEWAY_STOP_SECONDS = 10.0
_SCHEDULER_STOP_SECONDS = 10.0
_WORKER_STOP_SECONDS = 40.0
_LOAD_SECONDS = 600.0  # a large checkpoint from a cold disk

# Options that `up` decides itself for each service, or gives under a condition.
_DECIDED = frozenset(
    {
        *("listen", "model", "dtype", "metrics", "host_memory", "keep_arena", "device", "threads"),
        *("trace", "speculative_config", "draft_model", "server_key_file"),
    }
)
# Store and workers listen in a private folder.
_PRIVATE = frozenset(option.field for option in service.SECURITY.options)


def passed_on(
    sections: Iterable[Section], options: StackOptions, without: frozenset[str] = frozenset()
) -> list[str]:
    """Return the arguments that a service of these sections gets as `up` got them."""
    values = values_of(options)
    names = values.keys() - _DECIDED - without
    return arguments_of([each for each in all_options(sections) if each.field in names], values)


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint, and the shape in the element type that store and workers agree on."""

    folder: Path
    shape: ModelShape

    @property
    def arguments(self) -> list[str]:
        return ["--model", str(self.folder), "--dtype", self.shape.data_type.value]


def store_command(
    options: StackOptions, model: Model, places: Places, host_memory: int, pages: PageChoice
) -> ServiceCommand:
    return ServiceCommand(
        "store",
        [
            *("-m", "kvstore_service"),
            *("--listen", places.store),
            *model.arguments,
            *("--host-memory", str(host_memory)),
            *_given("--chunk-tokens", _unless_default(pages.tokens, store.CHUNK_TOKENS)),
            *_given("--page-reason", pages.reason or None),
            *("--arena", str(places.arena)),
            # A user who keeps an arena wants to know if it does not fit; one that a killed
            # stack left is replaced.
            "--keep-arena" if options.keep_arena else "--replace-arena",
            *_given("--metrics", places.metrics[1] if places.metrics else None),
            *passed_on(store.SECTIONS, options, _PRIVATE),
        ],
        # Every page of the arena is allocated before the store is ready.
        ready_seconds=60.0 + host_memory / 1e9,
        socket=socket_path(places.store),
    )


def worker_commands(
    options: StackOptions,
    model: Model,
    speculation: SpeculativeConfig | None,
    places: Places,
    devices: tuple[str, ...],
    memory_shares: Sequence[int | None],
    threads: int | None,
    spinning: Mapping[str, str],
) -> tuple[ServiceCommand, ...]:
    """Return a command for each device.

    `memory_shares`: each worker's bytes of device memory; None: as the options say, or what the
    worker decides.
    """
    drafts = None if speculation is None else speculation.text
    return tuple(
        ServiceCommand(
            f"worker {i}",
            [
                *("-m", "worker_service"),
                *("--listen", places.workers[i]),
                *("--worker-id", str(i)),
                *model.arguments,
                *("--kvstore", places.store),
                *("--device", own_device),
                *_given("--device-memory", memory_shares[i]),
                *_given("--threads", threads),
                *_given("--trace", trace_path(options.trace, i)),
                *_given("--metrics", places.metrics[2 + i] if places.metrics else None),
                "--progress-lines",
                *_given("--speculative-config", drafts),
                *passed_on(worker.SECTIONS, options, _PRIVATE),
            ],
            ready_seconds=_LOAD_SECONDS,
            stop_seconds=_WORKER_STOP_SECONDS,
            environment={**spinning, **visible},
            socket=socket_path(places.workers[i]),
        )
        for i, (own_device, visible) in enumerate(map(alone_visible, devices))
    )


def scheduler_commands(
    options: StackOptions, model: Model, places: Places
) -> tuple[ServiceCommand, ...]:
    count = len(places.listens)
    # After the metrics of the first scheduler, the store and the workers.
    metrics = places.metrics[:1] + places.metrics[2 + len(places.workers) :][: count - 1]
    return tuple(
        _scheduler_command(
            options,
            model,
            places,
            name="scheduler" if count == 1 else f"scheduler {number}",
            listen=listen,
            metrics=metrics[number] if metrics else None,
        )
        for number, listen in enumerate(places.listens)
    )


def _scheduler_command(
    options: StackOptions,
    model: Model,
    places: Places,
    *,
    name: str,
    listen: str,
    metrics: str | None,
) -> ServiceCommand:
    return ServiceCommand(
        name,
        [
            *("-m", "scheduler_service"),
            *("--listen", listen),
            *(part for address in places.workers for part in ("--worker", address)),
            *model.arguments,
            # Chunk keys depend on this secret: without it neither another scheduler, nor one
            # that is started again, nor the next user of a kept arena finds a chunk.
            *("--server-key-file", str(places.key)),
            *_given("--metrics", metrics),
            *passed_on(scheduler.SECTIONS, options),
        ],
        stop_seconds=options.grace_seconds + _SCHEDULER_STOP_SECONDS,
        socket=socket_path(listen),
    )


def gateway_command(
    options: StackOptions, places: Places, api_key: ApiKey | None
) -> ServiceCommand | None:
    if places.http is None:
        return None
    return ServiceCommand(
        "gateway",
        [
            *("-m", "gateway_service"),
            *("--listen", places.http),
            # Its own scheduler, whatever name the certificate was issued for.
            *_given("--scheduler-cert", options.tls_cert),
            *_given("--metrics", places.metrics[-1] if places.metrics else None),
            *_given("--tokens", None if api_key is None else api_key.tokens_file),
            *passed_on(gateway.SECTIONS, options),
        ],
        stop_seconds=options.grace_seconds + _GATEWAY_STOP_SECONDS,
        # Both wait for the same requests: one after the other, they would wait twice.
        stops_with="scheduler",
    )


def _unless_default(value: int, option: Option[int]) -> int | None:
    return None if value == option.default else value


def _given(flag: str, value: object | None) -> list[str]:
    return [] if value is None else [flag, str(value)]
