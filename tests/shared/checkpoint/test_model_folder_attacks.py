"""Model folders that are not what they should be: refused soon, in little memory, with a reason.

Each is read in a process of its own that may have 1 GiB of addresses and a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitpoint_cli.stack.child import child_environment

# Reads all that store, worker, scheduler and command line read of a folder before they load
# weights: of each folder that it is told, in a process forked for it. After what that says comes a
# line with its exit code.
READ = """
import os
import signal
import sys
import traceback
from splitpoint.checkpoint.resolve import eos_token_ids, model_fingerprint
from splitpoint.checkpoint.resolve import resolve_model, weight_files
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import ArenaLayout, ModelShape
from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.tensors import read_header
from splitpoint.checkpoint.text import Tokenizer

def read(name):
    try:
        folder = resolve_model(name, download=False)
        shape = read_shape(folder)
        ArenaLayout.of(shape, chunk_tokens=16, has_activations=True).planes(4096, 8)
        for path in weight_files(folder):
            read_header(path)
        eos_token_ids(folder)
        print(len(model_fingerprint(folder)))
        Tokenizer.load(folder)
    except InvalidArgument as error:
        print(error.message)
        return 2
    return 0

for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(int(sys.argv[1]))
            code = read(line.removesuffix("\\n"))
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print("exit code", os.waitstatus_to_exitcode(status), flush=True)
"""
MEMORY_BYTES = 1 << 30
SECONDS = 60


def config(**changes: Any) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return attack


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return attack


def pipe(name: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return attack


def directory(name: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return attack


def link(name: str, target: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return attack


def sparse(name: str, size: int, begin: bytes = b"") -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        with (folder / name).open("wb") as file:
            file.write(begin)
            file.truncate(size)

    return attack


def header(content: str, payload: int = 0) -> Callable[[Path], None]:
    raw = content.encode()
    return text("model.safetensors", struct.pack("<Q", len(raw)) + raw + bytes(payload))


def tensor(**fields: Any) -> Callable[[Path], None]:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **fields}
    return header(json.dumps({"a": entry}), payload=16)


WHOLE = "must be a whole number from 1 to"
DEEP = "[" * 100_000
INDEX = "model.safetensors.index.json"
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "1e12 layers": (config(num_hidden_layers=10**12), f"num_hidden_layers {WHOLE} 1,024"),
    "1e15 tokens": (config(vocab_size=10**15), f"vocab_size {WHOLE}"),
    "3.5 layers": (config(num_hidden_layers=3.5), f"{WHOLE} 1,024, not 3.5"),
    "true layers": (config(num_hidden_layers=True), f"num_hidden_layers {WHOLE}"),
    "layers in a string": (config(num_hidden_layers="4"), f"{WHOLE} 1,024, not a str"),
    "no layers": (config(num_hidden_layers=0), f"num_hidden_layers {WHOLE}"),
    "-1 heads": (config(num_attention_heads=-1), f"num_attention_heads {WHOLE}"),
    "1e9 heads": (config(num_attention_heads=10**9), f"num_attention_heads {WHOLE}"),
    "a list of heads": (config(num_key_value_heads=[4]), f"num_key_value_heads {WHOLE}"),
    "1e9 wide": (config(hidden_size=10**9), f"hidden_size {WHOLE}"),
    "1e9 wide inside": (config(intermediate_size=10**9), f"intermediate_size {WHOLE}"),
    "1e12 positions": (config(max_position_embeddings=10**12), WHOLE),
    "a number of 5,000 digits": (text("config.json", '{"a": ' + "9" * 5000 + "}"), "cannot be"),
    "deep": (text("config.json", DEEP), "nested too deeply"),
    "deep object": (text("config.json", '{"a":' * 100_000), "nested too deeply"),
    "NaN": (text("config.json", '{"rms_norm_eps": NaN}'), "holds NaN"),
    "a key twice": (text("config.json", '{"a": 1, "a": 2}'), "the key 'a' twice"),
    "not UTF-8": (text("config.json", b'{"a": "\xff"}'), "is not UTF-8"),
    "a list": (text("config.json", "[]"), "is not a JSON object"),
    "empty": (text("config.json", ""), "cannot be read"),
    "pipe": (pipe("config.json"), "config.json is not a regular file"),
    "directory": (directory("config.json"), "config.json is not a regular file"),
    "device": (link("config.json", "/dev/zero"), "config.json is not a regular file"),
    "loop": (link("config.json", "config.json"), "config.json cannot be read"),
    "dangling": (link("config.json", "nowhere"), "config.json cannot be read"),
    "1 TB": (sparse("config.json", 10**12), "bytes, at most"),
    "generation: pipe": (pipe("generation_config.json"), "is not a regular file"),
    "generation: deep": (text("generation_config.json", DEEP), "nested too deeply"),
    "generation: eos": (text("generation_config.json", '{"eos_token_id": 1.5}'), "eos_token_id"),
    "index: pipe": (pipe(INDEX), "is not a regular file"),
    "index: deep": (text(INDEX, DEEP), "nested too deeply"),
    "index: not names": (text(INDEX, '{"weight_map": {"a": {"b": 1}}}'), "no file of its folder"),
    "index: a list": (text(INDEX, '{"weight_map": [1]}'), "is no safetensors index"),
    "index: outside": (text(INDEX, '{"weight_map": {"a": "../x"}}'), "no file of its folder"),
    "weights: pipe": (pipe("model.safetensors"), "safetensors"),
    "weights: loop": (link("model.safetensors", "model.safetensors"), "safetensors"),
    "weights: an error": (
        link("model.safetensors", "/proc/self/mem"),  # a regular file; reading at 0 fails
        "model.safetensors: it cannot be read",
    ),
    "weights: empty": (text("model.safetensors", b""), "no safetensors file"),
    "weights: header of 2^63 bytes": (
        text("model.safetensors", struct.pack("<Q", 1 << 63) + b"{}"),
        "no safetensors file",
    ),
    "weights: header of 400 GB": (
        sparse("model.safetensors", 10**12, struct.pack("<Q", 4 * 10**11)),
        "no safetensors file",
    ),
    "weights: deep header": (header(DEEP), "nested too deeply"),
    "weights: a name twice": (header('{"a": {}, "a": {}}'), "the key 'a' twice"),
    "weights: no table": (header("[]"), "is not a JSON object"),
    "weights: beyond the file": (tensor(data_offsets=[0, 1 << 40], shape=[1 << 38]), "cut off"),
    "weights: shape of 1e30": (tensor(shape=[10**16, 10**14]), "nothing usable of a"),
    "weights: shape unlike bytes": (tensor(shape=[2, 3]), "another size than its shape"),
    "weights: -1 rows": (tensor(shape=[-1, -4]), "nothing usable of a"),
    "weights: offsets swapped": (tensor(data_offsets=[16, 0]), "nothing usable of a"),
    "tokenizer: pipe": (pipe("tokenizer.json"), "tokenizer.json is not a regular file"),
    "tokenizer: 1 TB": (sparse("tokenizer.json", 10**12), "bytes, at most"),
    "tokenizer: deep": (text("tokenizer.json", DEEP), "tokenizer"),
    "tokenizer: config deep": (text("tokenizer_config.json", DEEP), "nested too deeply"),
    "tokenizer: config pipe": (pipe("tokenizer_config.json"), "is not a regular file"),
}


@pytest.fixture
def folder(tmp_path: Path, bundled_model: Path) -> Path:
    return Path(shutil.copytree(bundled_model, tmp_path / "model"))


@pytest.fixture(scope="module")
def reader() -> Iterator[subprocess.Popen[str]]:
    command = ["prlimit", f"--as={MEMORY_BYTES}", sys.executable, "-c", READ, str(SECONDS)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment({}),
    ) as process:
        yield process


def read(reader: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Return the exit code of a process that reads a folder, and what it said."""
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{folder}\n")
    reader.stdin.flush()
    said = ""
    for line in reader.stdout:
        before, end, code = line.partition("exit code ")
        said += before
        if end:
            return int(code), said
    raise AssertionError(f"the reader has ended: {said}")


def limited(
    *command: str | Path, memory_bytes: int = MEMORY_BYTES
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["prlimit", f"--as={memory_bytes}", sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=child_environment({}),
        check=False,
    )


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_with_its_reason(
    name: str, folder: Path, reader: subprocess.Popen[str]
) -> None:
    attack, reason = ATTACKS[name]
    attack(folder)
    code, said = read(reader, folder)
    assert code == 2, said
    assert reason in said


def test_what_is_right_is_read(folder: Path, reader: subprocess.Popen[str]) -> None:
    assert read(reader, folder) == (0, "32\n")


@pytest.mark.parametrize("name", [pytest.param("deep", marks=pytest.mark.chaos), "pipe"])
def test_every_program_says_the_same(name: str, folder: Path) -> None:
    attack, reason = ATTACKS[name]
    attack(folder)
    up = limited("-m", "splitpoint_cli", "up", "--device", "cpu", "--model", folder)
    known = ("--profile", "h100", "--new", "10")
    plan = limited("-m", "splitpoint_cli", "plan", "--model", folder, "--cached", "100", *known)
    size = limited("-m", "splitpoint_cli", "size", "--model", folder)
    for done in (up, plan, size):
        assert done.returncode == 2, done.stdout + done.stderr
        assert reason in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
    doctor = limited(
        "-m", "splitpoint_cli", "doctor", "--device", "cpu", "--model", folder, "--json"
    )
    assert doctor.returncode == 1
    [finding] = [each for each in json.loads(doctor.stdout)["findings"] if each["name"] == "model"]
    assert reason in finding["found"]


@pytest.mark.parametrize(
    "name", ["1e12 layers", pytest.param("1e15 tokens", marks=pytest.mark.chaos)]
)
def test_every_service_says_the_same(name: str, folder: Path, shm_folder: Path) -> None:
    attack, reason = ATTACKS[name]
    attack(folder)
    common = ("--listen", "127.0.0.1:0", "--model", folder)
    arena = ("--arena", shm_folder / "arena", "--host-memory", "64MiB")
    for done in (
        limited("-m", "kvstore_service", *common, *arena),
        limited("-m", "scheduler_service", *common, "--worker", "127.0.0.1:1"),
        # torch alone has more addresses than the others.
        limited("-m", "worker_service", *common, "--device", "cpu", memory_bytes=16 << 30),
    ):
        assert done.returncode == 2, done.stderr
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
