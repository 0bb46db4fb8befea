"""`splitpoint metrics`: every metric of every service, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator

from splitpoint.observe.metrics import Kind, Metric, Service, all_metrics, metrics_of
from splitpoint_cli.output import AsJson, OutputFile, hand_over

_TITLES = {
    Service.KVSTORE: "The store",
    Service.WORKER: "Workers",
    Service.SCHEDULER: "The scheduler",
    Service.GATEWAY: "The gateway",
}
_COMMON = "Common to several services"


def metrics(as_json: AsJson = False, output: OutputFile = None) -> None:
    """Print every metric of every service, as Markdown."""
    hand_over(report_of(), lambda: print(tables()), as_json=as_json, output=output)


def report_of() -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "metrics": [
            {
                "name": metric.name,
                "kind": str(metric.kind),
                "services": [service.value for service in metric.services],
                "labels": list(metric.labels),
                "help": metric.help,
                "needs": metric.needs or "",
                "buckets": list(metric.buckets),
            }
            for metric in all_metrics()
        ]
    }


def tables() -> str:
    """Return a table for each service, and the buckets of the histograms."""
    common = [each for each in all_metrics() if len(each.services) > 1]
    lines = [*_section(_COMMON, common)]
    for service, title in _TITLES.items():
        lines += _section(title, [each for each in metrics_of(service) if each not in common])
    lines += ["## Buckets of the histograms", "", "| name | upper bounds |", "|---|---|"]
    for metric in all_metrics():
        if metric.kind is Kind.HISTOGRAM:
            bounds = " ".join(f"{bound:g}" for bound in metric.buckets)
            lines.append(f"| `{metric.name}` | {bounds} |")
    return "\n".join(lines)


def _section(title: str, listed: list[Metric]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| name | kind | labels | meaning | absent without |"
    yield "|---|---|---|---|---|"
    for metric in listed:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        needs = metric.needs or ""
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {needs} |"
    yield ""
