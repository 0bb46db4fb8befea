"""A dashboard as Grafana reads it (schema 39: Grafana 10 and later).

The same values give the same text, so that a difference in the repository is a
difference that somebody made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from splitpoint.observe.metrics import Needs
from tools.monitoring.needs import needs_of, panel_needs
from tools.monitoring.panels import FULL_WIDTH, Dashboard, Form, Panel

Json = dict[str, Any]

# As deploy/grafana/provisioning names it; elsewhere the variable chooses another one.
DATASOURCE_UID = "splitpoint-prometheus"
TAG = "splitpoint"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_TYPES = {
    Form.LINES: "timeseries",
    Form.STACK: "timeseries",
    Form.NUMBER: "stat",
    Form.NAMES: "stat",
    Form.TABLE: "table",
}
_HEIGHTS = {Form.LINES: 8, Form.STACK: 8, Form.NUMBER: 4, Form.NAMES: 4, Form.TABLE: 6}
# Behind a title, of what has no answer without it.
_MARKS = {
    Needs.REDIS: "Redis",
    Needs.STORE: "store",
    Needs.GPU: "GPU",
    Needs.RAPL: "RAPL",
    Needs.EMULATED_LINK: "GPU or emulated link",
}
_GREEN, _YELLOW, _RED = "green", "orange", "red"
# A table's time is now, and its value 1.
_LABELS_ONLY = {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}
_SEVERITY_COLOURS = [
    {"id": "custom.cellOptions", "value": {"type": "color-text"}},
    {
        "id": "mappings",
        "value": [
            {
                "type": "value",
                "options": {
                    "critical": {"color": _RED, "index": 0},
                    "warning": {"color": _YELLOW, "index": 1},
                    "info": {"color": "blue", "index": 2},
                },
            }
        ],
    },
]


def dashboard_text(dashboard: Dashboard, rules: Mapping[str, str]) -> str:
    """The file."""
    return json.dumps(_dashboard(dashboard, rules), indent=2, ensure_ascii=False) + "\n"


def marked_title(panel: Panel, rules: Mapping[str, str]) -> str:
    """With what it needs, as people see it."""
    marks = [_MARKS[need] for need in Needs if need in _needs(panel, rules)]
    return f"{panel.title} [{', '.join(marks)}]" if marks else panel.title


def _needs(panel: Panel, rules: Mapping[str, str]) -> frozenset[Needs]:
    needs = panel_needs(panel, rules)
    # A GPU is what both ask for.
    return needs - {Needs.EMULATED_LINK} if Needs.GPU in needs else needs


def _dashboard(dashboard: Dashboard, rules: Mapping[str, str]) -> Json:
    return {
        "uid": f"splitpoint-{dashboard.name}",
        "title": f"Splitpoint / {dashboard.title}",
        "description": dashboard.help,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair in all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "templating": {"list": [_datasource_variable(), _worker_variable()]},
        "annotations": {"list": [_alert_marks()]},
        "panels": list(_panels(dashboard, rules)),
    }


def _links() -> Json:
    return {
        "type": "dashboards",
        "tags": [TAG],
        "title": "Splitpoint",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
    }


def _datasource_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {"selected": True, "text": "Splitpoint", "value": DATASOURCE_UID},
        "hide": 0,
    }


def _worker_variable() -> Json:
    query = "label_values(splitpoint_worker_info, worker)"
    return {
        "name": "worker",
        "label": "worker",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "worker"},
        "refresh": 2,  # when the time range changes
        "sort": 3,  # by number
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _alert_marks() -> Json:
    """Alerts that fire, as marks over every panel."""
    return {
        "name": "alerts",
        "datasource": _SOURCE,
        "enable": True,
        "expr": 'ALERTS{alertname=~"Splitpoint.*", alertstate="firing"}',
        "iconColor": _RED,
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}} {{worker}} {{instance}}",
        "step": "30s",
    }


def _panels(dashboard: Dashboard, rules: Mapping[str, str]) -> Iterator[Json]:
    """Rows and their panels, left to right, numbered in this order."""
    number, top = 1, 0
    for row in dashboard.rows:
        yield _row(number, row.title, top)
        number, top, left, height = number + 1, top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > FULL_WIDTH:
                top, left, height = top + height, 0, 0
            place = {"h": _HEIGHTS[panel.form], "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **_panel(panel, rules)}
            number, left, height = number + 1, left + panel.width, max(height, place["h"])
        top += height


def _row(number: int, title: str, top: int) -> Json:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"h": 1, "w": FULL_WIDTH, "x": 0, "y": top},
        "panels": [],
    }


def _panel(panel: Panel, rules: Mapping[str, str]) -> Json:
    return {
        "type": _TYPES[panel.form],
        "title": marked_title(panel, rules),
        "description": description_of(panel, rules),
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": _defaults(panel, rules),
            "overrides": list(_overrides(panel)),
        },
        "options": _options(panel),
        "targets": [_target(index, panel) for index in range(len(panel.queries))],
        **({"transformations": [_LABELS_ONLY]} if panel.form is Form.TABLE else {}),
    }


def description_of(panel: Panel, rules: Mapping[str, str]) -> str:
    """The panel's help, and of what there is no data without something."""
    sentences = [panel.help]
    common = _needs(panel, rules)
    if common:
        sentences.append(f"No data without {' and '.join(sorted(common))}.")
    for query in panel.queries:
        further = needs_of(query.expr, rules) - panel_needs(panel, rules)
        if further:
            sentences.append(f"`{query.legend}`: needs {' and '.join(sorted(further))}.")
    return "\n\n".join(sentences)


def _defaults(panel: Panel, rules: Mapping[str, str]) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": _steps(panel)},
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    if needs := _needs(panel, rules):
        defaults["noValue"] = f"needs {' and '.join(sorted(needs))}"
    if panel.form is Form.TABLE:
        defaults["noValue"] = "none"
    if panel.form not in (Form.LINES, Form.STACK):
        defaults["color"] = {"mode": "thresholds"}
        return defaults
    is_stack = panel.form is Form.STACK
    has_bounds = panel.warn is not None or panel.alarm is not None
    defaults["custom"] = {
        "drawStyle": "line",
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "fillOpacity": 40 if is_stack else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if is_stack else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if has_bounds else "off"},
        "axisSoftMin": 0,
    }
    return defaults


def _steps(panel: Panel) -> list[Json]:
    """Colours, from the lowest value upwards."""
    levels = [(None, _GREEN), (panel.warn, _YELLOW), (panel.alarm, _RED)]
    if panel.low_is_bad:
        levels = [(None, _RED), (panel.alarm, _YELLOW), (panel.warn, _GREEN)]
    first, *others = levels
    return [
        {"color": first[1], "value": None},
        *({"color": colour, "value": value} for value, colour in others if value is not None),
    ]


def _overrides(panel: Panel) -> Iterator[Json]:
    """Of single queries, then of single legends."""
    for index, query in enumerate(panel.queries):
        properties: list[Json] = []
        if query.is_limit:
            properties += [
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}},
                {"id": "custom.fillOpacity", "value": 0},
                {"id": "custom.stacking", "value": {"mode": "none", "group": "A"}},
            ]
        if query.unit is not None:
            properties.append({"id": "unit", "value": query.unit})
        if query.colour:
            properties.append(_fixed(query.colour))
        if properties:
            matcher = {"id": "byFrameRefID", "options": _letter(index)}
            yield {"matcher": matcher, "properties": properties}
    for legend, colour in panel.colours.items():
        matcher = {"id": "byName", "options": legend}
        yield {"matcher": matcher, "properties": [_fixed(colour)]}
    if panel.form is Form.TABLE:
        matcher = {"id": "byName", "options": "severity"}
        yield {"matcher": matcher, "properties": _SEVERITY_COLOURS}


def _fixed(colour: str) -> Json:
    return {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}


def _options(panel: Panel) -> Json:
    match panel.form:
        case Form.TABLE:
            return {"showHeader": True, "sortBy": [{"displayName": "severity", "desc": False}]}
        case Form.NUMBER | Form.NAMES:
            return _number_options(panel)
        case _:
            return _line_options()


def _line_options() -> Json:
    return {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull", "mean", "max"],
            "sortBy": "Max",
            "sortDesc": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _number_options(panel: Panel) -> Json:
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "auto",
        "textMode": "name" if panel.form is Form.NAMES else "auto",
        "colorMode": "none" if panel.form is Form.NAMES else "value",
        "graphMode": "none" if panel.form is Form.NAMES else "area",
        "justifyMode": "auto",
    }


def _target(index: int, panel: Panel) -> Json:
    query, is_table = panel.queries[index], panel.form is Form.TABLE
    return {
        "refId": _letter(index),
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": not is_table,
        "instant": is_table,
        **({"format": "table"} if is_table else {}),
    }


def _letter(index: int) -> str:
    return chr(ord("A") + index)
