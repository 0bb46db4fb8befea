"""`splitpoint metrics`: every metric of every service, as Markdown.

docs/metrics.md is what it prints. Knows nothing that splitpoint/observe/metrics.py does not.
"""

from __future__ import annotations

from collections.abc import Iterator

from splitpoint.observe.metrics import Kind, Metric, Needs, Service, all_metrics, metrics_of
from splitpoint_cli import metrics_elsewhere
from splitpoint_cli.report import AsJson, OutputFile, hand_over

_HEAD = """\
# Metrics

Every metric that Splitpoint's services measure, one table for each service. `splitpoint metrics`
printed this page from `splitpoint/observe/metrics.py`. Tests compare it with the page and with what
a running stack serves: nothing is measured that is not here.

## Reading them

`splitpoint up --metrics 9400` serves the scheduler's at `http://127.0.0.1:9400/metrics`, the
store's at port 9401 and those of workers 0, 1, ... at 9402, 9403, ... A service that is started by
hand takes `--metrics HOST:PORT`. For Prometheus, with the jobs and labels that the rules and
dashboards know ([monitoring.md](monitoring.md)):

```yaml
scrape_configs:
  - job_name: scheduler
    static_configs: [{targets: ["127.0.0.1:9400"]}]
  - job_name: kvstore
    static_configs: [{targets: ["127.0.0.1:9401"]}]
  - job_name: worker
    static_configs:
      - {targets: ["127.0.0.1:9402"], labels: {worker: "0", host: local}}
      - {targets: ["127.0.0.1:9403"], labels: {worker: "1", host: local}}
```

Beyond loopback they are served to clients with a certificate (`--tls-cert`, `--tls-key` and
`--tls-ca`: a `tls_config` in Prometheus), or with `--metrics-open` to everybody who can reach the
port: what that shows to whom is in [security.md](security.md#metrics). A service that hangs answers
a scrape with HTTP 503 and a reason within 5 seconds, so that its target is down instead of showing
values of long ago.

No name, help text, label or value is a prompt, a token, a text, a request id, a key or a tenant:
labels are names of states, methods and reasons that are known beforehand, of the model, of workers,
and of where their stores are.

Units are seconds, bytes, tokens, joules and watts; names that end in `_total` are counters since
the process started, so ask for `rate(...)` or `increase(...)`. Shares are not measured but divided,
for example, of the tokens that were looked up, those that were found:

```
rate(splitpoint_store_hit_tokens_total[5m]) / rate(splitpoint_store_query_tokens_total[5m])
```

A metric whose last column names something is absent where that is missing, instead of being 0.
Beside these, every process has Prometheus's usual ones (`process_resident_memory_bytes`,
`process_cpu_seconds_total`, `process_open_fds`, ...).
"""
_TITLES = {
    Service.KVSTORE: "The store",
    Service.WORKER: "Workers",
    Service.SCHEDULER: "The scheduler",
}
_COMMON = "Common to several services"


def metrics(as_json: AsJson = False, output: OutputFile = None) -> None:
    """Every metric of every service, as Markdown: docs/metrics.md."""
    hand_over(report_of(), lambda: print(page(), end=""), as_json=as_json, output=output)


def report_of() -> dict[str, object]:
    """The object that `--json` prints."""
    return {
        "metrics": [
            {
                "name": metric.name,
                "kind": str(metric.kind),
                "services": [service.value for service in metric.services],
                "labels": list(metric.labels),
                "help": metric.help,
                "needs": _needs(metric),
                "buckets": list(metric.buckets),
            }
            for metric in all_metrics()
        ]
    }


def page() -> str:
    """The whole page."""
    common = [each for each in all_metrics() if len(each.services) > 1]
    lines = [_HEAD, *_section(_COMMON, common)]
    for service, title in _TITLES.items():
        own = [each for each in metrics_of(service) if each not in common]
        lines += _section(title, own)
    buckets = [each for each in all_metrics() if each.kind is Kind.HISTOGRAM]
    return "\n".join([*lines, *_buckets(buckets), metrics_elsewhere.section()])


def _section(title: str, listed: list[Metric]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| name | kind | labels | meaning | absent without |"
    yield "|---|---|---|---|---|"
    for metric in listed:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {_needs(metric)} |"
    yield ""


def _needs(metric: Metric) -> str:
    """What the last column says."""
    needs: Needs | None = metric.needs
    return "" if needs is None else needs.value


def _buckets(histograms: list[Metric]) -> Iterator[str]:
    """Upper bounds, for who writes a query about one of them."""
    yield "## Buckets of the histograms"
    yield ""
    yield "| name | upper bounds |"
    yield "|---|---|"
    for metric in histograms:
        yield f"| `{metric.name}` | {' '.join(f'{bound:g}' for bound in metric.buckets)} |"
    yield ""
