"""Imports point down only, and nothing here unpickles or evaluates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from splitpoint import extras
from splitpoint_cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"kvstore_service", "worker_service", "scheduler_service"}
# What each package may import of this project.
ALLOWED = {
    "splitpoint": {"splitpoint"},
    "kvstore_service": {"splitpoint", "kvstore_service"},
    "worker_service": {"splitpoint", "worker_service"},
    "scheduler_service": {"splitpoint", "scheduler_service"},
    "gateway_service": {"splitpoint", "gateway_service"},
    "splitpoint_offline": {"splitpoint", "splitpoint_offline", *SERVICES},
    "splitpoint_vllm": {"splitpoint", "splitpoint_vllm"},
    "splitpoint_cli": {
        "splitpoint",
        "splitpoint_cli",
        "splitpoint_offline",
        "gateway_service",
        *SERVICES,
    },
}
# The one import that points up: `splitpoint.LLM` is where users of Python look for a model in
# their own process. It runs when the name is first asked for; nothing else may be in that file.
POINTS_UP = {"splitpoint/__init__.py": {"splitpoint_offline"}}
# Only the worker computes; benchmarks run it in their own process.
TORCH_FILES = (
    "worker_service/",
    "splitpoint_cli/bench/decode_runs.py",
    "splitpoint_cli/bench/engine.py",
    "splitpoint_cli/bench/heavy_hitters.py",
    "splitpoint_cli/bench/limits.py",
    "splitpoint_cli/bench/local_store.py",
    "splitpoint_cli/bench/offload_host.py",
    "splitpoint_cli/bench/offload_runs.py",
    "splitpoint_cli/bench/our_worker.py",
    "splitpoint_cli/bench/pooled.py",
    "splitpoint_cli/bench/restore_runs.py",
    "splitpoint_cli/bench/stored_prefixes.py",
    "splitpoint_cli/eval/runs.py",
    "splitpoint_vllm/copies.py",
    "splitpoint_vllm/spec.py",
)
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "joblib.load", "numpy.load", "np.load"}


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("splitpoint/v1/"):  # generated
                yield name, parsed(path)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names of the modules a file imports, wherever in the file it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_down(package: str) -> None:
    ours = set(ALLOWED)
    wrong = [
        f"{name} imports {module}"
        for name, tree in sources(package)
        for module in imported(tree)
        if (top := module.split(".")[0]) in ours
        and top not in ALLOWED[package] | POINTS_UP.get(name, set())
    ]
    assert wrong == []


def test_what_points_up_is_loaded_only_when_it_is_asked_for() -> None:
    for name, packages in POINTS_UP.items():
        early = imported_at_once(parsed(ROOT / name).body)
        assert {module.split(".")[0] for module in early}.isdisjoint(packages)


def test_only_the_worker_and_the_benchmarks_import_torch() -> None:
    wrong = [
        f"{name} imports {module}"
        for name, tree in sources(*ALLOWED)
        for module in imported(tree)
        if module.split(".")[0] in {"torch", "transformers"} or module == "safetensors.torch"
        if not name.startswith(TORCH_FILES)
    ]
    assert wrong == []


# They take long to load, and are needed only with a Redis, a certificate, a collector of traces or
# a GPU, or to tell a version: so they are imported where they are used.
SLOW = {"redis", "cryptography", "importlib.metadata", "mooncake", "pynvml", "opentelemetry"}


def loaded_at_start(module: str) -> set[str]:
    """Modules that importing this one loads: its own imports, and those of ours among them.

    For the command line, also what any of its commands loads.
    """
    seen: set[str] = set()
    new = [module]
    if module == "splitpoint_cli.main":
        seen |= {place.partition(":")[0] for place in COMMANDS.values()}
        new += seen
    while new:
        path = ROOT.joinpath(*new.pop().split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.exists():
            found = set(imported_at_once(parsed(path).body))
            new += found - seen
            seen |= found
    return seen


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """What runs with the module itself: neither in a function nor for type checkers only."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from imported_at_once([] if is_for_types else inner)


@pytest.mark.parametrize(
    "program",
    [
        "splitpoint_cli.main",
        "gateway_service.__main__",
        *(f"{service}.__main__" for service in sorted(SERVICES)),
    ],
)
def test_a_start_loads_nothing_slow_that_few_need(program: str) -> None:
    loaded = loaded_at_start(program)
    assert "splitpoint.transport.tls" in loaded
    early = {name for name in SLOW for found in loaded if f"{found}.".startswith(f"{name}.")}
    assert early == set()


def test_a_command_loads_no_other_commands() -> None:
    """Importing them all takes longer than a short command runs."""
    own = imported_at_once(parsed(ROOT / "splitpoint_cli" / "main.py").body)
    names = {place.partition(":")[0] for place in COMMANDS.values()}
    assert names & set(own) == set()


@pytest.mark.parametrize(
    "program", ["splitpoint.client", "splitpoint_cli.main", "splitpoint_cli.request.probe"]
)
def test_a_client_starts_without_what_extras_bring(program: str) -> None:
    tops = {name.partition(".")[0] for name in loaded_at_start(program)}
    assert "grpc" in tops
    assert tops & {module for modules in extras.MODULES.values() for module in modules} == set()


def test_only_its_own_process_imports_the_transfer_engine() -> None:
    """A store imports the modules that do so in a function of the child's program."""
    package = "kvstore_service.mooncake"
    users = {
        name
        for name, tree in sources(*ALLOWED)
        for module in imported(tree)
        if module.startswith(package) and not name.startswith(package.replace(".", "/"))
    }
    assert users == {"kvstore_service/opening.py"}
    importers = {
        name
        for name, tree in sources(*ALLOWED)
        for module in imported(tree)
        if module.partition(".")[0] == "mooncake"
    }
    assert importers == {
        f"kvstore_service/mooncake/{name}.py" for name in ("engine", "pool_client")
    }
    for program in ("kvstore_service.__main__", "kvstore_service.opening"):
        loaded = loaded_at_start(program)
        assert "kvstore_service.mooncake.settings" in loaded
        assert not loaded & {
            "kvstore_service.mooncake.engine",
            "kvstore_service.mooncake.pool_client",
        }


def test_only_models_of_transformers_need_transformers() -> None:
    """Its import takes seconds, and most workers serve a family of our own decoder."""
    importers = {
        name
        for name, tree in sources("worker_service")
        for module in imported(tree)
        if module.split(".")[0] == "transformers"
    }
    own = {"divided", "own_parts", "transformers_model"}
    assert importers == {f"worker_service/model/{name}.py" for name in own}
    for program in ("worker_service.__main__", "splitpoint_cli.main"):
        assert not loaded_at_start(program) & {f"worker_service.model.{name}" for name in own}


def test_nothing_unpickles_or_evaluates() -> None:
    wrong = []
    for name, tree in sources(*ALLOWED, "tools"):
        wrong += [
            f"{name} imports {module}"
            for module in imported(tree)
            if module.split(".")[0] in UNSAFE_MODULES
        ]
        wrong += [
            f"{name}:{node.lineno} calls {called}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in UNSAFE_CALLS
        ]
    assert wrong == []


def test_multiprocessing_shared_memory_is_not_used() -> None:
    """Its resource tracker unlinks segments that it does not own."""
    wrong = [
        name
        for name, tree in sources(*ALLOWED)
        for module in imported(tree)
        if module.startswith("multiprocessing")
    ]
    assert wrong == []


# The folders of each package from the bottom to the top: a folder imports itself and those before
# it. A package's own modules are at the bottom if they are named here, else at the top.
LAYERS: dict[str, tuple[str, ...]] = {
    "splitpoint": (
        *(
            "errors",
            "extras",
            "keys",
            "progress",
            "shapes",
            "config",
            "speculation",
            "selection",
            "sampling",
            "tasks",
            "tiers",
        ),
        *(
            "limited",
            "structured",
            "host",
            "costs",
            "planning",
            "residency",
            "checkpoint",
            "chat",
            "arena",
        ),
        *("observe", "options", "transport", "discovery", "client"),
    ),
    "kvstore_service": (
        "idempotency",
        "sessions",
        "eviction",
        "pool",
        "recovery",
        "integrity",
        "session_manager",
        "store",
        "maintenance",
        *("validation", "slots"),
        "reader",
        "tiers.tier",
        "mooncake",
        "tiers.disk",
        "tiers",
        "opening",
    ),
    "worker_service": (
        *("checkpoint", "hardware", "lanes", "device", "kernels", "weights", "model", "graphs"),
        *(
            "selection",
            "distillation",
            "evaluation",
            "structured",
            "store",
            "pipeline",
            "fetching",
            "retrieval",
            "drafts",
            "engine",
            "speculation",
            "profiling",
            "numerics",
        ),
        *("counters", "streams", "prefixes", "runtime", "startup"),
    ),
    "scheduler_service": (
        *("limits", "worker_facts", "prefixes", "placement", "api"),
        *("policy", "options", "cluster", "requests"),
    ),
    "gateway_service": (
        "tool_calls",
        "openai",
        "openapi",
        "settings",
        "http",
        "upstream",
        "batch",
        "endpoints",
    ),
    "splitpoint_vllm": (
        *("plan", "namespace", "copies", "store", "worker"),
        *("pages", "manager", "spec", "connector"),
    ),
    "splitpoint_cli": (
        *(
            "signals",
            "files",
            "spool",
            "output",
            "options",
            "models",
            "devices",
        ),
        "page_tokens",
        "traces",
        *("checks", "stack"),
        *("request", "chat", "batch", "top"),
        *("arena", "security", "compose", "planning", "doctor", "vllm_config"),
        *("bench", "simulate", "calibrate", "eval"),
    ),
}


def layer_of(module: str, package: str) -> int:
    """Position of a module's folder in LAYERS; after the last one for modules at the top."""
    names = module.removeprefix(f"{package}.")
    layers = LAYERS[package]
    matching = [n for n, name in enumerate(layers) if f"{names}.".startswith(f"{name}.")]
    return matching[0] if matching else len(layers)


@pytest.mark.parametrize("package", LAYERS)
def test_folders_import_those_below_them(package: str) -> None:
    wrong = []
    for name, tree in sources(package):
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for target in imported_modules(tree):
            ours = target.startswith(f"{package}.") and not target.startswith(f"{package}.v1")
            if ours and layer_of(target, package) > layer_of(module, package):
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Modules that a file imports, those that `from` names as members of a folder included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                member = ROOT.joinpath(*node.module.split("."), f"{alias.name}.py")
                yield f"{node.module}.{alias.name}" if member.exists() else node.module


@pytest.mark.parametrize("package", ALLOWED)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Imports at a module's start only: a circle fails or works by what is imported first."""
    modules = {
        name.removesuffix(".py").replace("/", "."): tree
        for name, tree in sources(package)
        if not name.endswith("/__init__.py")
    }
    uses = {
        module: set(imported_at_once(tree.body)) & set(modules) for module, tree in modules.items()
    }
    TopologicalSorter(uses).prepare()  # raises CycleError with the circle


def test_folders_say_in_one_sentence_what_lives_there() -> None:
    """`splitpoint.client` alone also gives names on: it is the import path of the Python API."""
    wrong = []
    for name, tree in sources(*ALLOWED):
        if name.count("/") > 1 and name.endswith("/__init__.py"):
            if len(tree.body) != 1 and not name.startswith("splitpoint/client/"):
                wrong.append(name)
            assert ast.get_docstring(tree)
    assert wrong == []


def test_the_architecture_page_shows_every_folder() -> None:
    """Its tree has each folder's own sentence."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.sub(r" {2,}", " ", page)
    missing = []
    for name, tree_of_file in sources(*ALLOWED):
        folder, _, file = name.rpartition("/")
        if file == "__init__.py":
            sentence = (ast.get_docstring(tree_of_file) or "").partition("\n")[0]
            row = f"{folder.rpartition('/')[2]}/ {sentence.replace('`', '')}\n"
            if row not in tree:
                missing.append(row)
    assert missing == []
