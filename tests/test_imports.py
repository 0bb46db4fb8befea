"""Imports point down only, and nothing here unpickles or evaluates."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"kvstore_service", "worker_service", "scheduler_service"}
# What each package may import of this project.
ALLOWED = {
    "splitpoint": {"splitpoint"},
    "kvstore_service": {"splitpoint", "kvstore_service"},
    "worker_service": {"splitpoint", "worker_service"},
    "scheduler_service": {"splitpoint", "scheduler_service"},
    "splitpoint_cli": {"splitpoint", "splitpoint_cli", *SERVICES},
}
# Only the worker computes; benchmarks run it in their own process.
TORCH_FILES = (
    "worker_service/",
    "splitpoint_cli/decode_runs.py",
    "splitpoint_cli/offload_engine.py",
    "splitpoint_cli/offload_peer.py",
    "splitpoint_cli/offload_runs.py",
    "splitpoint_cli/offload_store.py",
)
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "joblib.load", "numpy.load", "np.load"}


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("splitpoint/v1/"):  # generated
                yield name, ast.parse(path.read_text(), name)


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
        if (top := module.split(".")[0]) in ours and top not in ALLOWED[package]
    ]
    assert wrong == []


def test_only_the_worker_and_the_benchmarks_import_torch() -> None:
    wrong = [
        f"{name} imports {module}"
        for name, tree in sources(*ALLOWED)
        for module in imported(tree)
        if module.split(".")[0] in {"torch", "transformers"} or module == "safetensors.torch"
        if not name.startswith(TORCH_FILES)
    ]
    assert wrong == []


def test_the_worker_does_not_need_transformers() -> None:
    wrong = [
        name
        for name, tree in sources("worker_service")
        for module in imported(tree)
        if module.split(".")[0] == "transformers"
    ]
    assert wrong == []


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
