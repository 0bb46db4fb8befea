"""The Dockerfile: what changes often lies on top, and nothing is installed without its hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from splitpoint.options.store import ENGINE

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
STAGES = {
    name: (parent, body.replace("\\\n", " "))
    for parent, name, body in re.findall(
        r"^FROM (\S+) AS (\S+)$(.*?)(?=^FROM |\Z)", TEXT, re.M | re.S
    )
}
TARGETS = ("control", ENGINE, "cpu", "cuda")
# Where a stage installs what its image has beyond control.
ADDED = {ENGINE: f"/{ENGINE}", "cpu": "/torch", "cuda": "/torch"}
SOURCE = "COPY --from=source /installed /opt/splitpoint"


def bundled() -> list[str]:
    """Paths that the wheel takes from outside of its packages."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    return list(wheel["force-include"])


def layers(stage: str) -> list[str]:
    """Instructions that make layers of an image, the lowest first."""
    if stage not in STAGES:
        return []
    parent, body = STAGES[stage]
    return layers(parent) + re.findall(r"^(?:COPY|RUN|ADD) .*$", body, re.M)


@pytest.mark.parametrize("target", TARGETS)
def test_a_change_of_the_source_ships_the_last_layer_alone(target: str) -> None:
    made = layers(target)
    assert made[-1] == SOURCE
    # Nothing below copies what changes with each commit.
    for instruction in made[:-1]:
        assert not re.match(r"COPY \. ", instruction)
        assert "--from=source" not in instruction
    dependencies = "COPY --from=dependencies /opt/splitpoint /opt/splitpoint"
    assert dependencies in made
    if target in ADDED:
        assert f"COPY --from={target}-dependencies {ADDED[target]} /opt/splitpoint" in made
    # A stage that dependencies come from sees locks, and no source.
    for stage in ("dependencies", *(f"{target}-dependencies" for target in ADDED)):
        for instruction in layers(stage):
            if instruction.startswith("COPY"):
                assert set(instruction.split()[1:-1]) <= {
                    "requirements/control.lock",
                    f"requirements/{ENGINE}.lock",
                    "requirements/worker.lock",
                    "constraints.txt",
                }


def test_only_torch_is_installed_without_hashes() -> None:
    for stage in STAGES:
        for instruction in layers(stage):
            if "pip" not in instruction or not instruction.startswith("RUN"):
                continue
            pip = re.search(r'pip="([^"]*)"', instruction)
            whole = instruction
            if pip is not None:
                whole = whole.replace(pip[0], "").replace("$pip ", f"{pip[1]} ")
            for command in re.findall(r"python3 -m pip --python[^&]*", whole):
                if "--require-hashes" in command:
                    assert re.search(r"-r \w+\.lock", command)
                elif " install " in command and "--no-index" not in command:
                    assert command.split()[-1] == "torch", command
                    assert "-c constraints.txt" in command
                else:
                    assert "--no-deps" in command


def test_what_a_wheel_is_built_from_reaches_the_build() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{path}" for path in bundled()} <= set(rules)


def test_no_image_has_pip() -> None:
    for target in TARGETS:
        assert any("/usr/local/bin/pip*" in each for each in layers(target))
        assert not any("ensurepip" in each and "rm -rf" not in each for each in layers(target))
    # Environments are made without one, too.
    assert TEXT.count("python3 -m venv ") == TEXT.count("python3 -m venv --without-pip ") > 0


@pytest.mark.parametrize("target", TARGETS)
def test_labels_say_what_an_image_is(target: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nARG VERSION={version}\n" in TEXT
    labels = "".join(STAGES[stage][1] for stage in ("runtime", target))
    named = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))
    assert named == {"title", "description", "licenses", "version", "revision"}


def test_cpu_workers_can_compile_their_kernels() -> None:
    """For the processor that they run on, into a folder of their user."""
    parent, body = STAGES["cpu"]
    assert parent == "runtime"
    assert re.search(r"^RUN apt-get .* g\+\+ ", body, re.M)
    (folder,) = re.findall(r"^ENV SPLITPOINT_KERNEL_CACHE=(\S+)$", body, re.M)
    assert f"install -d -m 0700 -o 10001 -g 10001 {folder}\n" in body
    # It changes seldom: below torch, and with the user of the services above it.
    assert body.index("USER 10001:10001") < body.index("COPY --from=cpu-dependencies")


def test_each_bundled_model_is_in_an_image_once() -> None:
    for target in TARGETS:
        copies = [each for each in layers(target) if "models/" in each]
        assert copies == [f"COPY {path} /{path}" for path in bundled()]
    # What the wheel has of it becomes a link.
    assert 'ln -s /models "$bundled"' in STAGES["source"][1]
