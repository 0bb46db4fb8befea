"""Peers of `bench decode`: which there are, and their processes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.shapes import BUILT_IN_SHAPES, DataType
from splitpoint_cli.bench.peer_child import Load, Timing, Work, cache_bytes
from splitpoint_cli.bench.peers import (
    PEERS,
    PeerProcess,
    check_peers,
    interpreters_of,
    parse_peers,
    start_peer,
)

# Interpreters that have peers, separated by colons: with it, their tokens are compared, too.
PEER_PYTHONS = [Path(path) for path in os.environ.get("SPLITPOINT_PEER_PYTHONS", "").split(":")]


def load(peer: str = "vllm", **changes: Any) -> Load:
    return replace(Load(peer, "", "float32", 1, 2, 32), **changes)


def interpreter(tmp_path: Path, text: str) -> str:
    """An interpreter for `-m MODULE` that does what the text says instead."""
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# -- names ------------------------------------------------------------------------------


def test_peers_are_named_once_and_must_exist() -> None:
    assert parse_peers("vllm, transformers,vllm") == ("vllm", "transformers")
    assert parse_peers("none") == ()
    for text in ("abacus", "", " ,"):
        with pytest.raises(InvalidArgument, match="transformers, vllm"):
            parse_peers(text)


def test_a_peer_that_cannot_compute_the_model_is_refused_at_once() -> None:
    llama = BUILT_IN_SHAPES["llama-168m"]
    check_peers(["transformers", "vllm"], BUILT_IN_SHAPES["opt-125m"], "cpu")
    check_peers(["transformers"], llama, "cuda")
    with pytest.raises(InvalidArgument, match="vllm computes opt and llama here, not qwen2"):
        check_peers(["vllm"], replace(llama, family="qwen2"), "cpu")
    with pytest.raises(InvalidArgument, match="runs on the CPU only"):
        check_peers(["vllm"], llama, "cuda")
    with pytest.raises(InvalidArgument, match="float32 and bfloat16"):
        check_peers(["vllm"], replace(llama, data_type=DataType.FLOAT16), "cpu")


# -- processes --------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    # -S: no installed packages, wherever this test runs.
    bare = interpreter(tmp_path, f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    with pytest.raises(FailedPrecondition, match="pip install transformers torch`") as caught:
        start_peer(load("transformers"), [bare])
    assert caught.value.reason == "NO_PEER"
    assert f"not installed in {bare}: " in str(caught.value)
    assert "--peer-python DIR/bin/python" in str(caught.value)


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(InvalidArgument, match="nowhere cannot be run") as caught:
        start_peer(load(), interpreters_of([missing]))
    assert caught.value.field == "peer_python"


# A peer's process as the benchmark sees it: it tells its surroundings, then what it was asked.
DOUBLE = f"""#!{sys.executable}
import json, os, sys
load = json.loads(sys.stdin.readline())
print(json.dumps({{"variants": ["", "fast"], "version": load["peer"]}}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work["variant"] == "fast":
        print(json.dumps({{"error": "too fast", "is_missing": False}}), flush=True)
        continue
    print("native noise", file=sys.stderr)
    own = [name for name in ("PYTHONPATH", "GOMP_SPINCOUNT") if name in os.environ]
    files = sorted(f"{{root}}/{{f}}" for root, _, found in os.walk(".", followlinks=True)
                   for f in found if f.endswith(".py"))
    assert not own and files == ["./peer_child.py"]
    tokens = [prompt[:1] * work["new_tokens"] for prompt in work["prompts"]]
    print(json.dumps(dict(seconds=2.0, first_token_seconds=0.5, tokens_before=2, tokens=tokens)))
    sys.stdout.flush()
"""


def test_a_peer_answers_in_a_process_of_its_own_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peer = PeerProcess(interpreter(tmp_path, DOUBLE), load())
    try:
        assert peer.variants == ("", "fast")
        assert peer.version == "vllm"
        timing = peer.run(Work("", [[7, 8], [9, 9]], 3))
        assert timing == Timing(2.0, 0.5, 2, [[7, 7, 7], [9, 9, 9]])
        with pytest.raises(FailedPrecondition, match="too fast; its last messages: native noise"):
            peer.run(Work("fast", [[7]], 3))
    finally:
        peer.close()


def test_a_peer_that_dies_or_hangs_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    dying = interpreter(tmp_path, "#!/bin/sh\nread line\necho 'no such instruction' >&2\nexit 3\n")
    with pytest.raises(Unavailable, match="vllm ended: no such instruction"):
        PeerProcess(dying, load())
    hanging = interpreter(tmp_path, "#!/bin/sh\nwhile read line; do :; done\n")
    with pytest.raises(Unavailable, match="has not answered for 0 s"):
        PeerProcess(hanging, load(), load_seconds=0.1)


# vLLM as far as the peer uses it: it tells its settings and answers with the prompts' first tokens,
# one more with each step, the second request a step later.
VLLM = """
import os
from types import SimpleNamespace as Facts

names = ("OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING")
__version__ = " ".join(os.environ[name] for name in names)  # read when it is imported


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.count = max_tokens


class LLM:
    def __init__(self, folder, *, dtype, max_model_len, max_num_seqs, skip_tokenizer_init,
                 enable_prefix_caching):
        assert os.path.exists(folder + "/config.json") and skip_tokenizer_init
        assert (dtype, max_model_len, max_num_seqs, enable_prefix_caching) == (
            "float32", 32, 2, False)
        self.llm_engine, self.known, self.open = self, set(), {}

    def add_request(self, name, prompt, sampling):
        assert name not in self.known
        self.known.add(name)
        self.open[name] = (prompt["prompt_token_ids"][0], sampling.count, [-1] * len(self.open))

    def has_unfinished_requests(self):
        return bool(self.open)

    def step(self):
        outputs = []
        for name, (token, count, tokens) in [*self.open.items()]:
            if tokens[:1] == [-1]:
                tokens.clear()
                continue
            tokens.append(token)
            if len(tokens) == count:
                del self.open[name]
            outputs.append(Facts(request_id=name, outputs=[Facts(token_ids=tuple(tokens))]))
        return outputs
"""


def test_vllm_is_stepped_with_room_for_the_whole_workload(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    python = interpreter(
        tmp_path, f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n'
    )
    folder = write_tiny("llama", tmp_path / "model")
    peer = PeerProcess(python, load(checkpoint=str(folder), threads=3))
    try:
        assert (peer.variants, peer.version) == (("",), "vllm 3 1 0")
        for _ in range(2):  # each request of an engine has a name of its own
            timing = peer.run(Work("", [[7, 8], [9, 9]], 3))
            assert timing.tokens == [[7, 7, 7], [9, 9, 9]]
            # The second request has its first token in the second step.
            assert timing.tokens_before == 3
            assert 0 < timing.first_token_seconds < timing.seconds
    finally:
        peer.close()
    # 12 layers of K and V, 4 heads of 64, fp32: 24 KiB a token. 64 x 8,192 tokens and a block.
    long = load(checkpoint=str(tmp_path), batch=64, tokens=8192)
    config = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12}))
    assert cache_bytes(long) == (64 * 8192 + 128) * 24 << 10


# -- the peers themselves ---------------------------------------------------------------


@pytest.mark.skipif(not PEER_PYTHONS[0].name, reason="SPLITPOINT_PEER_PYTHONS names no peers")
@pytest.mark.parametrize(
    ("peer", "case"),
    [(name, case) for name, peer in PEERS.items() for case in (*peer.families, "grouped llama")],
)
def test_a_peers_tokens_are_those_of_transformers(peer: str, case: str, tmp_path: Path) -> None:
    changes = {"num_key_value_heads": 2} if case == "grouped llama" else {}
    folder = write_tiny(case.removeprefix("grouped "), tmp_path / "model", **changes)
    model = build_tiny(case.removeprefix("grouped "), **changes)
    asked, expected = zip(*(clear_prompt(model, 20, 12, seed=seed) for seed in (1, 2)), strict=True)
    process = start_peer(load(peer, checkpoint=str(folder)), interpreters_of(PEER_PYTHONS))
    try:
        for variant in process.variants:
            timing = process.run(Work(variant, [*asked], 12))
            assert timing.tokens == [*expected]
            assert 0 < timing.first_token_seconds < timing.seconds
    finally:
        process.close()
