"""Peers of `bench decode`: which there are, their processes, and checkpoints in their formats."""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VOCABULARY, build_tiny, clear_prompt, write_tiny

from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.shapes import BUILT_IN_SHAPES, DataType
from splitpoint_cli.bench.decode.peers.catalog import PEERS, check_peers, parse_peers
from splitpoint_cli.bench.decode.peers.checkpoint import Checkpoint, rope_base
from splitpoint_cli.bench.decode.peers.gguf import write_llama
from splitpoint_cli.bench.decode.peers.messages import Load, Timing, Unsupported, Work
from splitpoint_cli.bench.decode.peers.process import PeerProcess, interpreters_of, start_peer
from splitpoint_cli.bench.decode.peers.vllm_model import cache_bytes

# Interpreters that have peers, separated by colons: with it, their tokens are compared, too.
PEER_PYTHONS = [Path(path) for path in os.environ.get("SPLITPOINT_PEER_PYTHONS", "").split(":")]


def load(peer: str = "ctranslate2", **changes: Any) -> Load:
    found = Load(peer, PEERS[peer].module, "", "", "float32", 1, 2, 32)
    return replace(found, **changes)


def interpreter(tmp_path: Path, text: str) -> str:
    """An interpreter for `-m MODULE` that does what the text says instead."""
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# -- names ------------------------------------------------------------------------------


def test_peers_are_named_once_and_must_exist() -> None:
    assert parse_peers("llama.cpp, transformers,llama.cpp") == ("llama.cpp", "transformers")
    assert parse_peers("none") == ()
    for text in ("abacus", "", " ,"):
        with pytest.raises(
            InvalidArgument, match=r"transformers, ctranslate2, openvino, llama\.cpp, vllm"
        ):
            parse_peers(text)


def test_a_peer_that_cannot_compute_the_model_is_refused_at_once() -> None:
    opt, llama = BUILT_IN_SHAPES["opt-125m"], BUILT_IN_SHAPES["llama-168m"]
    check_peers(["transformers", "ctranslate2"], opt, "cpu")
    check_peers(["transformers"], llama, "cuda")
    with pytest.raises(InvalidArgument, match=r"llama\.cpp computes llama here, not opt"):
        check_peers(["llama.cpp"], opt, "cpu")
    with pytest.raises(InvalidArgument, match="runs on the CPU only"):
        check_peers(["llama.cpp"], llama, "cuda")
    with pytest.raises(InvalidArgument, match="float32 and bfloat16"):
        check_peers(["ctranslate2"], replace(llama, data_type=DataType.FLOAT16), "cpu")


# -- processes --------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    # -S: no installed packages, wherever this test runs.
    bare = interpreter(tmp_path, f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    with pytest.raises(FailedPrecondition, match="pip install ctranslate2 numpy") as caught:
        start_peer(load(module="ctranslate2_of_nobody"), [bare, sys.executable])
    assert caught.value.reason == "NO_PEER"
    assert f"not installed in {bare} nor in {sys.executable}" in str(caught.value)
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
print(json.dumps({{"variants": ["", "fast"], "version": load["module"]}}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work["variant"] == "fast":
        print(json.dumps({{"error": "too fast", "is_missing": False}}), flush=True)
        continue
    print("native noise", file=sys.stderr)
    own = [name for name in ("PYTHONPATH", "GOMP_SPINCOUNT") if name in os.environ]
    files = sorted(f"{{root}}/{{f}}" for root, _, found in os.walk(".", followlinks=True)
                   for f in found if f.endswith(".py"))
    around = ("./splitpoint_cli", "./splitpoint_cli/bench", "./splitpoint_cli/bench/decode")
    assert not own and all(
        f.startswith("./splitpoint_cli/bench/decode/peers/")
        or f in [f"{{each}}/__init__.py" for each in around] for f in files)
    tokens = [prompt[:1] * work["new_tokens"] for prompt in work["prompts"]]
    print(json.dumps(dict(seconds=2.0, first_token_seconds=0.5, tokens_before=2, tokens=tokens)))
    sys.stdout.flush()
"""


def test_a_peer_answers_in_a_process_of_its_own_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peer = PeerProcess("ctranslate2", interpreter(tmp_path, DOUBLE), load())
    try:
        assert peer.variants == ("", "fast")
        assert peer.version == "ctranslate2"
        timing = peer.run(Work("", [[7, 8], [9, 9]], 3))
        assert timing == Timing(2.0, 0.5, 2, [[7, 7, 7], [9, 9, 9]])
        with pytest.raises(FailedPrecondition, match="too fast; its last messages: native noise"):
            peer.run(Work("fast", [[7]], 3))
    finally:
        peer.close()


def test_a_peer_that_dies_or_hangs_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    dying = interpreter(tmp_path, "#!/bin/sh\nread line\necho 'no such instruction' >&2\nexit 3\n")
    with pytest.raises(Unavailable, match="ctranslate2 ended: no such instruction"):
        PeerProcess("ctranslate2", dying, load())
    hanging = interpreter(tmp_path, "#!/bin/sh\nwhile read line; do :; done\n")
    with pytest.raises(Unavailable, match="has not answered for 0 s"):
        PeerProcess("ctranslate2", hanging, load(), load_seconds=0.1)


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
    peer = PeerProcess("vllm", python, load("vllm", checkpoint=str(folder), threads=3))
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
    long = load("vllm", checkpoint=str(tmp_path), batch=64, tokens=8192)
    config = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12}))
    assert cache_bytes(long) == (64 * 8192 + 128) * 24 << 10


# -- formats ----------------------------------------------------------------------------


def tiny_checkpoint(folder: Path, dtype: torch.dtype) -> Checkpoint:
    model: Any = build_tiny("llama")
    model.to(dtype).save_pretrained(folder)
    return Checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_read_without_torch_as_safetensors_reads_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dtype)
    assert checkpoint.is_bfloat16 == (dtype is torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors
    for name, tensor in tensors.items():
        assert name in checkpoint
        numpy.testing.assert_array_equal(checkpoint.floats(name), tensor.float().numpy())
    assert "nothing" not in checkpoint


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, Any]]]:
    """Values, and types and arrays of tensors: a reader that shares nothing with the writer."""
    data = path.read_bytes()
    place = 24
    assert data[:4] == b"GGUF"
    version, tensor_count, value_count = struct.unpack_from("<IQQ", data, 4)
    assert version == 3

    def take(layout: str) -> Any:
        nonlocal place
        [value] = struct.unpack_from(f"<{layout}", data, place)
        place += struct.calcsize(f"<{layout}")
        return value

    def text() -> str:
        nonlocal place
        size = take("Q")
        place += size
        return data[place - size : place].decode()

    values: dict[str, Any] = {}
    for _ in range(value_count):
        key = text()
        kind = take("I")
        values[key] = text() if kind == 8 else take({4: "I", 6: "f"}[kind])
    found = []
    for _ in range(tensor_count):
        name = text()
        sizes = [take("Q") for _ in range(take("I"))]
        found.append((name, sizes, take("I"), take("Q")))
    start = -(-place // 32) * 32
    tensors = {}
    for name, sizes, kind, offset in found:
        assert offset % 32 == 0
        count = int(numpy.prod(sizes))
        stored = numpy.frombuffer(data, "<u2" if kind == 30 else "<f4", count, start + offset)
        tensors[name] = (kind, stored.reshape(sizes[::-1]))
    return values, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_is_written_for_llama_cpp(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dtype)
    config = json.loads((tmp_path / "config.json").read_text())
    path = tmp_path / "model.gguf"
    write_llama(checkpoint, path)
    values, tensors = read_gguf(path)
    assert values["general.architecture"] == "llama"
    assert values["tokenizer.ggml.model"] == "no_vocab"
    assert values["llama.attention.head_count_kv"] == config["num_key_value_heads"]
    assert values["llama.rope.freq_base"] == config["rope_parameters"]["rope_theta"]
    assert values["llama.vocab_size"] == VOCABULARY

    norms = {name for name in tensors if "norm" in name}
    assert len(norms) == 2 * config["num_hidden_layers"] + 1
    wide = 30 if dtype is torch.bfloat16 else 0
    assert {kind for name, (kind, _) in tensors.items() if name not in norms} == {wide}
    assert {tensors[name][0] for name in norms} == {0}
    down = checkpoint.bits("model.layers.1.mlp.down_proj.weight")
    numpy.testing.assert_array_equal(tensors["blk.1.ffn_down.weight"][1], down)
    # A pair that rotates together, d/2 apart in a checkpoint, lies beside each other.
    keys = checkpoint.bits("model.layers.0.self_attn.k_proj.weight")
    written = tensors["blk.0.attn_k.weight"][1]
    dim = config["head_dim"]
    for head in range(config["num_key_value_heads"]):
        for pair in range(dim // 2):
            row = head * dim + 2 * pair
            numpy.testing.assert_array_equal(written[row], keys[head * dim + pair])
            numpy.testing.assert_array_equal(written[row + 1], keys[head * dim + pair + dim // 2])


def test_another_family_is_not_written_for_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="opt"):
        write_llama(Checkpoint(write_tiny("opt", tmp_path)), tmp_path / "model.gguf")


def test_scaled_rotary_positions_are_not_converted_as_plain_ones(tmp_path: Path) -> None:
    assert rope_base({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}) == 5e5
    assert rope_base({}) == 10_000
    build_tiny("llama-3").save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="llama3"):
        write_llama(Checkpoint(tmp_path), tmp_path / "model.gguf")


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
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    asked, expected = zip(*(clear_prompt(model, 20, 12, seed=seed) for seed in (1, 2)), strict=True)
    process = start_peer(
        load(peer, checkpoint=str(folder), scratch=str(scratch)), interpreters_of(PEER_PYTHONS)
    )
    try:
        for variant in process.variants:
            timing = process.run(Work(variant, [*asked], 12))
            assert timing.tokens == [*expected]
            assert 0 < timing.first_token_seconds < timing.seconds
    finally:
        process.close()
