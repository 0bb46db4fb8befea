"""All checks in the order of the report, for a stack that is to be started.

A stack of this instance that is running already is checked, too: whether it serves.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from splitpoint import config
from splitpoint.arena import presence
from splitpoint.client import INFERENCE_SERVICE
from splitpoint.config import format_size, reachable_address, runtime_path
from splitpoint.costs.profile import MACHINES
from splitpoint.errors import InvalidArgument, ResourceExhausted, SplitpointError
from splitpoint.extras import need
from splitpoint.host.memory import default_host_memory, memory_facts
from splitpoint.options import store
from splitpoint.options.speculation import read_speculative_config
from splitpoint.options.worker import GPU_MEMORY_SHARE
from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.residency.batch_size import LEAST
from splitpoint.shapes import ArenaLayout, Encoding, ModelShape, WeightFormat
from splitpoint.transport.tls import read_identity, trusting_own_server
from splitpoint_cli.checks import disk, gpu, memory, model, ports, redis, security
from splitpoint_cli.checks.finding import Check, Finding, Places, Verdict, attempt, run_check
from splitpoint_cli.models import NamedModel
from splitpoint_cli.page_tokens import page_tokens_of
from splitpoint_cli.planning.sizing import Node, divided
from splitpoint_cli.request.probe import obstacle_of
from splitpoint_cli.stack.api_key import api_key_of
from splitpoint_cli.stack.devices import choose_devices, cpu_memory, visible_gpu_count
from splitpoint_cli.stack.instance import running_process
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.places import arena_bytes, instance_of
from splitpoint_cli.stack.plan import plan_stack
from splitpoint_cli.stack.preflight import check_store_arguments

_ANSWER_SECONDS = 3.0
_PLACES = Places()
# Names of findings about a model.
_MODELS = ("model", "draft model")
# The first Linux with open file description locks.
_LEAST_KERNEL = (3, 15)


@dataclass(frozen=True, slots=True)
class OwnStack:
    """A healthy stack of the instance, which itself uses the ports and the arena."""

    process_id: int
    address: str


def find_own_stack(
    instance: str, listen: str, *, certificate: str | None, key: str | None, ca: str | None
) -> OwnStack | None:
    """Return the stack of this name that serves at `listen`; None if there is none."""
    process_id = running_process(runtime_path(instance), seconds=0)
    if process_id is None:
        return None
    address = reachable_address(listen)
    try:
        identity = read_identity(certificate=certificate, key=key, authorities=ca)
        obstacle = obstacle_of(
            address,
            service=INFERENCE_SERVICE,
            identity=trusting_own_server(identity),
            seconds=_ANSWER_SECONDS,
        )
    except SplitpointError:  # wrong options, which are findings of other checks
        return None
    return OwnStack(process_id, address) if obstacle is None else None


def check_instance(instance: str, own: OwnStack | None) -> Finding:
    """Check whether a stack of this name runs already."""
    beside = "splitpoint up with another --listen port or --instance"
    if own is not None:
        return Finding(
            "instance",
            Verdict.OK,
            f"a stack of this instance is running: {instance}, process {own.process_id}, "
            f"serves at {own.address}",
            f"To start it anew: splitpoint down first; beside it: {beside}",
        )
    if running_process(runtime_path(instance), seconds=0) is None:
        return Finding("instance", Verdict.OK, f"no stack named {instance} is running")
    return Finding(
        "instance",
        Verdict.PROBLEM,
        f"a stack named {instance} is running",
        f"Stop it: splitpoint down --instance {instance}; or start another one beside it: {beside}",
    )


def check_kernel(system: os.uname_result) -> Finding:
    """Check that the kernel has the locks by which a store knows that a worker is gone."""
    # The part after the first dash is the distributor's.
    release = system.release.partition("-")[0]
    found = f"{system.sysname} {release} on {system.machine}"
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", release)[:2])
    if system.sysname != "Linux" or numbers < _LEAST_KERNEL:
        least = ".".join(map(str, _LEAST_KERNEL))
        return Finding("kernel", Verdict.PROBLEM, found, f"Linux {least} or newer is needed.")
    if system.machine != "x86_64":
        return Finding(
            "kernel",
            Verdict.WARNING,
            f"{found}: the arena's order of writes is only proven on x86-64",
            'Use an x86-64 host, or see docs/arena-format.md, "Order of writes".',
        )
    return Finding("kernel", Verdict.OK, found)


def check_locks(folder: Path) -> Finding:
    """Check in the folder of arenas that an open file sees the lock of another one."""
    name, session = "file locks", b"doctor\0\0"
    why = "one open file does not see the lock of another"
    with tempfile.NamedTemporaryFile(dir=folder, prefix="splitpoint-doctor-") as file:
        other = os.open(file.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            presence.hold(file.fileno(), session)
            if presence.is_held(other, session):
                return Finding(name, Verdict.OK, f"open file description locks work in {folder}")
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            os.close(other)
    return Finding(
        name,
        Verdict.PROBLEM,
        f"open file description locks do not work in {folder}: {why}",
        "Run on the host's own kernel (in a container: the default runtime, not a user-space "
        "kernel), or no store can tell whether a worker is alive.",
    )


def examine(options: StackOptions) -> Iterator[Finding]:
    """Yield every finding, in order. Does not raise."""
    own = attempt("instance", lambda: _own_stack(options))
    if isinstance(own, Finding):  # wrong options, which other checks report
        own = None
    can_plan = True
    for check in (*_machine(options), *_stack(options, own), *_network(options, own)):
        for finding in run_check(check):
            # A model that `up` would download first is only noted.
            is_absent = finding.name in _MODELS and finding.verdict is Verdict.NOTE
            can_plan = can_plan and finding.verdict is not Verdict.PROBLEM and not is_absent
            yield finding
    if can_plan:
        yield from run_check(Check("options", lambda: check_plan(options)))


def check_plan(options: StackOptions) -> Finding:
    """Check that `up` can plan a stack with these options. Raises what it raises."""
    if page_tokens_of(options.page_tokens) is None:  # `up` measures
        options = replace(options, page_tokens=str(store.CHUNK_TOKENS.default))
    check_store_arguments(plan_stack(options))
    return Finding("options", Verdict.OK, "`splitpoint up` takes them")


def _own_stack(options: StackOptions) -> OwnStack | None:
    return find_own_stack(
        _instance(options),
        options.listen,
        certificate=options.tls_cert,
        key=options.tls_key,
        ca=options.tls_ca,
    )


def _machine(options: StackOptions) -> Iterator[Check]:
    yield Check("kernel", lambda: check_kernel(os.uname()))
    yield Check("file locks", lambda: check_locks(_PLACES.shm))
    yield Check("open files", lambda: memory.check_open_files(*_limit(resource.RLIMIT_NOFILE)))


def _stack(options: StackOptions, own: OwnStack | None) -> Iterator[Check]:
    """Yield the checks of GPUs, the model, and the memory for both."""
    on_bus = gpu.pci_gpu_count(_PLACES)
    visible = visible_gpu_count()
    yield Check("GPU", lambda: gpu.check_presence(options.device, on_bus, visible))
    has_gpu = bool(visible) and options.device != "cpu"
    driver = gpu.read_driver() if has_gpu else gpu.Driver()
    if has_gpu:
        yield Check("driver", lambda: gpu.check_driver(driver))
        yield Check("torch", lambda: gpu.check_torch(gpu.ask_torch(), driver))
    known = attempt(
        _MODELS[0],
        lambda: model.find_model(
            options.model,
            options.dtype,
            options.model_backend,
            WeightFormat(options.weights),
            options.max_model_len,
        ),
    )
    served = model.FoundModel(known) if isinstance(known, Finding) else known
    shape = served.shape
    yield Check(_MODELS[0], lambda: served.finding)
    if served.folder is not None:
        yield from _checkpoint(served.folder, shape)
    draft = attempt("speculation", lambda: _draft_model(options, served))
    if isinstance(draft, Finding):
        wrong_options = replace(draft, advice="See `splitpoint up --help` and docs/speculation.md")
        yield Check("speculation", lambda: wrong_options)
    elif draft is not None:
        of_draft = draft.finding
        yield Check(_MODELS[1], lambda: of_draft)
    models = [
        NamedModel(each.shape, each.folder)
        for each in (served, draft)
        if isinstance(each, model.FoundModel) and each.shape is not None
    ]
    if shape is not None and own is None and not isinstance(draft, Finding):
        sizes = (each.memory_bytes for each in driver.gpus)
        gpu_bytes = [size for size in sizes if size is not None]
        yield Check("device memory", lambda: _device_memory(options, models, gpu_bytes))
    yield Check("memory", lambda: _memory(options, models, has_gpu=has_gpu, own=own))
    if options.tier_disk is not None or options.tier_disk_size != store.TIER_DISK_SIZE.default:
        folder = None if options.tier_disk is None else Path(options.tier_disk)
        yield Check(
            "disk tier",
            lambda: disk.check_tier_disk(
                folder,
                options.tier_disk_size,
                _PLACES,
                None if shape is None else _layout(shape, options),
            ),
        )
    yield Check(
        "huge pages", lambda: memory.check_huge_pages(options.passed["huge_pages"], _PLACES)
    )


def _layout(shape: ModelShape, options: StackOptions) -> ArenaLayout:
    """Return the layout of the store's chunks."""
    kept = {"auto": shape.activations_can_pay, "always": True, "never": False}
    return ArenaLayout.of(
        shape,
        # `auto` is measured by `up`.
        chunk_tokens=page_tokens_of(options.page_tokens) or store.CHUNK_TOKENS.default,
        has_activations=kept[options.passed["activations"]],
        encoding=Encoding(options.kv_encoding),
    )


def _checkpoint(folder: Path, shape: ModelShape | None) -> Iterator[Check]:
    yield Check("weights", lambda: model.check_weights(folder))
    if shape is not None:
        yield Check("tokenizer", lambda: model.check_tokenizer(folder, shape.vocabulary_size))
        yield Check("chat template", lambda: model.check_chat_template(folder))


def _draft_model(options: StackOptions, served: model.FoundModel) -> model.FoundModel | None:
    """Return the draft model; None if there is none. Raises InvalidArgument (options)."""
    wanted = read_speculative_config(options.speculative_config, options.draft_model)
    if wanted is None or wanted.model is None:
        return None
    return model.find_draft_model(wanted.model, served)


def _device_memory(
    options: StackOptions,
    models: Sequence[NamedModel],
    gpu_bytes: Sequence[int],
) -> Iterator[Finding]:
    """Divide a worker's memory as it does at its start. `models`: the served and the draft one."""
    name, served, devices = "device memory", models[0], _devices(options)
    is_gpu, most = devices[0] != "cpu", min(gpu_bytes, default=None)
    if options.device_memory is not None:
        budget = config.parse_size(options.device_memory, field="device_memory")
    elif not is_gpu:
        needed = max(0, _host_bytes(options) - arena_bytes(_arena(options)))
        sizes = served.weight_sizes(WeightFormat(options.weights), is_gpu=False)
        budget = cpu_memory(sizes.total, needed)
    elif most is not None:
        budget = int(GPU_MEMORY_SHARE * most) // devices.count(devices[0])
    else:
        return
    if is_gpu and most is not None and budget > most:
        yield Finding(
            name,
            Verdict.PROBLEM,
            f"{format_size(budget)} are asked for, a GPU has {format_size(most)}",
            f"Ask for less: --device-memory {most * 9 // 10 >> 20}MiB, or leave it out",
        )
        return
    drafts = read_speculative_config(options.speculative_config, options.draft_model)
    layout = _layout(served.shape, options)
    node = Node(
        # Its rates decide how many weights cross the link, and not whether any do.
        replace(MACHINES["h100"].profile, device_type="cuda" if is_gpu else "cpu"),
        budget,
        # What it must hold; a worker chooses a larger batch by what it measures, if that fits.
        max_batch=options.passed["max_batch"] or LEAST,
        max_batched_tokens=options.passed["max_batched_tokens"],
        chunk_tokens=layout.chunk_tokens,
        encoding=layout.encoding,
        weights=WeightFormat(options.weights),
        drafts=None if drafts is None else drafts.defaults.method,
        folder=served.folder,
        draft=models[1] if len(models) > 1 else None,
    )
    try:
        worker = divided(served.shape, node, has_activations=layout.has_activations)
    except ResourceExhausted as error:
        more = "Give it more: --device-memory SIZE"
        less = "--max-batch, --max-batched-tokens or --max-model-len"
        yield Finding(
            name, Verdict.PROBLEM, error.message, f"{more}; or ask for less of it: {less}"
        )
        return
    total, found = format_size(worker.sizes.total), worker.device.memory
    workspace, cache = map(format_size, (found.workspace_bytes, found.cache_capacity_bytes))
    if worker.device.placement.on_host == NOTHING_ON_HOST:
        yield Finding(
            name,
            Verdict.OK,
            f"{format_size(budget)}: weights {total}, workspace {workspace}, cache {cache}",
        )
    else:
        yield Finding(
            name,
            Verdict.WARNING,
            f"{total} of weights do not fit with a cache in {format_size(budget)}: some stay on "
            "the host, and most of these cross the link in every step (docs/memory.md)",
            "See what a step costs: splitpoint plan --model DIR --profile NAME|FILE "
            "--device-memory SIZE --cached K --new T",
        )


def _host_bytes(options: StackOptions) -> int:
    """Return the size of the arena, chosen or wished; 0 if there is no folder for it."""
    if options.host_memory is not None:
        return config.parse_size(options.host_memory, field="host_memory")
    there = arena_bytes(_arena(options))
    return there or (default_host_memory(_PLACES.shm) if _PLACES.shm.is_dir() else 0)


def _memory(
    options: StackOptions,
    models: Sequence[NamedModel],
    *,
    has_gpu: bool,
    own: OwnStack | None,
) -> Iterator[Finding]:
    """Check all uses of host memory, and the part that is to be page-locked."""
    there, size = arena_bytes(_arena(options)), _host_bytes(options)
    chosen = options.host_memory is None
    yield memory.check_shared_memory(_PLACES.shm, size, is_chosen=chosen, there_bytes=there)
    if models and not chosen:
        too_small = memory.check_chunks(size, _layout(models[0].shape, options))
        if too_small is not None:
            yield too_small
    # On a GPU node the weights are on the GPU; `_device_memory` speaks of them. Those of a
    # stack that runs are loaded already.
    weights = 0
    if not has_gpu and own is None:
        forms = (WeightFormat(options.weights), WeightFormat.NATIVE)
        held = (
            each.weight_sizes(form, is_gpu=False).total
            for each, form in zip(models, forms, strict=False)
        )
        weights = sum(held) * (options.workers or 1)
    facts = memory_facts(_PLACES.proc, _PLACES.sys / "fs/cgroup")
    yield memory.check_memory(facts, max(0, size - there), weights)
    pinned, limit = size, options.passed["pin_limit"]
    if limit is not None:
        pinned = min(size, config.parse_size(limit, field="pin_limit"))
    soft, _ = _limit(resource.RLIMIT_MEMLOCK)
    yield memory.check_locked_memory(soft, pinned, has_gpu=has_gpu)


def _metrics(first: int, options: StackOptions) -> Finding:
    """Check the ports of metrics, from this one on."""
    workers = len(_devices(options))
    listens = ports.scheduler_addresses(options.listen, options.schedulers)
    addresses = ports.metrics_addresses(first, listens, workers, http=options.http)
    return ports.check_metrics(addresses)


def _listen(options: StackOptions, *, has_tls: bool, has_tokens: bool) -> Iterator[Finding]:
    for address in ports.scheduler_addresses(options.listen, options.schedulers):
        yield ports.check_listen(address, has_tls=has_tls, has_tokens=has_tokens)


def _http(address: str, options: StackOptions) -> Finding:
    """Check the gateway's address, and that it is installed."""
    need("a gateway (--http)", "gateway")
    has_key = api_key_of(options, runtime_path(_instance(options))) is not None
    try:
        ports.check_http_address(
            address,
            ports.scheduler_addresses(options.listen, options.schedulers),
            has_tls=options.tls_cert is not None,
            has_tokens=options.tokens is not None or has_key,
        )
    except InvalidArgument as error:
        advice = "Listen at this host only: --http 127.0.0.1:8000, or see docs/security.md"
        return Finding("http", Verdict.PROBLEM, error.message, advice)
    return ports.check_free("http", address, "--http")


def _network(options: StackOptions, own: OwnStack | None) -> Iterator[Check]:
    has_tls, has_tokens = options.tls_cert is not None, options.tokens is not None
    yield Check("instance", lambda: check_instance(_instance(options), own))
    if own is None:  # else it uses the ports itself
        yield Check("listen", lambda: _listen(options, has_tls=has_tls, has_tokens=has_tokens))
    if options.http is not None and own is None:
        http = options.http
        yield Check("http", lambda: _http(http, options))
    if options.metrics is not None and own is None:
        metrics = options.metrics
        yield Check("metrics", lambda: _metrics(metrics, options))
    if options.redis is not None:
        url = options.redis
        yield Check(
            "Redis", lambda: redis.check_redis(url, options.redis_password_file, options.redis_ca)
        )
    if options.tls_cert or options.tls_key or options.tls_ca:
        yield Check(
            "TLS files",
            lambda: security.check_tls(
                options.tls_cert, options.tls_key, options.tls_ca, options.listen, datetime.now(UTC)
            ),
        )
    if options.tokens is not None:
        tokens = options.tokens
        yield Check("tokens", lambda: security.check_tokens(tokens))


def _devices(options: StackOptions) -> tuple[str, ...]:
    """Return the devices that `up` would choose; another check reports a missing GPU."""
    if options.device == "cuda" and not visible_gpu_count():
        return ("cuda:0",) * (options.workers or 1)
    return choose_devices(options.device, options.workers)


def _instance(options: StackOptions) -> str:
    return instance_of(options.listen, options.instance)


def _arena(options: StackOptions) -> Path:
    """Return the path of `config.arena_path`, below the folder that is checked."""
    return _PLACES.shm / f"splitpoint-{os.getuid()}-{_instance(options)}" / "arena"


def _limit(kind: int) -> tuple[int, int]:
    return resource.getrlimit(kind)
