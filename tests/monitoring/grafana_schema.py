"""Compare a dashboard with Grafana's own schema, as `grafana-foundation-sdk` has it.

The SDK's models are generated from Grafana's sources, but reading JSON into them checks nothing:
they drop unknown keys and accept any type. This module finds both.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()

# Grafana reads these, and the SDK's models lack them: what a variable shows as its query,
# and the texts of annotations that a Prometheus makes.
NOT_MODELLED = {
    "/templating/list/definition",
    "/annotations/list/titleFormat",
    "/annotations/list/textFormat",
    "/annotations/list/step",
}

# Ids of @grafana/data.
UNITS = {value for name, value in vars(units).items() if name[0].isupper()}


def is_unit(unit: str) -> bool:
    """Return True for a known id, and for a custom unit scaled by thousands: `si:tok/s`."""
    return unit in UNITS or (unit.startswith("si:") and len(unit) > len("si:"))


def problems(text: str) -> list[str]:
    """Return the keys of a dashboard that Grafana does not know, and values of another type."""
    written = json.loads(text)
    model = Dashboard.from_json(written)
    read = json.loads(json.dumps(model, cls=JSONEncoder))
    return [*_lost(written, read, ""), *_mistyped(model, Dashboard, "")]


def _lost(written: Any, read: Any, path: str) -> Iterator[str]:
    """Yield what the SDK dropped or changed."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            place = f"{path}/{key}"
            if key in read:
                yield from _lost(value, read[key], place)
            elif place not in NOT_MODELLED:
                yield f"{place}: Grafana has no such key"
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for one, other in zip(written, read, strict=True):
            yield from _lost(one, other, path)
    elif written != read:
        yield f"{path}: {written!r} is read as {read!r}"


def _mistyped(value: Any, hint: Any, path: str) -> Iterator[str]:
    if hasattr(value, "to_json"):
        hints = typing.get_type_hints(type(value))
        for name, attribute in vars(value).items():
            yield from _mistyped(attribute, hints[name], f"{path}/{name}")
    elif isinstance(value, dict) and hasattr(hint, "from_json"):
        # The SDK leaves some of these as they came.
        model = hint.from_json(value)
        yield from _lost(value, json.loads(json.dumps(model, cls=JSONEncoder)), path)
        yield from _mistyped(model, hint, path)
    elif isinstance(value, list):
        (inner,) = typing.get_args(_choice(list, hint)) or (object,)
        for each in value:
            yield from _mistyped(each, inner, path)
    elif not _fits(value, hint):
        yield f"{path}: {value!r} is not {hint}"


def _choice(kind: type, hint: Any) -> Any:
    """Return the member of a union that is such a container."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    return next((member for member in members if typing.get_origin(member) is kind), kind)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _fits(value: Any, hint: Any) -> bool:
    if _is_union(hint):
        return any(_fits(value, member) for member in typing.get_args(hint))
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint is object or hint is Any:
        return True
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return value in {member.value for member in origin}
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(origin, type) and isinstance(value, origin)
