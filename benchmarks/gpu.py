"""Everything that needs a GPU, in one run that ends in time: `make gpu`.

Runs the CUDA tests, then restores and decoding with the cache on the host, each in a
process of its own with a time limit, and compares what came out with what is promised.
Works from the source tree without a network: stubs are generated, and Python packages
that the machine lacks may be carried as wheels. Needs only the standard library itself.

    python -m benchmarks.gpu [--wheels DIR] [--results DIR] [--parts NAMES] [--seconds N]
        [--json] [--output FILE]
    python -m benchmarks.gpu --device cpu --tiny      the same code, on any machine

What is promised, and what a GPU has confirmed: docs/lab/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.gpu_claims import (
    GRAPHS,
    LLAMA,
    NEW_TOKENS,
    NUMERICS,
    OPT_LONG,
    OPT_SHORT,
    REQUIRED_TESTS,
    RESTORE,
    SELECT_LLAMA,
    SELECT_OPT,
    TESTS,
    VLLM,
    Outcome,
    claims_of,
    print_claims,
)
from benchmarks.gpu_environment import ROOT, prepared

RESULTS = ROOT / "benchmarks" / "results"
SHARED_MEMORY = Path("/dev/shm")
TIDY_SECONDS = 20
# A device machine's command is often cut off at ten minutes.
TOTAL_SECONDS = 540


@dataclass(frozen=True, slots=True)
class Part:
    """One process. It gets at most `seconds`, and is not begun with less than `least`."""

    name: str
    command: tuple[str, ...]
    seconds: float
    least: float


def selecting(shape: str, lengths: Sequence[int], *, is_tiny: bool) -> tuple[str, ...]:
    """Return the benchmark of decode steps that read a tenth of this many cached tokens."""
    more: tuple[str, ...] = ("--dtype", "bfloat16", "--new", "16")
    if is_tiny:
        shape, lengths = "smollm2-135m", (400,)
        more = ("--dtype", "float32", "--new", "6", "--layers", "4", "--link-rate", "10MB")
    sizes = (word for length in lengths for word in ("--length", str(length)))
    given = ("--shape", shape, "--select", "columns:0.1", "--batch", "1", *sizes)
    return ("offload", *given, *more, "--repeats", "1")


def parts_of(device: str, *, is_tiny: bool) -> list[Part]:
    """Return the parts by importance; a short lease leaves out the last ones."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    )
    python, cli = sys.executable, (sys.executable, "-m", "splitpoint_cli", "bench")
    here = ("--device", device, "--threads", "1" if is_tiny else "0")

    def offload(shape: str, prompt: int, *more: str) -> tuple[str, ...]:
        sizes: tuple[str, ...] = ("--batch", "64", "--prompt", str(prompt))
        sizes += ("--new", str(max(NEW_TOKENS)))
        if is_tiny:
            shape = str(ROOT / "models" / "stdlib-llama") if "llama" in shape else "opt-125m"
            sizes = ("--batch", "2", "--prompt", "130", "--new", "4", "--link-rate", "400MB")
        dtype = ("--dtype", "float32" if is_tiny else "bfloat16", "--repeats", "1")
        return (*cli, "offload", "--shape", shape, *sizes, *dtype, *here, *more)

    graphs: tuple[str, ...] = (python, "-m", "benchmarks.gpu_graphs", "--device", device)
    if is_tiny:
        graphs = (*graphs, "--tiny")
    numerics: tuple[str, ...] = (python, "-m", "benchmarks.numerics", *here)
    numerics += ("--prompts", "2" if is_tiny else "8")
    numerics += ("--model", str(ROOT / "models" / "stdlib-llama"), "--repeats", "1")
    if is_tiny:
        sizes = ("--prompt", "100", "--page-tokens", "16", "--new", "4")
        numerics += (*sizes, "--dtype", "float32", "--cost-shape", "none")
    else:
        numerics += ("--dtype", "bfloat16", "--new", "32", "--cost-shape", "llama-3-8b")

    restore: tuple[str, ...] = ("--shape", "opt-6.7b", "--prompt", "1984", "--dtype", "bfloat16")
    if is_tiny:
        restore = ("--shape", "opt-125m", "--layers", "2", "--prompt", "256", "--link-rate", "2GB")
    # With fewer tokens a step computes about as long as the link is busy.
    select_llama = selecting("llama-3.1-8b", (4096, 8192, 32768), is_tiny=is_tiny)
    # The longest that OPT's positions allow.
    select_opt = selecting("opt-13b", (1984,), is_tiny=is_tiny)
    # Two engines on one card, which compile first.
    engines = os.environ.get("SPLITPOINT_VLLM_PYTHON", python)
    vllm: tuple[str, ...] = (python, "-m", "benchmarks.vllm_connector", "--part", "first")
    vllm += ("--python", engines, "--rounds", "1" if is_tiny else "3")
    return [
        Part(
            TESTS,
            (
                python,
                "-m",
                "pytest",
                # A line for each test: what was done counts, also if time runs out.
                "-v",
                "-rs",
                "-m",
                "gpu",
                "-p",
                "no:cacheprovider",
                # Another machine's versions warn of other things.
                "-W",
                "default",
                *files,
            ),
            # Triton compiles each of its kernels for each size.
            220,
            30,
        ),
        Part(GRAPHS, graphs, 90, 45),
        # Triton compiles a kernel for each operation and kind of matrix.
        Part(NUMERICS, numerics, 150, 60),
        Part(SELECT_LLAMA, (*cli, *select_llama, *here), 150, 60),
        Part(SELECT_OPT, (*cli, *select_opt, *here), 90, 45),
        Part(OPT_LONG, offload("opt-6.7b", 512), 300, 120),
        Part(LLAMA, offload("llama-3-8b", 512), 120, 60),
        Part(OPT_SHORT, offload("opt-6.7b", 128, "--sweep"), 150, 60),
        Part(RESTORE, (*cli, "restore", *restore, *here), 100, 30),
        Part(VLLM, vllm, 240, 25),
    ]


def run_part(part: Part, seconds: float, environment: Mapping[str, str]) -> Outcome:
    """Run it, and end it and its children when its time is over."""
    started = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        tempfile.NamedTemporaryFile("r", suffix=".json") as report,
    ):
        where = () if part.name == TESTS else ("--output", report.name)
        process = subprocess.Popen(
            (*part.command, *where),
            cwd=ROOT,
            env=dict(environment),
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
        except BaseException:  # a signal: the part is in a session of its own and has not got it
            end(process)
            raise
        took = time.monotonic() - started
        output.seek(0)
        errors.seek(0)
        lines, complaints = output.read().splitlines(), errors.read().splitlines()
        reported = report.read()
    if part.name == TESTS:
        return tests_outcome(took, code, lines)
    if code is None:
        return Outcome(took, problem=f"not done after {seconds:.0f} s")
    if code:
        return Outcome(took, problem=f"exit code {code}: {' | '.join(complaints[-3:])}")
    for line in lines:
        print(line)
    return Outcome(took, json.loads(reported))


def end(process: subprocess.Popen[bytes]) -> None:
    """It may tidy up; then nothing of it, nor of what it started, is left."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=TIDY_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # An arena of many gigabytes would be missing to whatever comes next.
    for folder in SHARED_MEMORY.glob(f"splitpoint-*-{process.pid}"):
        shutil.rmtree(folder, ignore_errors=True)


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def tests_outcome(seconds: float, code: int | None, lines: Sequence[str]) -> Outcome:
    """Read pytest's line for each test, and those about failed and skipped ones at its end.

    `code`: None if its time was over. `unproved` are the required tests of which none passed, or
    one did not.
    """
    if code not in (None, 0, 1):
        return Outcome(seconds, problem=f"pytest ended with {code}: {' | '.join(lines[-3:])}")
    verdicts: dict[str, set[str]] = {}
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    for line in lines:
        found = re.match(r"\S+::(\w+)(?:\[.*\])? (PASSED|FAILED|ERROR|SKIPPED)\b", line)
        if found:
            verdicts.setdefault(found[1], set()).add(found[2])
            counts[found[2].lower()] += 1
    told = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    unproved = [
        name
        for name in REQUIRED_TESTS
        if "PASSED" not in verdicts.get(name, ()) or verdicts[name] - {"PASSED", "SKIPPED"}
    ]
    problem = "" if code is not None else f"not done after {seconds:.0f} s"
    return Outcome(seconds, {**counts, "lines": told, "unproved": unproved}, problem)


def main() -> int:
    arguments = parsed()
    if not arguments.json:
        return run(arguments)[0]
    # What is told on the way is not the object.
    with contextlib.redirect_stdout(sys.stderr):
        code, result = run(arguments)
    print(json.dumps(result))
    return code


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to prove the script")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for everything")
    parser.add_argument("--parts", help="only these, separated by commas")
    parser.add_argument("--wheels", type=Path, help="a folder of packages that are missing here")
    parser.add_argument("--results", type=Path, help="a folder for a JSON file named by the day")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the JSON object here"
    )
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, object]]:
    """Run all parts and say what came of them; returns the exit code and the report."""
    is_real = arguments.device != "cpu" and not arguments.tiny
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_by_signal)
    ends = time.monotonic() + arguments.seconds
    parts = parts_of(arguments.device, is_tiny=arguments.tiny)
    wanted = set(arguments.parts.split(",")) if arguments.parts else {part.name for part in parts}
    unknown = wanted - {part.name for part in parts}
    if unknown:
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}")
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="splitpoint-gpu-") as folder:
        environment = prepared(arguments.wheels, Path(folder))
        for part in parts:
            left = ends - time.monotonic()
            if part.name not in wanted:
                outcomes[part.name] = Outcome(0.0, problem="not asked for")
            elif left < part.least:
                outcomes[part.name] = Outcome(0.0, problem=f"skipped: {left:.0f} s were left")
            else:
                print(f"== {part.name}", flush=True)
                outcomes[part.name] = run_part(part, min(part.seconds, left), environment)
            problem = outcomes[part.name].problem
            if problem:
                print(f"-- {part.name}: {problem}", flush=True)
        # Only now: it is code that may need what was carried.
        from splitpoint_cli.bench.harness import commit as commit_of

        commit = commit_of()
    claims = claims_of(outcomes)
    print_claims(claims)
    if not is_real:
        print("tiny sizes, or no GPU: this proves the script and nothing that is promised")
    result = {
        "benchmark": "gpu",
        "device": arguments.device,
        "tiny": arguments.tiny,
        "commit": commit,
        "claims": [
            {
                "claim": each.text,
                "measured": each.measured,
                "limit": each.limit,
                "holds": each.holds,
            }
            for each in claims
        ],
        "parts": {
            name: {
                "seconds": round(each.seconds, 1),
                "problem": each.problem,
                "report": each.report,
            }
            for name, each in outcomes.items()
        },
    }
    line = json.dumps(result)
    if arguments.output is not None:
        arguments.output.write_text(line + "\n")
    target = arguments.results or (RESULTS if is_real else None)
    if target is not None:
        name = f"{time.strftime('%Y-%m-%d')}-{commit}-gpu.json"
        (target / name).write_text(line + "\n")
    failed = any(each.problem and name in wanted for name, each in outcomes.items())
    code = 1 if failed or any(each.holds is False for each in claims if is_real) else 0
    return code, result


if __name__ == "__main__":
    sys.exit(main())
