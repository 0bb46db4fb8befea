"""Engines of vLLM, each in a child forked from this process after vLLM was imported, and a store.

An import of vLLM takes seconds. The parent neither computes nor opens a channel: threads of torch
and gRPC would not survive the fork.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from own_names import free_ports, shared_memory_folder
from waiting import wait_until

SECONDS = 120.0
VOCABULARY = 2000


def import_vllm() -> None:
    """Import what an engine needs, for all children."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.llm import LLM  # noqa: F401
        from vllm.sampling_params import SamplingParams  # noqa: F401
        from vllm.v1.engine import core  # noqa: F401
        from vllm.v1.worker import cpu_worker  # noqa: F401

        import splitpoint_vllm.connector  # noqa: F401


# -- the store -----------------------------------------------------------------------------


class Store:
    """A store process on a port of its own, with an arena of pages that it keeps."""

    def __init__(self, folder: Path, *, memory: str = "128MiB", page_size: str = "auto") -> None:
        self.address = f"127.0.0.1:{free_ports(1)}"
        self.folder = shared_memory_folder()
        self._options = ["--host-memory", memory, "--page-size", page_size, "--lease-seconds", "2"]
        self._log = folder / f"store-{self.folder.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def arena(self) -> Path:
        return self.folder / "arena"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "kvstore_service", "--listen", self.address]
        command += ["--arena", str(self.arena), "--keep-arena", *self._options]
        with self._log.open("ab") as log:
            size = log.tell()
            process = self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: b"READY" in self._log.read_bytes()[size:] or process.poll())
        assert process.poll() is None, self.log

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def __enter__(self) -> Store:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder)

    def stats(self) -> dict[str, Any]:
        """Return the store's GetStats, with a check of its structures."""
        found: dict[str, Any] = in_child(lambda: _stats(self.address))
        return found


def _stats(address: str) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    from splitpoint.transport.channels import open_sync_channel
    from splitpoint.v1 import kvstore_pb2 as pb
    from splitpoint.v1 import kvstore_pb2_grpc

    with open_sync_channel(address) as channel:
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        answer = stub.GetStats(pb.GetStatsRequest(check_integrity=True), timeout=10)
    found: dict[str, Any] = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


# -- children ------------------------------------------------------------------------------


def in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a forked child, by way of JSON."""
    with _forked(lambda _, answers: answers.write(json.dumps(work()) + "\n")) as child:
        return child.answer()


class _Child:
    def __init__(self, process_id: int, requests: Any, answers: Any) -> None:
        self.process_id = process_id
        self._requests = requests
        self._answers = answers

    def answer(self) -> Any:
        line = self._answers.readline()
        assert line, "the child ended"
        found = json.loads(line)
        if isinstance(found, dict) and "child failed" in found:
            raise AssertionError(found["child failed"])
        return found

    def ask(self, request: object) -> Any:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return self.answer()


@contextmanager
def _forked(work: Callable[[Any, Any], None]) -> Iterator[_Child]:
    """Run `work` with files of requests and answers in a child; it ends when requests do."""
    request_read, request_write = os.pipe()
    answer_read, answer_write = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        code = 1
        try:
            os.close(request_write)
            os.close(answer_read)
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
            signal.alarm(0)
            with os.fdopen(request_read) as requests, os.fdopen(answer_write, "w", 1) as answers:
                try:
                    work(requests, answers)
                    code = 0
                except BaseException:
                    answers.write(json.dumps({"child failed": traceback.format_exc()}) + "\n")
        finally:
            os._exit(code)
    os.close(request_read)
    os.close(answer_write)
    with os.fdopen(request_write, "w") as requests, os.fdopen(answer_read) as answers:
        try:
            yield _Child(process_id, requests, answers)
        finally:
            requests.close()
            _end(process_id)


def _end(process_id: int) -> None:
    """Wait for a child; kill it if it does not end by itself."""
    deadline = time.monotonic() + SECONDS / 4
    while os.waitpid(process_id, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)
            raise AssertionError("an engine did not end")
        time.sleep(0.02)


# -- engines -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One answer. `cached`: prompt tokens that were not computed. `splitpoint`: what it tells."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    splitpoint: dict[str, Any] | None
    seconds: float

    @property
    def reason(self) -> str:
        assert self.splitpoint is not None
        return str(self.splitpoint["reason"])


class Engine:
    """An engine in a child."""

    def __init__(self, child: _Child) -> None:
        self._child = child

    def generate(self, *prompts: Sequence[int], tokens: int = 12, **options: Any) -> list[Answer]:
        """Answer all prompts at once, greedily; then wait until everything is stored."""
        request = {"prompts": prompts, "tokens": tokens, "options": options}
        return [Answer(**found) for found in self._child.ask(request)]

    def ask(self, question: str) -> Any:
        """Return what `ENGINE_QUESTIONS[question]` returns in the child."""
        return self._child.ask({"question": question})


# Asked of the engine in its child: called with vLLM's LLM.
ENGINE_QUESTIONS: dict[str, Callable[[Any], Any]] = {}


@contextmanager
def engine(
    model: Path,
    store: str | None,
    *,
    prepare: Callable[[], None] = lambda: None,
    waits: bool = True,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """Run an engine. `store`: its address; None: without a connector.

    `prepare` runs in the child before the engine is made; `waits`: begin with a session of the
    store; `extra`: options of the connector.
    """

    def serve(requests: Any, answers: Any) -> None:
        prepare()
        llm = _llm(model, store, extra or {}, options)
        if waits:
            _wait_connected(llm)
        answers.write('"ready"\n')
        for line in requests:
            request = json.loads(line)
            if "question" in request:
                found = ENGINE_QUESTIONS[request["question"]](llm)
            else:
                found = _generate(llm, request)
            answers.write(json.dumps(found) + "\n")
        llm.llm_engine.engine_core.shutdown()

    with _forked(serve) as child:
        assert child.answer() == "ready"
        yield Engine(child)


def _llm(model: Path, store: str | None, extra: dict[str, Any], options: dict[str, Any]) -> Any:
    from vllm.entrypoints.llm import LLM

    given: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **options,
    }
    if store is not None:
        given["kv_transfer_config"] = {
            "kv_connector": "SplitpointConnector",
            "kv_connector_module_path": "splitpoint_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "SplitpointSpec",
                "spec_module_path": "splitpoint_vllm.spec",
                "store": store,
                # Engine and session share a process here, and a busy host answers late.
                "lookup_seconds": 1.0,
                **extra,
            },
        }
    return LLM(model=str(model), **given)


def _wait_connected(llm: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    if connector is not None:
        assert connector._manager._finder.wait_connected(SECONDS)
    if has_kv_transfer_group():  # else workers are other processes
        worker = get_kv_transfer_group().connector_worker.worker
        assert worker._transfers._store.wait_connected(SECONDS)


def _generate(llm: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm.sampling_params import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["tokens"],
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        **request["options"],
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    started = time.monotonic()
    found = []
    for each in llm.generate(prompts, sampling, use_tqdm=False):
        (output,) = each.outputs
        tokens = list(output.token_ids)
        found.append(
            {
                "tokens": tokens,
                "logprobs": [
                    step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)
                ],
                "cached": each.num_cached_tokens or 0,
                "splitpoint": (each.kv_transfer_params or {}).get("splitpoint"),
                "seconds": time.monotonic() - started,
            }
        )
    settle(llm)
    return found


def settle(llm: Any) -> None:
    """Step the engine until what it has to store is stored: idle, it does not step by itself."""
    core = llm.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + SECONDS
    while core.scheduler.has_requests():
        core.step()
        assert time.monotonic() < deadline, "the engine does not become idle"
        time.sleep(0.001)


# -- prompts and models --------------------------------------------------------------------


def prompt(seed: int, count: int, *, after: Sequence[int] = ()) -> list[int]:
    """Return random tokens, after these."""
    generator = random.Random(seed)
    return [*after, *(generator.randrange(5, VOCABULARY) for _ in range(count))]


def make_models(folder: Path) -> None:
    """Write a small random checkpoint of each family."""
    in_child(lambda: _make_models(folder))


def _make_models(folder: Path) -> None:
    import torch

    hf: Any = importlib.import_module("transformers")

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "max_position_embeddings": 8192,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    wide = {"intermediate_size": 256}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    made: dict[str, Callable[[], Any]] = {
        "opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                **{**small, "max_position_embeddings": 4096},
                num_hidden_layers=3,
                ffn_dim=256,
                num_attention_heads=2,
                word_embed_proj_dim=128,
            )
        ),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**small, **heads, **wide, num_hidden_layers=3)
        ),
        "qwen3moe": lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **small, **heads, **wide, **experts, num_experts=8, num_hidden_layers=3
            )
        ),
        "gemma3": lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(
                **small,
                **heads,
                **wide,
                num_hidden_layers=6,
                sliding_window=256,
                layer_types=["sliding_attention"] * 5 + ["full_attention"],
            )
        ),
        "gptoss": lambda: hf.GptOssForCausalLM(
            hf.GptOssConfig(
                **small,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=128,
            )
        ),
        "qwen3next": lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(
                **small,
                **heads,
                **wide,
                **experts,
                num_experts=4,
                num_hidden_layers=4,
                shared_expert_intermediate_size=64,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
            )
        ),
        "mla": lambda: hf.DeepseekV2ForCausalLM(
            hf.DeepseekV2Config(
                **small,
                **wide,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                kv_lora_rank=512,
                q_lora_rank=None,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                n_routed_experts=4,
                n_shared_experts=1,
                first_k_dense_replace=1,
                topk_group=1,
                n_group=1,
            )
        ),
    }
    for name, make in made.items():
        model = make().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.05)
        model.to(torch.float32).save_pretrained(folder / name)
