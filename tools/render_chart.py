"""Renders the Helm chart as the tests look at it: `python -m tools.render_chart`.

With `helm` if it is there, else with tools/chart/render.go (Debian: golang-go,
golang-github-masterminds-sprig-dev, golang-github-ghodss-yaml-dev). Each case's values
lie in tests/deploy/charts; its manifests are written beside them, headed by a digest of
the chart, by which a test knows whether they are still what the chart makes. Prometheus'
rules have one home, deploy/prometheus/rules: that the chart carries them as they are is
checked here, and what is written leaves them out, as the digest does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "splitpoint"
RULES = ROOT / "deploy" / "prometheus" / "rules"
CASES = ROOT / "tests" / "deploy" / "charts"
HEADER = "# Rendered from the chart of digest "


def digest_of(case: Path) -> str:
    """Return a hash of all inputs of the rendering."""
    digest = hashlib.sha256()
    parts = (path for path in CHART.rglob("*") if path.is_file() and path.parent.name != "rules")
    for path in [*sorted(parts), case]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def rendered_of(case: Path) -> Path:
    """Return the place of a values file's manifests."""
    return case.with_name(f"{case.name.removesuffix('.values.yaml')}.rendered.yaml")


def render(case: Path) -> str:
    if shutil.which("helm"):
        command = ["helm", "template", "splitpoint", str(CHART), "-f", str(case)]
        return _run(command, dict(os.environ))
    if not shutil.which("go"):
        sys.exit("neither helm nor go is there: install one of them (see this file's top)")
    environment = dict(os.environ, GOPATH="/usr/share/gocode", GO111MODULE="off")
    environment.setdefault("GOCACHE", str(Path(tempfile.gettempdir()) / "splitpoint-go-cache"))
    tool = ROOT / "tools" / "chart" / "render.go"
    return _run(["go", "run", str(tool), str(CHART), str(case)], environment)


def without_rules(rendered: str) -> str:
    """Return the manifests without the PrometheusRules' groups, which must equal their file's."""
    kept = []
    for document in rendered.split("\n---\n"):
        manifest = yaml.safe_load(document)
        if manifest is not None and manifest["kind"] == "PrometheusRule":
            (rules,) = (
                path
                for path in RULES.glob("*.yml")
                if manifest["metadata"]["name"].endswith(path.stem)
            )
            if manifest["spec"] != yaml.safe_load(rules.read_text()):
                sys.exit(f"{manifest['metadata']['name']} is not {rules.relative_to(ROOT)}")
            head = document.partition("\nspec:")[0]
            document = f"{head}\n# spec: {rules.relative_to(ROOT)}"
        kept.append(document)
    return "\n---\n".join(kept)


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip())
    return done.stdout


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tools.render_chart",
        description="Render the Helm chart with each case's values, into tests/deploy/charts.",
    ).parse_args()
    for case in sorted(CASES.glob("*.values.yaml")):
        target = rendered_of(case)
        target.write_text(f"{HEADER}{digest_of(case)}\n{without_rules(render(case))}")
        print(f"{target.relative_to(ROOT)}: {target.read_text().count('kind: ')} kinds")


if __name__ == "__main__":
    main()
