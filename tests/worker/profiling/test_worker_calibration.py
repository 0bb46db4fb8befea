"""The kernels of a host: chosen by a measurement, kept, shared, and measured again when needed.

Measures for real once, which takes seconds, and in `make chaos` wherever something is measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from splitpoint.errors import InvalidArgument
from splitpoint.host.processor import AMX_BF16, AVX512, compiler
from worker_service.kernels import compiled
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, by_flags, in_use
from worker_service.kernels.compiled import CACHE_FOLDER, ELEMENTS
from worker_service.kernels.panel_gemm import Kind
from worker_service.profiling import calibration
from worker_service.profiling.calibration import chosen, prefers_one_order, use_kernels
from worker_service.weights.packing import layout_of

CPU = torch.device("cpu")
USUAL = Choice(Decode.PRODUCTS, Prefill.SDPA, Layout.PACKED)
# What no measurement here would give.
UNLIKELY = Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PLAIN)
MEASURES = (
    "import torch; from worker_service.profiling.calibration import use_kernels; "
    "print(use_kernels(torch.float32))"
)
# The same by a measurement that gives something else in each process.
MAKES_UP = (
    "import os\n"
    "from worker_service.kernels.choice import Decode, Layout\n"
    "from worker_service.profiling import calibration\n"
    "def made_up(dtype, usual, *, has_compiled):\n"
    "    decode = Decode.FUSED if has_compiled else Decode.PRODUCTS\n"
    "    linear = list(Layout)[os.getpid() % 2]\n"
    "    return usual.parsed(f'decode={decode.value},linear={linear.value}')\n"
    "calibration.measured = made_up\n" + MEASURES
)
each_program = pytest.mark.parametrize(
    "program",
    [
        pytest.param(MAKES_UP, id="made-up"),
        pytest.param(MEASURES, id="measured", marks=pytest.mark.chaos),
    ],
)
# Has torch and the calibration loaded, and no more: then each process that it forks is as a new
# one. Its requests: a program, variables of the environment, and a file for the output of each
# process that runs the program. Answers with their wait statuses.
PARENT = """
import json, os, sys
import worker_service.profiling.calibration
for line in sys.stdin:
    program, environment, outputs = json.loads(line)
    children = []
    for output in outputs:
        children.append(os.fork())
        if not children[-1]:
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
            os.environ.update(environment)
            exec(program)
            sys.stdout.flush()
            os._exit(0)
    print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)
"""

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


class Processes:
    """Processes that run one program each."""

    def __init__(self, parent: subprocess.Popen[str], folder: Path) -> None:
        self._parent, self._folder = parent, folder

    def say(self, program: str, environment: dict[str, str], *, count: int = 1) -> list[str]:
        """Return what each of some processes prints that have these variables, too."""
        outputs = [self._folder / str(number) for number in range(count)]
        for output in outputs:
            output.unlink(missing_ok=True)
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        request = [program, environment, [str(output) for output in outputs]]
        print(json.dumps(request), file=self._parent.stdin, flush=True)
        assert json.loads(self._parent.stdout.readline()) == [0] * count
        return [output.read_text() for output in outputs]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        yield Processes(parent, tmp_path_factory.mktemp("said"))


def host_kernels() -> list[Path]:
    """Return the kernels that other tests use, too: to compile them again takes seconds."""
    if compiler() is None:
        return []
    loaded = [
        library
        for element in (ELEMENTS[torch.float32], ELEMENTS[torch.bfloat16])
        for library in (
            compiled.load("paged_attention.cpp", {"HEAD_DIM": 64, "ELEMENT": element}),
            compiled.load("panel_gemm.cpp", {"ELEMENT": element, "WEIGHT": int(Kind.SAME)}),
        )
    ]
    return [Path(library._name) for library in loaded]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a measurement, and the host's kernels of two types."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    folder.mkdir(mode=0o700)
    for library in host_kernels():
        shutil.copy(library, folder)
        shutil.copy(library.with_suffix(".sha256"), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_FOLDER, str(folder))
        use_kernels(torch.float32)
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a test, empty."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def used(cache: Path, kept: Path) -> Path:
    """The same, with what was measured."""
    shutil.copytree(kept, cache)
    return cache


@pytest.fixture
def unmeasured(used: Path) -> Path:
    """The same with compiled kernels alone."""
    record(used).unlink()
    return used


def cache_variable(cache: Path) -> dict[str, str]:
    return {CACHE_FOLDER: str(cache)}


def record(cache: Path) -> Path:
    (found,) = cache.glob("kernels-*.json")
    return found


def test_what_a_file_says_is_used_unmeasured(used: Path) -> None:
    choice = use_kernels(torch.float32)
    assert in_use() == choice
    if compiler() is None:
        assert choice.decode is Decode.PRODUCTS
    path = record(used)
    content = json.loads(path.read_text())
    content["choice"] = str(UNLIKELY)
    path.write_text(json.dumps(content))
    assert use_kernels(torch.float32) == UNLIKELY
    assert layout_of(CPU, torch.float32) is Layout.PLAIN


@pytest.mark.parametrize("damage", ["", "{", '{"facts": {}, "choice": "decode=fast"}', "[1]"])
def test_a_damaged_or_older_file_is_measured_again(
    used: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(used)
    whole = json.loads(path.read_text())
    path.write_text(damage)
    monkeypatch.setattr(calibration, "measured", lambda *_, **__: UNLIKELY)
    assert use_kernels(torch.float32) == UNLIKELY
    assert json.loads(path.read_text()) == {"facts": whole["facts"], "choice": str(UNLIKELY)}


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_types_are_measured_apart(
    used: Path, is_real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = use_kernels(torch.float32)
    if not is_real:
        monkeypatch.setattr(calibration, "measured", lambda *_, **__: UNLIKELY)
    found = use_kernels(torch.bfloat16)
    assert is_real or found == UNLIKELY
    assert len(list(used.glob("kernels-*.json"))) == 2
    assert use_kernels(torch.float32) == before


@each_program
def test_processes_that_start_together_use_the_same_kernels(
    unmeasured: Path, processes: Processes, program: str
) -> None:
    """One measures, the other waits for the lock and reads."""
    said = processes.say(program, cache_variable(unmeasured), count=2)
    assert said[0] == said[1] == json.loads(record(unmeasured).read_text())["choice"] + "\n"


def test_a_wish_replaces_what_was_measured(used: Path) -> None:
    choice = use_kernels(torch.float32, "decode=products, linear=plain")
    assert (choice.decode, choice.linear) == (Decode.PRODUCTS, Layout.PLAIN)
    for wrong in ("decode", "decode=quick", "speed=fast", ""):
        with pytest.raises(InvalidArgument, match="none of"):
            use_kernels(torch.float32, wrong)


def test_by_flags_nothing_is_measured_or_compiled(cache: Path) -> None:
    assert use_kernels(torch.bfloat16, "flags").decode is Decode.PRODUCTS
    assert not cache.exists()


def test_without_a_folder_of_its_own_a_worker_goes_by_flags(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    assert use_kernels(torch.float32) == USUAL
    assert "others may write it" in caplog.text


@needs_compiler
@each_program
def test_a_compiler_that_is_installed_later_counts(
    unmeasured: Path, processes: Processes, program: str
) -> None:
    """And a host without one keeps a choice of its own in a folder that both share."""
    shared = cache_variable(unmeasured)
    [without] = processes.say(program, {**shared, "CXX": "no-such-compiler"})
    assert without.startswith("decode=products")
    first = record(unmeasured)
    content = first.read_text()
    processes.say(program, shared)
    assert first.read_text() == content
    (second,) = {*unmeasured.glob("kernels-*.json")} - {first}
    assert json.loads(second.read_text())["facts"]["has_compiled"]
    # Both are read again, and neither is measured again.
    for path, environment in ((first, {"CXX": "no-such-compiler"}), (second, {})):
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({**kept, "choice": str(UNLIKELY)}))
        assert processes.say(program, {**shared, **environment}) == [f"{UNLIKELY}\n"]


@needs_compiler
def test_every_head_dim_of_a_process_needs_its_kernel(
    used: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft model's may differ; no kernel is missed only when it drafts."""
    path = record(used)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "choice": "decode=fused,prefill=sdpa,linear=packed"}))
    assert use_kernels(torch.float32, head_dims=[64]).decode is Decode.FUSED
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler.cache_clear()
    try:
        assert use_kernels(torch.float32, head_dims=[64, 48]) == USUAL
    finally:
        compiler.cache_clear()
    assert "no C++ compiler" in caplog.text


def test_a_stopped_process_that_measures_is_not_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with compiled.locked(compiled.cache_folder(), "calibrating"):
        monkeypatch.setattr(compiled, "_LIMIT", 0.2)
        assert use_kernels(torch.float32) == USUAL
    assert "another process has held" in caplog.text
    assert not list(cache.glob("*.json"))


def test_a_full_disk_costs_the_file_and_not_the_measurement(
    unmeasured: Path, processes: Processes
) -> None:
    """No file can grow: what was measured is used, as by a worker that could write it."""
    program = (
        "import resource, torch\n"
        "from worker_service.profiling import calibration\n"
        "from worker_service.kernels.choice import Choice, Decode, Layout, Prefill\n"
        "unlikely = Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PLAIN)\n"
        "calibration.measured = lambda *_, **__: unlikely\n"
        "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))\n"
        "choice = calibration.use_kernels(torch.float32)\n"
        # The output is a file, too.
        "resource.setrlimit(resource.RLIMIT_FSIZE, limits)\n"
        "print(choice)\n"
    )
    assert processes.say(program, cache_variable(unmeasured)) == [f"{UNLIKELY}\n"]
    assert {each.suffix for each in unmeasured.glob("kernels-*")} <= {".so", ".lock"}


# Instruction sets, and whether they say that C++ kernels are faster than torch's.
PROCESSORS = [({AVX512}, True), ({AVX512, AMX_BF16}, False), ({"avx2", "fma"}, False)]


@pytest.mark.parametrize(("flags", "is_known"), PROCESSORS)
def test_numerics_prefer_one_order_unless_fast_or_by_flags(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], is_known: bool
) -> None:
    monkeypatch.setattr(calibration, "instruction_sets", lambda: flags)
    assert prefers_one_order("invariant")
    assert not prefers_one_order("fast")
    assert prefers_one_order("auto") is is_known


@needs_compiler
@pytest.mark.parametrize(("flags", "is_known"), PROCESSORS)
def test_kernels_of_invariant_numerics_follow_a_rule(
    used: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], is_known: bool
) -> None:
    """Whatever was measured; without a rule that decides how weights lie."""
    monkeypatch.setattr(
        calibration, "kept", lambda *_: pytest.fail("read") if is_known else UNLIKELY
    )
    monkeypatch.setattr(calibration, "instruction_sets", lambda: flags)
    choice = use_kernels(torch.float32, is_invariant=True)
    layout = Layout.PANELS if is_known else Layout.PLAIN
    assert choice == Choice(Decode.FUSED, Prefill.FUSED, layout)
    named = use_kernels(torch.float32, "linear=packed", is_invariant=True)
    assert named.linear is Layout.PACKED


def test_tiles_of_bfloat16_decide_the_prefill() -> None:
    assert by_flags(torch.bfloat16, {AMX_BF16}).prefill is Prefill.SDPA
    assert by_flags(torch.bfloat16, {"avx512f"}).prefill is Prefill.PRODUCTS
    assert by_flags(torch.float16, {AMX_BF16}).prefill is Prefill.PRODUCTS
    assert by_flags(torch.float32, set()).prefill is Prefill.SDPA


def test_the_usual_kernel_stays_unless_another_is_clearly_faster() -> None:
    assert chosen({"a": 1.0, "b": 0.95}, "a") == "a"
    assert chosen({"a": 1.0, "b": 0.85}, "a") == "b"
    assert chosen({"b": 2.0}, "a") == "b"


def test_a_choice_reads_its_own_text() -> None:
    other = Choice(Decode.FUSED, Prefill.PRODUCTS, Layout.PLAIN)
    assert USUAL.parsed(str(other)) == other
