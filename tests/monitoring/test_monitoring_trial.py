"""Parts of the trial on a real stack, without Prometheus."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from splitpoint.errors import DeadlineExceeded, Unavailable
from tools.monitoring.dashboards import dashboards, recording_rules
from tools.monitoring.trial import (
    EXPECTED_ALERTS,
    Series,
    Target,
    answers,
    configuration_for,
    free_ports,
    running,
    wait_until,
    worker_process,
    wrong_alerts,
)

TARGETS = [
    Target("kvstore", "127.0.0.1:1", {}),
    Target("worker", "127.0.0.1:2", {"worker": "0"}),
    Target("worker", "127.0.0.1:3", {"worker": "1"}),
    Target("gpu-double", "127.0.0.1:4", {"worker": "gpu"}),
]


def test_the_trial_scrapes_as_shipped_at_other_addresses() -> None:
    configuration = configuration_for(TARGETS)
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    assert set(jobs) == {"kvstore", "worker", "gpu-double"}
    assert [each["targets"] for each in jobs["worker"]["static_configs"]] == [
        ["127.0.0.1:2"],
        ["127.0.0.1:3"],
    ]
    assert "file_sd_configs" not in jobs["worker"]
    assert jobs["worker"]["relabel_configs"][0]["target_label"] == "worker"
    assert all(Path(name).is_absolute() for name in configuration["rule_files"])


def test_a_query_without_an_answer_is_seen() -> None:
    silent = "splitpoint_store_epoch"

    def ask(query: str) -> Sequence[Series]:
        return [] if query == silent else [Series({}, [(0.0, 1.0), (1.0, 2.0)])]

    found = list(answers(ask))
    queries = sum(len(panel.queries) for board in dashboards() for panel in board.panels())
    assert len(found) == queries + len(recording_rules())
    (nothing,) = (answer for answer in found if answer.sample is None)
    assert (nothing.place, nothing.panel) == ("store", "Starts on this arena")
    assert {answer.sample for answer in found if answer != nothing} == {2.0}


def test_a_trouble_fires_once_and_pages_only_when_requests_fail() -> None:
    right = Counter(EXPECTED_ALERTS)
    assert list(wrong_alerts(right)) == []
    four = right + Counter({("SplitpointRedisAway", "warning"): 3})
    assert list(wrong_alerts(four)) == ["SplitpointRedisAway (warning) fires 4 times, not once"]
    paging = Counter({("SplitpointScrapeFailing", "critical"): 1})
    del right["SplitpointScrapeFailing", "warning"]
    assert list(wrong_alerts(right + paging)) == [
        "SplitpointScrapeFailing (warning) fires 0 times, not once",
        "SplitpointScrapeFailing is critical, although requests are served",
    ]


def test_a_process_ends_with_its_context(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    with running("sleeper", command, tmp_path) as process:
        wait_until(lambda: (tmp_path / "sleeper.log").read_text() == "here\n", 20, "it runs")
        assert process.poll() is None
        with pytest.raises(Unavailable, match="no worker 0"):
            worker_process(process.pid, "0")
    assert process.returncode is not None


def test_ports_come_in_a_row() -> None:
    first = free_ports(7)
    assert 1024 < first < 65536 - 7


def test_waiting_has_an_end() -> None:
    with pytest.raises(DeadlineExceeded, match="never"):
        wait_until(lambda: False, 0, "never")
