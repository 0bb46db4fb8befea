"""What `up` passes on: every option arrives in the words of the service that it is for."""

from __future__ import annotations

import argparse
import json
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_names import instance_name
from typer.testing import CliRunner

from gateway_service.__main__ import parse_arguments as parse_gateway
from kvstore_service.__main__ import layout_of
from kvstore_service.__main__ import parse_arguments as parse_store
from kvstore_service.eviction.policies import POLICIES
from scheduler_service.__main__ import parse_arguments as parse_scheduler
from scheduler_service.limits import Limits
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.config import arena_path, make_runtime, remove_tree, runtime_path
from splitpoint.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    SplitpointError,
)
from splitpoint.host.memory import MemoryFacts, memory_facts
from splitpoint.host.processor import compiler
from splitpoint.options import gateway as gateway_options
from splitpoint.options import scheduler as scheduler_options
from splitpoint.options import store as store_options
from splitpoint.options import worker as worker_options
from splitpoint.options.option import RATE, SIZE, Option, all_options
from splitpoint.options.speculation import SpeculativeConfig, read_speculative_config
from splitpoint.shapes import Encoding, WeightFormat
from splitpoint.speculation import DraftMethod, Speculation
from splitpoint.transport.access import Caller, Role, find_caller, read_tokens
from splitpoint_cli.checks import memory
from splitpoint_cli.checks.finding import Finding, Verdict
from splitpoint_cli.checks.gpu import Driver, FreeMemory, Gpu
from splitpoint_cli.checks.ports import metrics_addresses, scheduler_addresses
from splitpoint_cli.files import share_secret
from splitpoint_cli.main import app
from splitpoint_cli.models import NamedModel, model_shape
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token
from splitpoint_cli.stack import up
from splitpoint_cli.stack.devices import visible_gpu_count
from splitpoint_cli.stack.options import PASSED, StackOptions, stack_options
from splitpoint_cli.stack.plan import Stack, plan_stack
from splitpoint_cli.stack.preflight import check_machine, check_secret, check_store_arguments
from worker_service.__main__ import parse_arguments as parse_worker
from worker_service.speculation.model_draft import DraftModel

INSTANCE = instance_name("options")
ENGINE = store_options.ENGINE


@pytest.fixture(autouse=True)
def runtime() -> Iterator[Path]:
    folder = runtime_path(INSTANCE)
    make_runtime(folder)
    yield folder
    remove_tree(folder)


def planned(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Stack:
    """What `splitpoint up` with these arguments would run."""
    stacks: list[Stack] = []

    async def run_stack(stack: Stack, **_: object) -> int:
        stacks.append(stack)
        return 0

    monkeypatch.setattr(up, "run_stack", run_stack)
    base = ("--device", "cpu", "--workers", "2", "--instance", INSTANCE)
    done = CliRunner().invoke(app, ["up", *base, *arguments])
    assert done.exit_code == 0, done.output
    [stack] = stacks
    return stack


def another_value(option: Option[Any]) -> Any:
    """Return a value that is allowed and not the default."""
    if option.kind is bool:
        return True
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    if option.unit in (SIZE, RATE):
        return "3MiB"
    if option.kind is str:
        return "other"
    least = option.least or 0
    between = least + (1 if option.most is None else option.most - least) / 4
    if option.kind is int:
        return int(between) + 1
    return between


def test_every_service_gets_its_options(tmp_path: Path) -> None:
    """Those that `up` only passes on, and of its own those that it passes on as they are."""
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text("secret\n")
    values = {name: another_value(option) for name, (_, option) in PASSED.items()} | {
        "kv_encoding": "int4",
        "cpu_kernels": "decode=products,prefill=sdpa,linear=packed",
        "redis": "rediss://ann@h",
        "redis_password_file": str(password),
        "redis_ca": "ca.pem",
        "log_format": "json",
        "max_model_len": 64,
    }
    stack = planned_with(workers=2, http="127.0.0.1:0", **values)
    assert stack.gateway is not None
    arrived = set()
    for service, command in (
        (store_options, parse_store(list(stack.store.arguments[2:]))),
        *((worker_options, parse_worker(list(each.arguments[2:]))) for each in stack.workers),
        (scheduler_options, parse_scheduler(list(stack.schedulers[0].arguments[2:]))),
        (gateway_options, parse_gateway(list(stack.gateway.arguments[2:]))),
    ):
        for option in all_options(service.SECTIONS):
            if option.field in values:
                assert getattr(command, option.field) == values[option.field] != option.default
                arrived.add(option.field)
    assert arrived == values.keys()
    assert layout_of(parse_store(list(stack.store.arguments[2:]))).encoding is Encoding.INT4


def test_a_file_and_set_reach_the_services_and_the_command_line_beats_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "up.toml"
    config.write_text(
        "evict-above = 0.9\nscrub-seconds = 60\ngrace = 7\nmax-batch = 3\nkeep-arena = true\n"
        'page-tokens = 32\nqueue-capacity = 5\nmax-requests = 9\nhttp = "127.0.0.1:0"\n'
    )
    stack = planned(
        monkeypatch,
        *("--config", str(config), "--set", "scrub-seconds=61", "--set", "max-batch=4"),
        *("--max-batch", "5", "--set", "keep-arena=false"),
    )
    store = parse_store(list(stack.store.arguments[2:]))
    assert (store.evict_above, store.scrub_seconds, store.chunk_tokens) == (0.9, 61.0, 32)
    assert not store.keep_arena
    assert [parse_worker(list(each.arguments[2:])).max_batch for each in stack.workers] == [5, 5]
    scheduler = parse_scheduler(list(stack.schedulers[0].arguments[2:]))
    assert (scheduler.grace_seconds, scheduler.queue_capacity) == (7.0, 5)
    assert stack.gateway is not None
    gateway = parse_gateway(list(stack.gateway.arguments[2:]))
    assert (gateway.max_requests, gateway.grace_seconds) == (9, 7.0)


def test_a_wrong_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "up.toml"
    config.write_text("evict-above = 2\n")
    done = CliRunner().invoke(app, ["up", "--config", str(config)])
    assert isinstance(done.exception, InvalidArgument)
    assert done.exception.field == "evict-above"
    assert str(config) in done.exception.message


def test_workers_get_their_speculation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for command in planned(monkeypatch).workers:
        assert parse_worker(list(command.arguments[2:])).speculative_config is None
    bundled = resolve_model(None)
    given = '{"method": "ngram", "num_speculative_tokens": 4}'
    stack = planned(monkeypatch, "--speculative-config", given, "--draft-model", str(bundled))
    for command in stack.workers:
        worker = parse_worker(list(command.arguments[2:]))
        config = read_speculative_config(worker.speculative_config, worker.draft_model)
        wanted = Speculation(DraftMethod.SUFFIX, 4)
        assert config == SpeculativeConfig(wanted, str(bundled))
    for wrong, said in (
        (StackOptions(device="cpu", speculative_config="{}"), "method is missing"),
        (StackOptions(device="cpu", speculative_config='{"method": "model"}'), "a draft model"),
        (StackOptions(device="cpu", draft_model=str(tmp_path)), "config.json"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            plan_stack(wrong)


def test_numerics_that_the_store_excludes_are_refused_before_anything_starts() -> None:
    wrong = StackOptions(device="cpu", numerics="invariant", kv_encoding="int8")
    with pytest.raises(InvalidArgument, match="needs --kv-encoding native"):
        plan_stack(wrong)


def test_another_vocabulary_is_refused_alike_before_anything_starts(tmp_path: Path) -> None:
    """By `up`, `size` and `doctor`, with the message of the worker."""
    bundled, draft = resolve_model(None), tmp_path / "draft"
    shutil.copytree(bundled, draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    renamed = max(known, key=known.__getitem__)
    known["another" + renamed] = known.pop(renamed)
    tokenizer["model"]["merges"] = []
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidArgument) as told:
        DraftModel.plan(
            draft,
            bundled,
            model_shape(bundled, "auto"),
            torch.device("cpu"),
            chunk_tokens=64,
            budget_bytes=1 << 30,
            max_batch_size=4,
            max_batched_tokens=64,
        )
    message = told.value.message
    assert message.startswith(f"{draft} cannot draft: its tokenizer is another one: token ")
    with pytest.raises(InvalidArgument) as refused:
        plan_stack(StackOptions(device="cpu", draft_model=str(draft)))
    assert refused.value.message == message
    arguments = ["--model", str(bundled), "--draft-model", str(draft)]
    sized = CliRunner().invoke(app, ["size", *arguments])
    assert isinstance(sized.exception, InvalidArgument)
    assert sized.exception.message == message
    config = json.dumps({"method": "draft_model", "model": str(draft)})
    for options in (("--draft-model", str(draft)), ("--speculative-config", config)):
        done = CliRunner().invoke(app, ["doctor", "--json", *options])
        assert done.exit_code == 1
        findings = json.loads(done.stdout)["findings"]
        (finding,) = (each for each in findings if each["name"] == "draft model")
        assert (finding["verdict"], finding["found"]) == ("problem", message)


def test_the_workers_get_what_is_said_of_their_lanes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stack = planned(
        monkeypatch,
        *("--serial", "--link-rate", "184MB/s", "--trace", str(tmp_path / "out.json")),
    )
    for number, command in enumerate(stack.workers):
        worker = parse_worker(list(command.arguments[2:]))
        assert worker.serial
        assert worker.link_rate == "184MB/s"
        assert worker.trace == tmp_path / f"out-{number}.json"


def test_what_is_not_given_is_left_to_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = planned(monkeypatch)
    arguments = list(stack.store.arguments[2:])
    flags = {word for word in arguments if word.startswith("--")}
    given = {"--listen", "--model", "--dtype", "--host-memory"}
    assert flags == given | {"--arena", "--replace-arena"}
    worker = parse_worker(list(stack.workers[0].arguments[2:]))
    assert worker.pin_limit is worker.link_rate is worker.trace is None
    assert not worker.serial


def test_choices_and_defaults_are_those_of_the_services() -> None:
    assert set(store_options.EVICTION.choices) == set(POLICIES)
    assert scheduler_options.QUEUE_CAPACITY.default == Limits().queue_capacity


def test_workers_that_share_a_gpu_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took 0.9 of what was free before any of them had loaded."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    free = FreeMemory((80 << 30, 40 << 30))
    stack = plan_stack(StackOptions(device="cuda", workers=3), lambda: free)
    assert stack.devices == ("cuda:0", "cuda:1", "cuda:0")
    sizes = [parse_worker([*each.arguments[2:]]).device_memory for each in stack.workers]
    # Two contexts of 0.5 GiB: one is there while torch is asked. The third has a GPU for itself.
    half = int(0.9 * ((80 << 30) - (512 << 20))) // 2
    assert sizes == [str(half), None, str(half)]
    # Each sees its own GPU only: else all of them would have a context on the first one.
    seen = [each.environment["CUDA_VISIBLE_DEVICES"] for each in stack.workers]
    assert seen == ["2", "5", "2"]
    assert {parse_worker([*each.arguments[2:]]).device for each in stack.workers} == {"cuda:0"}
    given = StackOptions(device="cuda", workers=3, device_memory="8GiB")
    for each in plan_stack(given, nothing_is_asked).workers:
        assert parse_worker([*each.arguments[2:]]).device_memory == "8GiB"
    plan_stack(StackOptions(device="cuda", workers=2), nothing_is_asked)
    plan_stack(StackOptions(device="cpu", workers=2), nothing_is_asked)
    with pytest.raises(InvalidArgument, match=r"unknown \(no driver\).*--device-memory"):
        plan_stack(StackOptions(device="cuda", workers=3), lambda: FreeMemory(error="no driver"))


def test_cpu_workers_get_equal_memory_and_the_same_after_a_restart() -> None:
    """Each took a part of what was free at its own start, and so another one after a restart."""
    shape = model_shape(resolve_model(None), "auto")
    stack = planned_with(workers=2, host_memory="64MiB")
    # A restart runs the same command.
    sizes = [parse_worker([*each.arguments[2:]]).device_memory for each in stack.workers]
    assert sizes[0] == sizes[1]
    weights = NamedModel(shape, resolve_model(None)).weight_sizes(is_gpu=False).total
    caches = int(sizes[0]) - weights
    assert 0 < caches <= worker_options.CPU_MEMORY_SHARE * memory_facts().total_bytes
    # What the arena takes is not free for workers.
    usable = memory_facts().usable_bytes
    [worker] = planned_with(host_memory=str(usable * 3 // 4)).workers
    left = int(parse_worker([*worker.arguments[2:]]).device_memory) - weights
    assert left < caches / 2


def nothing_is_asked() -> FreeMemory:
    raise AssertionError("the GPUs were asked")


def test_a_gpu_of_wsl2_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has /dev/dxg instead of a file for each GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one = Driver(gpus=(Gpu(0, "NVIDIA", 1 << 30, None),))
    assert visible_gpu_count(tmp_path, lambda: one) == 0
    (tmp_path / "dxg").touch()
    assert visible_gpu_count(tmp_path, lambda: one) == 1
    assert visible_gpu_count(tmp_path, lambda: Driver(error="no driver")) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpu_count(tmp_path, lambda: one) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"served_model_name": "a,,b"}, "--served-model-name: a name has"),
        ({"served_model_name": "a,a"}, "twice"),
        ({"max_model_len": 1 << 20}, "more than the context"),
        ({"max_model_len": 1}, "at least 2"),
        ({"api_key": "long-enough"}, "needs --http"),
        ({"api_key": "long-enough", "http": "127.0.0.1:0", "tokens": "TOKENS"}, "and --tokens"),
        ({"api_key": "short", "http": "127.0.0.1:0"}, "8 to 1,024"),
        ({"api_key": "two words", "http": "127.0.0.1:0"}, "without blanks"),
        ({"api_key": "12345678", "api_key_file": "KEY", "http": "127.0.0.1:0"}, "one of them"),
        ({"api_key_file": "KEY", "http": "127.0.0.1:0"}, "open to others"),
    ],
)
def test_names_bounds_and_keys_that_cannot_be_are_refused(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("12345678\n")
    key.chmod(0o644)
    add_token(tmp_path / "tokens.toml", Caller("alice", Role.CLIENT))
    paths = {"KEY": str(key), "TOKENS": str(tmp_path / "tokens.toml")}
    given = {name: paths.get(str(value), value) for name, value in arguments.items()}
    with pytest.raises((InvalidArgument, PermissionDenied), match=said):
        plan_stack(StackOptions(device="cpu", **given))


def test_the_api_key_reaches_no_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = "canary-key-4711"
    monkeypatch.setenv("SPLITPOINT_API_KEY", key)
    assert planned(monkeypatch).api_key is None  # there is no gateway that could ask for it
    from_variable = planned(monkeypatch, "--http", "127.0.0.1:0")
    monkeypatch.delenv("SPLITPOINT_API_KEY")
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(f"{key}\n")
    from_file = planned(monkeypatch, "--http", "127.0.0.1:0", "--api-key-file", str(file))
    for stack in (from_variable, from_file):
        assert stack.api_key is not None
        assert stack.gateway is not None
        assert key not in repr(stack)
        tokens = parse_gateway(list(stack.gateway.arguments[2:])).tokens
        assert tokens == str(stack.api_key.tokens_file)
        stack.api_key.write()
        stack.api_key.write()  # again, after its folder was removed
        assert stat.S_IMODE(stack.api_key.tokens_file.stat().st_mode) == 0o600
        [entry] = read_tokens(tokens)
        assert find_caller([entry], key) == Caller("api-key", Role.CLIENT)
        stack.api_key.tokens_file.unlink()


def test_every_service_has_its_port_for_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = planned(monkeypatch, "--metrics", "9400")
    commands = [*stack.schedulers, stack.store, *stack.workers]
    parsers: list[Callable[[list[str]], argparse.Namespace]]
    parsers = [parse_scheduler, parse_store, parse_worker, parse_worker]
    for i, (command, parse) in enumerate(zip(commands, parsers, strict=True)):
        parsed = parse(list(command.arguments[2:]))
        assert parsed.metrics == stack.metrics[i] == f"127.0.0.1:{9400 + i}"
        assert not parsed.metrics_open
    assert planned(monkeypatch).metrics == ()


def test_sockets_of_two_starts_have_different_names() -> None:
    first, second = (plan_stack(StackOptions(device="cpu", instance=INSTANCE)) for _ in range(2))
    assert first.store_address != second.store_address
    assert not set(first.worker_addresses) & set(second.worker_addresses)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (stack_options(pin_limit="lots"), InvalidArgument),
        (StackOptions(page_tokens="many"), InvalidArgument),
        (StackOptions(device="cpu", link_rate="0"), InvalidArgument),
        (StackOptions(device="cpu", link_rate="much"), InvalidArgument),
        (StackOptions(device="cpu", link_rate="20"), InvalidArgument),
        (StackOptions(device="cpu", trace="/no/such/folder/out.json"), InvalidArgument),
        (StackOptions(device="cpu", trace="/tmp"), InvalidArgument),
        (StackOptions(device="cpu", workers=2, metrics=65533), InvalidArgument),
        (StackOptions(device="cpu", metrics=0), InvalidArgument),
        # The default --listen is within.
        (StackOptions(device="cpu", workers=2, metrics=50047), InvalidArgument),
        (StackOptions(redis="http://h"), InvalidArgument),
        (StackOptions(redis_ca="ca.pem"), InvalidArgument),
        (StackOptions(redis="redis://h", redis_password_file="/etc/hostname"), PermissionDenied),
    ],
)
def test_nonsense_is_refused_before_anything_starts(
    options: StackOptions, error: type[SplitpointError]
) -> None:
    with pytest.raises(error):
        plan_stack(options)


@pytest.mark.parametrize("text", ["decode=warp", "warp", "", "decode=fused,linear"])
def test_kernels_are_checked_before_anything_starts(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--cpu-kernels: .* is none of auto, flags, decode="):
        plan_stack(StackOptions(device="cpu", cpu_kernels=text))


def test_every_service_gets_the_same_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number, under its old name, and by what `auto` chose here; the store knows why."""
    for flag in ("--page-tokens", "--chunk-tokens"):
        stack = planned(monkeypatch, flag, "32")
        parsed = parse_store(list(stack.store.arguments[2:]))
        assert (parsed.chunk_tokens, parsed.page_reason) == (32, "")
    stack = planned(monkeypatch, "--page-tokens", "auto")
    parsed = parse_store(list(stack.store.arguments[2:]))
    assert parsed.chunk_tokens == stack.pages.tokens
    assert parsed.page_reason == stack.pages.reason
    assert parsed.page_reason.startswith("auto: ")


def test_weights_reach_workers_and_the_identity_of_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunk keys contain the layout's hash: no key of an int8 worker is one of a native worker."""
    hashes = set()
    for name in ("native", "int8"):
        stack = planned(monkeypatch, "--weights", name)
        arguments = [list(each.arguments[2:]) for each in (stack.store, *stack.workers)]
        assert all(parse_worker(each).weights == name for each in arguments[1:])
        hashes.add(layout_of(parse_store(arguments[0])).layout_hash)
    assert len(hashes) == 2
    native = planned(monkeypatch)
    assert layout_of(parse_store(list(native.store.arguments[2:]))).layout_hash in hashes


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_the_check_of_memory_counts_weights_in_their_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []

    def check_memory(facts: MemoryFacts, arena: int, weights: int) -> Finding:
        counted.append(weights)
        return Finding("memory", Verdict.OK, "")

    monkeypatch.setattr(memory, "check_memory", check_memory)
    for name in ("native", "int8"):
        stack = planned(monkeypatch, "--weights", name)
        check_machine(stack, lambda *_: None)
        named = NamedModel(stack.shape, stack.model)
        assert counted[-1] == 2 * named.weight_sizes(WeightFormat(name), is_gpu=False).total
    assert counted[-1] < counted[0]


@pytest.mark.parametrize("kernels", ["flags", "linear=plain", "decode=products,linear=packed"])
def test_int8_weights_without_their_kernel_are_refused(kernels: str) -> None:
    with pytest.raises(InvalidArgument, match="--weights int8") as refused:
        plan_stack(StackOptions(device="cpu", weights="int8", cpu_kernels=kernels))
    assert refused.value.field == "cpu-kernels"


def test_several_schedulers_share_workers_key_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = planned(
        monkeypatch,
        *("--schedulers", "3", "--listen", "127.0.0.1:50100", "--metrics", "9400"),
        *("--queue-capacity", "7"),
    )
    assert [each.name for each in stack.schedulers] == ["scheduler 0", "scheduler 1", "scheduler 2"]
    parsed = [parse_scheduler(list(each.arguments[2:])) for each in stack.schedulers]
    assert [each.listen for each in parsed] == [f"127.0.0.1:{50100 + i}" for i in range(3)]
    assert [each.listen for each in parsed] == list(stack.listens)
    # After those of the first scheduler, the store and two workers.
    assert [each.metrics for each in parsed] == [f"127.0.0.1:{port}" for port in (9400, 9404, 9405)]
    assert len({each.server_key_file for each in parsed}) == 1
    assert all(each.worker == list(stack.worker_addresses) for each in parsed)
    assert all(each.queue_capacity == 7 for each in parsed)


def test_a_gateway_asks_all_schedulers_with_their_certificate_and_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert planned(monkeypatch).gateway is None
    make_certificates(tmp_path)
    tokens, certificate = tmp_path / "tokens.toml", tmp_path / "server.pem"
    add_token(tokens, Caller("alice", Role.CLIENT))
    stack = planned(
        monkeypatch,
        *("--schedulers", "2", "--listen", "127.0.0.1:50100", "--http", "0.0.0.0:8123"),
        *("--tls-cert", str(certificate), "--tls-key", str(tmp_path / "server-key.pem")),
        *("--tls-ca", str(tmp_path / "ca.pem"), "--tokens", str(tokens), "--grace", "7"),
        *("--metrics", "9400", "--log-format", "json"),
    )
    assert stack.gateway is not None
    command = stack.gateway.asking(stack.listens)
    gateway = parse_gateway(list(command.arguments[2:]))
    assert (gateway.listen, gateway.scheduler) == ("0.0.0.0:8123", ",".join(stack.listens))
    assert gateway.tls_cert == gateway.scheduler_cert == str(certificate)
    assert (gateway.tls_key, gateway.tokens) == (str(tmp_path / "server-key.pem"), str(tokens))
    assert (gateway.grace_seconds, gateway.log_format) == (7.0, "json")
    assert command.stop_seconds > gateway.grace_seconds
    # After those of both schedulers, the store and two workers.
    assert gateway.metrics == "127.0.0.1:9405"
    schedulers = [parse_scheduler(list(each.arguments[2:])) for each in stack.schedulers]
    assert [each.metrics for each in schedulers] == ["127.0.0.1:9400", "127.0.0.1:9404"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"http": "0.0.0.0:8000"}, "missing: --tls-cert"),
        ({"http": "127.0.0.1:50050"}, "is the scheduler's"),
        ({"http": "unix:/tmp/http"}, "HOST:PORT"),
        ({"http": "8000"}, "not an address"),
        ({"http": "127.0.0.1:9403", "metrics": 9400, "workers": 1}, r"9403 \(--http\)"),
    ],
)
def test_a_gateway_that_cannot_listen_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        plan_stack(StackOptions(device="cpu", **arguments))


@pytest.mark.parametrize(
    ("listen", "addresses"),
    [
        ("127.0.0.1:0", ["127.0.0.1:0", "127.0.0.1:0"]),
        ("unix:/tmp/s", ["unix:/tmp/s", "unix:/tmp/s-1"]),
        ("[::1]:50050", ["[::1]:50050", "[::1]:50051"]),
    ],
)
def test_schedulers_listen_beside_each_other(listen: str, addresses: list[str]) -> None:
    assert list(scheduler_addresses(listen, 2)) == addresses


def test_ports_of_schedulers_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="ports 65535 to 65536"):
        scheduler_addresses("127.0.0.1:65535", 2)
    with pytest.raises(InvalidArgument, match="clients connect to 50051"):
        metrics_addresses(50051, scheduler_addresses("127.0.0.1:50050", 2), 1)


# -- tiers ----------------------------------------------------------------------------------


def planned_with(**options: Any) -> Stack:
    """Return the plan of these options, without the checks that the store has of its own."""
    return plan_stack(stack_options(device="cpu", instance=INSTANCE, **options))


def test_the_store_gets_its_tiers_and_transfers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    stack = planned_with(
        tier_disk="chunks",
        tier_disk_size="1GiB",
        tier_pool="pool:50051",
        transfer=ENGINE,
        trusted_network=True,
    )
    store = parse_store(list(stack.store.arguments[2:]))
    assert (store.tier_disk, store.tier_disk_size) == (tmp_path / "chunks", "1GiB")
    assert (store.tier_pool, store.transfer) == ("pool:50051", ENGINE)
    assert store.trusted_network
    assert (stack.tier_disk, stack.tier_pool) == ((tmp_path / "chunks", 1 << 30), "pool:50051")


def test_the_secret_of_the_keys_lives_as_long_as_the_chunks(tmp_path: Path) -> None:
    """A disk tier that is opened again finds nothing under the keys of another secret."""

    def key_of(**options: Any) -> Path:
        words = list(planned_with(**options).schedulers[0].arguments)
        return Path(words[words.index("--server-key-file") + 1])

    disk: dict[str, Any] = {"tier_disk": str(tmp_path / "chunks"), "tier_disk_size": "1GiB"}
    assert key_of() == runtime_path(INSTANCE) / "key"
    assert key_of(keep_arena=True) == arena_path(INSTANCE).parent / "key"
    assert key_of(**disk) == tmp_path / "chunks/server.key"
    assert key_of(**disk, keep_arena=True) == tmp_path / "chunks/server.key"
    shared = tmp_path / "shared.key"
    assert key_of(**disk, server_key_file=str(shared)) == shared


def test_a_kept_arena_and_a_disk_tier_have_one_secret(tmp_path: Path) -> None:
    """So no chunk is lost when --tier-disk comes to a stack that kept its arena, or goes."""
    disk: dict[str, Any] = {"tier_disk": str(tmp_path / "chunks"), "tier_disk_size": "1GiB"}
    beside = arena_path(INSTANCE).parent / "key"
    assert planned_with(**disk).other_keys == planned_with(keep_arena=True).other_keys == ()
    assert planned_with(**disk, keep_arena=True).other_keys == (beside,)
    shared = str(tmp_path / "shared.key")
    assert planned_with(**disk, keep_arena=True, server_key_file=shared).other_keys == ()

    used, other = tmp_path / "used", tmp_path / "other"
    assert share_secret(used, [other]) == []
    assert not used.exists()
    other.write_bytes(b"of the arena")
    assert share_secret(used, [other]) == []
    assert used.read_bytes() == b"of the arena"
    assert stat.S_IMODE(used.stat().st_mode) == 0o600
    other.unlink()
    assert share_secret(used, [other]) == []
    assert other.read_bytes() == used.read_bytes()
    other.write_bytes(b"another")
    assert share_secret(used, [other]) == [other]
    assert (used.read_bytes(), other.read_bytes()) == (b"of the arena", b"another")
    with pytest.raises(FailedPrecondition, match="secret of the chunk keys"):
        share_secret(tmp_path / "no" / "used", [other])


def test_a_disk_tier_too_small_is_refused_before_the_store_starts(tmp_path: Path) -> None:
    def check(size: str) -> None:
        check_store_arguments(planned_with(tier_disk=str(tmp_path / "chunks"), tier_disk_size=size))

    with pytest.raises(InvalidArgument, match=r"at least 4 chunks: give it [0-9.]+ MiB or more"):
        check("1MiB")
    check("64MiB")
    assert not (tmp_path / "chunks").exists()


def test_a_folder_that_cannot_be_made_is_wrong_input(tmp_path: Path) -> None:
    folder = tmp_path / "no/chunks"
    stack = planned_with(tier_disk=str(folder), tier_disk_size="64MiB")
    with pytest.raises(InvalidArgument, match="mkdir -p") as caught:
        check_machine(replace(stack, listens=()), lambda *_: None)
    assert caught.value.exit_code == 2


def test_chunks_without_their_secret_are_told(tmp_path: Path) -> None:
    said: list[str] = []

    def look(**options: Any) -> str:
        said.clear()
        stack = planned_with(
            tier_disk=str(tmp_path / "chunks"), tier_disk_size="1GiB", keep_arena=True, **options
        )
        check_secret(stack, lambda name, text: said.append(f"{name}: {text}"))
        return " ".join(said)

    assert look() == ""
    layout = tmp_path / "chunks" / ("ab" * 16)
    layout.mkdir(parents=True)
    assert look() == ""
    (layout / "000000000001.segment").write_bytes(bytes(8192))
    key = tmp_path / "chunks/server.key"
    assert f"disk tier: {tmp_path / 'chunks'} has chunks, but {key} is missing" in look()
    shared = tmp_path / "shared.key"
    assert f"but {shared} is missing" in look(server_key_file=str(shared))
    key.write_bytes(bytes(32))
    assert look() == ""
    assert f"but {shared} is missing" in look(server_key_file=str(shared))


@pytest.mark.parametrize("engine", [{"transfer": ENGINE}, {"tier_pool": "pool:50051"}])
def test_an_engine_beside_tokens_needs_a_trusted_network(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    add_token(tokens, Caller("a", Role.CLIENT))
    given = {**engine, "tokens": str(tokens), "transfer_interface": "lo"}
    with pytest.raises(InvalidArgument, match="neither encryption nor authentication"):
        planned_with(**given)
    assert planned_with(**given, trusted_network=True).has_tokens


@pytest.mark.parametrize("name", ["", "-x", "a/b", "a" * 33])
def test_names_that_no_instance_has_are_refused(name: str) -> None:
    for command in ("up", "down", "doctor"):
        done = CliRunner().invoke(app, [command, "--instance", name, *_HERE[command]])
        if command == "doctor":
            assert f"{name!r} is not an instance name" in " ".join(done.output.split())
            assert done.exit_code == 1
        else:
            assert isinstance(done.exception, InvalidArgument), command
            assert done.exception.field == "instance"


_HERE = {"up": ("--device", "cpu"), "down": (), "doctor": ("--device", "cpu", "--json")}
