"""Python and the packages that Splitpoint needs, by their versions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from splitpoint.extras import SERVICES
from splitpoint_cli.checks.finding import Finding, Verdict

_LEAST_PYTHON = (3, 11)
# "grpcio>=1.70,<2" or "redis[hiredis]>=5.2"; the part after ";" names an extra.
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(;.*)?")
_EXTRA = re.compile(r"""extra == ['"]([a-z]+)['"]""")


def check_python(version: tuple[int, int, int]) -> Finding:
    found = "Python " + ".".join(map(str, version))
    if version[:2] < _LEAST_PYTHON:
        least = ".".join(map(str, _LEAST_PYTHON))
        return Finding("Python", Verdict.PROBLEM, found, f"Python {least} or newer is needed.")
    return Finding("Python", Verdict.OK, found)


def check_packages(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> Finding:
    """Check versions. `version_of` returns a package's version; None if it is not installed."""
    wrong: list[str] = []
    needed: list[str] = []
    count = 0
    for requirement in requirements:
        parsed = _REQUIREMENT.fullmatch(requirement.strip())
        if parsed is None or parsed[3]:
            continue
        count += 1
        name, bounds = parsed[1], parsed[2].strip()
        version = version_of(name)
        if version is None:
            wrong.append(f"{name} is not installed")
        elif not _satisfies(version, bounds):
            wrong.append(f"{name} is {version}, {bounds} is needed")
        else:
            continue
        needed.append(f"'{requirement.strip()}'")
    if wrong:
        return Finding(
            "packages",
            Verdict.PROBLEM,
            "; ".join(wrong),
            f"Install what is missing: python -m pip install {' '.join(needed)}",
        )
    torch = version_of("torch")
    return Finding("packages", Verdict.OK, f"{count} packages as needed, torch {torch}")


def own_requirements() -> list[str]:
    """Return the requirements of a stack, from the installed distribution or the source tree.

    They are those of the base and of the services' extras, without markers.
    """
    from importlib import metadata  # slow to load, and rarely needed

    try:
        found = metadata.requires("splitpoint") or []
    except metadata.PackageNotFoundError:
        text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        found = list(project["dependencies"])
        for extra, requirements in project["optional-dependencies"].items():
            found += [f"{requirement}; extra == '{extra}'" for requirement in requirements]
    return sorted({wanted for each in found if (wanted := _of_services(each)) is not None})


def _of_services(requirement: str) -> str | None:
    """Return the requirement without its marker; None if no service has it."""
    bare, _, marker = requirement.partition(";")
    extra = _EXTRA.search(marker)
    is_wanted = not marker or (extra is not None and extra[1] in {"service", *SERVICES})
    return bare.strip() if is_wanted and not bare.startswith("splitpoint[") else None


def installed_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, bounds: str) -> bool:
    """Return True if a version meets bounds such as ">=1.70,<2"."""
    ours = _numbers(version)
    for bound in filter(None, map(str.strip, bounds.split(","))):
        if bound.startswith(">=") and ours < _numbers(bound[2:]):
            return False
        if bound.startswith("<") and not bound.startswith("<=") and ours >= _numbers(bound[1:]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return four numbers, such as (2, 13, 0, 0) of 2.13.0+cpu."""
    parts = re.match(r"\d+(?:\.\d+)*", version.strip())
    numbers = [int(part) for part in parts[0].split(".")] if parts else []
    return tuple((numbers + [0] * 4)[:4])
