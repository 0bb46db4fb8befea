"""Measure what a store gives engines of vLLM: first tokens, throughput, host memory, refused loads.

    python -m benchmarks.vllm_connector --python .venv-vllm/bin/python
        [--part first|throughput|replicas|slower ...] [--rounds N] [--json] [--output FILE]

Real processes on the CPU: `vllm serve` for each engine, and `splitpoint store`. Parts:

    first       the time to the first token of a prompt: cold, from pages that another engine has
                stored, and from the engine's own cache
    throughput  `vllm bench serve` of prompts with nothing to reuse, with the connector and without
    replicas    three engines with one store, then with a store each, under requests that share
                prefixes, for engines whose own cache is small: bytes on the host, and tokens found
    slower      an emulated link on which loading takes longer than computing

Each part takes less than five minutes with five rounds on two cores. Rounds alternate what is
compared. A request asks for one token, so its time is that of the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, parser_of, random_ids
from splitpoint.config import arena_path, counted, format_seconds, format_size, remove_tree
from splitpoint.errors import InvalidArgument, Unavailable
from splitpoint.v1 import kvstore_pb2
from splitpoint_cli.bench.ending import ARENA_PREFIX
from splitpoint_cli.request.observed import read_store
from splitpoint_cli.stack.child import child_environment
from splitpoint_cli.vllm_config import transfer_config

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "models" / "stdlib-llama"
PARTS = ("first", "throughput", "replicas", "slower")
# Tokens of the shared prefix of `first` and `slower`, and of what follows it.
PREFIX_TOKENS, REST_TOKENS = 1920, 30
# Of `throughput`.
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, CONCURRENT = 8, 200, 32, 4
# Of `replicas`: each prefix comes with several ends, at a replica drawn for each request.
REPLICAS, PREFIXES, ENDS, REPLICA_PREFIX_TOKENS = 3, 12, 8, 512
# The engines' own cache then: four prompts.
REPLICA_BLOCKS = 24
# A link that moves a token's 24 KiB in 25 ms.
SLOW_LINK = "1MB"

_START_SECONDS = 240.0
_STOP_SECONDS = 60.0
_STORED_SECONDS = 60.0
_POLL_SECONDS = 0.05
# A Llama of 138 M parameters with the bundled tokenizer's vocabulary: 24 KiB of cache a token.
_WRITE_MODEL = """
import sys, torch, transformers
torch.manual_seed(0)
shape = transformers.LlamaConfig(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
    num_attention_heads=16, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
    bos_token_id=0, eos_token_id=1,
)
transformers.LlamaForCausalLM(shape).to(torch.float32).save_pretrained(sys.argv[1])
"""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the seconds until it was whole.

    `told`: what the connector says of it; empty without one.
    """

    text: str
    seconds: float
    cached_tokens: int
    told: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Engine:
    """A `vllm serve` at a port of this host."""

    port: int
    model: Path
    process: subprocess.Popen[bytes]

    @property
    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, prompt: str | Sequence[int], max_tokens: int = 1) -> Answer:
        """Send a prompt, as a text or as token ids. Raises Unavailable."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": max_tokens}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**body, "temperature": 0}).encode(),
            {"content-type": "application/json"},
        )
        started = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=_START_SECONDS) as response:
                answer = json.load(response)
        except OSError as error:
            raise Unavailable(f"the engine at port {self.port}: {error}") from error
        seconds = time.perf_counter() - started
        details = answer["usage"].get("prompt_tokens_details") or {}
        told = (answer.get("kv_transfer_params") or {}).get("splitpoint") or {}
        text = str(answer["choices"][0]["text"])
        return Answer(text, seconds, int(details.get("cached_tokens") or 0), told)


@dataclass(frozen=True, slots=True)
class Store:
    """A `splitpoint store` at an address of this host."""

    address: str
    instance: str
    process: subprocess.Popen[bytes]

    @property
    def is_up(self) -> bool:
        return read_store(self.address).is_serving


class Processes:
    """Stores and engines; all of them end with the block."""

    def __init__(self, python: Path, logs: Path) -> None:
        """`python`: an interpreter that has vLLM. `logs`: a folder for what processes write."""
        self._python = python
        self._logs = logs
        self._end = ExitStack()
        self._count = 0

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def store(self, memory: str, *more: str, after: Store | None = None) -> Store:
        """Start a store, and return it once it answers.

        `more`: further options. `after`: one that has ended, whose address and arena it gets.
        """
        address = f"127.0.0.1:{_free_port()}" if after is None else after.address
        instance = f"{ARENA_PREFIX}{os.getpid()}-{self._count}" if after is None else after.instance
        words = ("store", "--listen", address, "--host-memory", memory, "--instance", instance)
        command = [sys.executable, "-m", "splitpoint_cli", *words, *more]
        # One that is kept, or of a store that was killed; after the process has ended.
        self._end.callback(remove_tree, arena_path(instance).parent)
        store = Store(address, instance, self._start(command, child_environment({}), "store"))
        _wait(store, f"the store at {address}")
        return store

    def engine(self, model: Path, store: Store | None, *more: str, **options: Any) -> Engine:
        """Start an engine, which is up after `ready`. None: without the connector.

        `more`: further options of `vllm serve`. `options`: as for `transfer_config`.
        """
        port = _free_port()
        words = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
        words += ["--max-model-len", "4096", "--enable-prompt-tokens-details"]
        # On a GPU two engines share it; a CPU's cache is what the environment says.
        words += ["--gpu-memory-utilization", "0.4", *more]
        if store is not None:
            words += ["--kv-transfer-config", json.dumps(transfer_config(store.address, **options))]
        command = [*vllm_command(self._python), "serve", str(model), *words]
        return Engine(port, model, self._start(command, engine_environment(), f"engine-{port}"))

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], name: str
    ) -> subprocess.Popen[bytes]:
        self._count += 1
        log = self._end.enter_context((self._logs / f"{name}-{self._count}.log").open("wb"))
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=dict(environment), start_new_session=True
        )
        self._end.callback(stop, process)
        return process


def ready(*engines: Engine) -> None:
    """Wait until engines answer. Raises Unavailable if one ends or takes too long."""
    for engine in engines:
        _wait(engine, f"the engine at {engine.url}")


def vllm_command(python: Path) -> list[str]:
    """Return the beginning of vLLM's command line in an interpreter's environment."""
    return [str(python), "-c", "from vllm.entrypoints.cli.main import main; main()"]


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine, which finds this source tree."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    return {**os.environ, **_ENGINE_ENVIRONMENT, **threads, "PYTHONPATH": str(ROOT)}


def _wait(started: Store | Engine, what: str) -> None:
    """Wait until something is up. Raises Unavailable if its process ends or it takes too long."""
    deadline = time.monotonic() + _START_SECONDS
    while not started.is_up:
        if started.process.poll() is not None:
            raise Unavailable(
                f"{what} ended with {started.process.returncode}: see its log (--logs)"
            )
        if time.monotonic() > deadline:
            raise Unavailable(f"{what} is not up after {_START_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started, by force after a time."""
    if process.poll() is None:
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    while _is_alive(process) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process, or one of its group, runs: they clean up behind it."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def stats_of(store: Store) -> kvstore_pb2.GetStatsResponse:
    """Return the statistics of a store that has an arena. Raises Unavailable."""
    found = read_store(store.address)
    if found.stats is None:
        raise Unavailable(f"the store at {store.address}: {found.message}")
    return found.stats


def used_bytes(stats: kvstore_pb2.GetStatsResponse) -> int:
    """Return the bytes of the slots that have pages."""
    return int(stats.sealed_slot_count * stats.layout.page_bytes)


def await_stored(store: Store) -> None:
    """Wait until no more pages arrive: the engine stores them behind its answer."""
    deadline, before = time.monotonic() + _STORED_SECONDS, -1
    while time.monotonic() < deadline:
        stats = stats_of(store)
        if stats.sealed_chunk_count == before and not stats.writing_slot_count:
            return
        before = stats.sealed_chunk_count
        time.sleep(1.0)
    raise Unavailable(f"the store at {store.address} gets pages without an end")


# -- the parts --------------------------------------------------------------------------


def measure_first(python: Path, model: Path, logs: Path, rounds: int) -> dict[str, Any]:
    """Measure the first token: cold, from the other engine's pages, from the own cache."""
    found: dict[str, list[float]] = {"cold": [], "other": [], "own": []}
    tokens: dict[str, int] = {}
    rng = random.Random(1)
    with Processes(python, logs) as processes:
        store = processes.store("1GiB")
        engines = [processes.engine(model, store) for _ in range(2)]
        ready(*engines)
        for engine in engines:
            engine.ask(random_ids(rng, PREFIX_TOKENS))  # the first steps take longer
        for number in range(rounds):
            computes, loads = engines if number % 2 == 0 else engines[::-1]
            prefix = random_ids(rng, PREFIX_TOKENS)
            cold = computes.ask([*prefix, *random_ids(rng, REST_TOKENS)])
            await_stored(store)
            rest = random_ids(rng, REST_TOKENS)
            other = loads.ask([*prefix, *rest])
            own = computes.ask([*prefix, *rest])
            if other.text != own.text:
                raise Unavailable(f"another answer from loaded pages: {other.text!r}, {own.text!r}")
            for name, answer in (("cold", cold), ("other", other), ("own", own)):
                found[name].append(answer.seconds)
                tokens[name] = answer.cached_tokens
    return {
        "prompt_tokens": PREFIX_TOKENS + REST_TOKENS,
        "cached_tokens": tokens,
        "seconds": found,
        "ratio": {
            name: statistics.median(
                each / cold for each, cold in zip(found[name], found["cold"], strict=True)
            )
            for name in ("other", "own")
        },
    }


def measure_throughput(python: Path, model: Path, logs: Path, rounds: int) -> dict[str, Any]:
    """Measure tokens per second of prompts with nothing to reuse, with and without a connector."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    with Processes(python, logs) as processes:
        store = processes.store("1GiB")
        engines = {
            "with": processes.engine(model, store),
            "without": processes.engine(model, None),
        }
        ready(*engines.values())
        for name, engine in engines.items():
            _bench_serve(python, engine, logs, seed=99, name=f"{name}-warm-up")
        for number in range(rounds):
            order = list(engines) if number % 2 == 0 else list(engines)[::-1]
            for name in order:
                report = _bench_serve(python, engines[name], logs, number, f"{name}-{number}")
                found[name].append(float(report["total_token_throughput"]))
        stored = stats_of(store).sealed_chunk_count
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    return {
        "tokens_per_second": found,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "stored_pages": stored,
    }


def _bench_serve(python: Path, engine: Engine, logs: Path, seed: int, name: str) -> dict[str, Any]:
    """Run vLLM's own client; return its report. Raises Unavailable if a request failed."""
    report = logs / f"bench-{name}.json"
    words = [
        *("bench", "serve", "--backend", "openai", "--base-url", engine.url),
        *("--model", str(engine.model), "--dataset-name", "random", "--seed", str(seed)),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS)),
        *("--num-prompts", str(PROMPTS), "--max-concurrency", str(CONCURRENT), "--ignore-eos"),
        *("--disable-tqdm", "--save-result", "--result-filename", str(report)),
    ]
    with (logs / f"bench-{name}.log").open("wb") as log:
        done = subprocess.run(
            [*vllm_command(python), *words], stdout=log, stderr=log, env=engine_environment()
        )
    if done.returncode:
        raise Unavailable(f"vllm bench serve ended with {done.returncode}: see {log.name}")
    told: dict[str, Any] = json.loads(report.read_text())
    if told["completed"] != PROMPTS:
        raise Unavailable(f"{told['completed']} of {PROMPTS} requests completed: see {log.name}")
    return told


def measure_replicas(python: Path, logs: Path) -> dict[str, Any]:
    """Compare three engines with one store to three with a store each."""
    rng = random.Random(3)
    prefixes = [random_ids(rng, REPLICA_PREFIX_TOKENS) for _ in range(PREFIXES)]
    requests = [
        (rng.randrange(REPLICAS), [*prefix, *random_ids(rng, REST_TOKENS)])
        for prefix in prefixes
        for _ in range(ENDS)
    ]
    rng.shuffle(requests)
    return {
        name: _replicas_run(python, logs, requests, is_shared=name == "one_store")
        for name in ("one_store", "own_stores")
    }


def _replicas_run(
    python: Path, logs: Path, requests: Sequence[tuple[int, list[int]]], *, is_shared: bool
) -> dict[str, Any]:
    """Send the requests in order, one at a time to each replica."""
    with Processes(python, logs) as processes:
        stores = [processes.store("512MiB") for _ in range(1 if is_shared else REPLICAS)]
        blocks = ("--num-gpu-blocks-override", str(REPLICA_BLOCKS), "--max-model-len", "2048")
        engines = [
            processes.engine(BUNDLED, store, *blocks) for store in (stores * REPLICAS)[:REPLICAS]
        ]
        ready(*engines)

        def run(replica: int) -> list[Answer]:
            return [engines[replica].ask(prompt) for each, prompt in requests if each == replica]

        with ThreadPoolExecutor(REPLICAS) as pool:
            answers = [answer for each in pool.map(run, range(REPLICAS)) for answer in each]
        for store in stores:
            await_stored(store)
        stats = [stats_of(store) for store in stores]
    prompt_tokens = sum(len(prompt) for _, prompt in requests)
    loaded = sum(int(answer.told.get("loaded_tokens") or 0) for answer in answers)
    return {
        "requests": len(requests),
        "host_bytes": sum(map(used_bytes, stats)),
        "loaded_share": loaded / prompt_tokens,
        "cached_share": sum(answer.cached_tokens for answer in answers) / prompt_tokens,
        "mean_seconds": statistics.mean(answer.seconds for answer in answers),
        "reasons": dict(Counter(str(answer.told.get("reason")) for answer in answers)),
    }


def measure_slower(python: Path, model: Path, logs: Path, rounds: int) -> dict[str, Any]:
    """Ask an engine behind a slow link for what another engine has stored."""
    rng = random.Random(4)
    told: list[Mapping[str, Any]] = []
    found: dict[str, list[float]] = {"cold": [], "behind_the_link": []}
    with Processes(python, logs) as processes:
        store = processes.store("1GiB")
        fast = processes.engine(model, store)
        slow = processes.engine(model, store, link_rate=SLOW_LINK)
        ready(fast, slow)
        # It knows neither step nor link before: the first load is how it learns of the link.
        first = random_ids(rng, 2 * 128 + REST_TOKENS)
        fast.ask(first)
        await_stored(store)
        slow.ask(random_ids(rng, PREFIX_TOKENS))
        told.append(slow.ask(first).told)
        for _ in range(rounds):
            prompt = random_ids(rng, PREFIX_TOKENS + REST_TOKENS)
            found["cold"].append(fast.ask(prompt).seconds)
            await_stored(store)
            answer = slow.ask(prompt)
            found["behind_the_link"].append(answer.seconds)
            told.append(answer.told)
    return {
        "link_rate": SLOW_LINK,
        "seconds": found,
        "reasons": [each.get("reason") for each in told],
        "told": told,
    }


# -- the program ------------------------------------------------------------------------


def write_model(python: Path, folder: Path) -> Path:
    """Write a random Llama with the bundled tokenizer. Raises InvalidArgument."""
    done = subprocess.run(
        [str(python), "-c", _WRITE_MODEL, str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        raise InvalidArgument(f"--python {python}: {done.stderr.strip()}", field="python")
    for name in _TOKENIZER_FILES:
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    return folder


def show(report: Mapping[str, Any]) -> None:
    """Print the results for people."""
    if (first := report.get("first")) is not None:
        for name, seconds in first["seconds"].items():
            print(f"first token, {name}: {format_seconds(statistics.median(seconds))}")
        print(f"relative to cold: {json.dumps(first['ratio'])}")
    if (throughput := report.get("throughput")) is not None:
        for name, rates in throughput["tokens_per_second"].items():
            print(f"throughput {name} the connector: {statistics.median(rates):.1f} tokens/s")
        print(f"with, relative to without: {throughput['ratio']:.3f}")
    if (replicas := report.get("replicas")) is not None:
        for name, run in replicas.items():
            print(
                f"{name}: {format_size(run['host_bytes'])} of pages, {run['loaded_share']:.1%} of "
                f"{counted(run['requests'], 'prompt')}' tokens loaded, {run['cached_share']:.1%} "
                f"not computed, first token after {format_seconds(run['mean_seconds'])}"
            )
    if (slower := report.get("slower")) is not None:
        print(f"behind a link of {slower['link_rate']}/s: {', '.join(slower['reasons'])}")
        for name, seconds in slower["seconds"].items():
            print(f"first token, {name}: {format_seconds(statistics.median(seconds))}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--python",
        type=Path,
        default=ROOT / ".venv-vllm" / "bin" / "python",
        metavar="PATH",
        help="interpreter that has vLLM; default: that of `make vllm-setup`",
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="what is measured; default: everything"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder for the processes' logs; default: none"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    finish(arguments, measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts."""
    parts = arguments.part or PARTS
    report: dict[str, Any] = {"rounds": arguments.rounds, "seed": 0}
    with tempfile.TemporaryDirectory(prefix="splitpoint-bench-") as folder:
        logs = Path(folder) if arguments.logs is None else arguments.logs
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(folder) / "llama"
        if set(parts) - {"replicas"}:
            write_model(arguments.python, model)
        if "first" in parts:
            report["first"] = measure_first(arguments.python, model, logs, arguments.rounds)
        if "throughput" in parts:
            report["throughput"] = measure_throughput(
                arguments.python, model, logs, arguments.rounds
            )
        if "replicas" in parts:
            report["replicas"] = measure_replicas(arguments.python, logs)
        if "slower" in parts:
            report["slower"] = measure_slower(arguments.python, model, logs, arguments.rounds)
    return report


if __name__ == "__main__":
    main()
