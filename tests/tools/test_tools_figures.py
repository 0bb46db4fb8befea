"""Every measured number of README.md and docs/lab/measurements.md is that of its result file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import figures
from tools.figures import PAGES, RESULTS, ROOT, Figure, runs_of, unbound, words_of

FIGURES = figures.figures()
FILES = sorted(path.name for path in RESULTS.iterdir())


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: " ".join(figure.text.split()[:6]))
def test_a_figure_is_that_of_its_file(figure: Figure) -> None:
    page = words_of((ROOT / figure.page).read_text())
    assert words_of(figure.rendered()) in page
    assert figure.unstated_repeats() == []


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_number_has_a_file(page: str) -> None:
    texts = [figure.rendered() for figure in FIGURES if figure.page == page]
    assert unbound((ROOT / page).read_text(), texts) == []


def test_every_result_is_cited() -> None:
    cited = {file for figure in FIGURES for file in figure.files.values()}
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("**/*.md"))
    assert [file for file in FILES if file not in cited and file not in pages] == []
    named = set(re.findall(r"benchmarks/results/([\w.-]+\.json)", pages)) | cited
    assert sorted(named - set(FILES)) == []


@pytest.mark.parametrize("file", FILES)
def test_a_result_names_commits_of_the_history(file: str) -> None:
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("not a clone with its history")
    named = re.fullmatch(r"\d{4}-\d\d-\d\d-([0-9a-f]{7,})-[\w-]+\.json", file)
    assert named, "a result is named DATE-COMMIT-WHAT.json"
    commits = {run.get("commit", named[1]) for run in runs_of(RESULTS / file)}
    assert any(commit.startswith(named[1]) or named[1].startswith(commit) for commit in commits)
    for commit in commits:
        _git("merge-base", "--is-ancestor", commit, "HEAD", check=True)


def test_the_runs_of_a_claim_are_shown_as_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    (tmp_path / "some.json").write_text(
        '{"a": {"b.c": 4, "d": [8]}}\n{"a": {"b.c": 6, "d": [8]}}\n'
    )
    figure = Figure(
        "README.md", "{a.b.c / a.d.0:.2f}, {sum a.b.c:,}, {a.d.0 * 10:.0f} in two runs", "some.json"
    )
    assert figure.rendered() == "0.50 to 0.75, 10, 80 in two runs"
    assert figure.unstated_repeats() == []
    assert Figure("README.md", "{a.b.c:d} in runs", "some.json").unstated_repeats() == [
        "some.json: 2"
    ]
    with pytest.raises(ValueError, match=r"no run of some\.json has 'a\.x'"):
        Figure("README.md", "{a.x:d}", "some.json").rendered()


def test_numbers_without_a_file_are_found() -> None:
    page = "It takes 4.5 ms, 3 times as long, or 12 % of `5 ms`; needs Python 3.11.\n\n    9 ms\n"
    found = [text.rsplit(",")[-1].split()[-2:] for text in unbound(page, ["or 12 % of"])]
    assert found == [["4.5", "ms"], ["3", "times"]]


def _git(*arguments: str, check: bool = False) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=check
    )
    return answer.stdout.strip()
