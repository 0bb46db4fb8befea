"""Dataclasses as messages and back: fields of the same name are copied, by descriptor.

A field that only one side has raises, so that no value is lost in silence; what differs
between the two sides is given by the caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import (
    Objective,
    Plan,
    Reason,
    ReasonKind,
    Residency,
    RestoreMethod,
)
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.words import ExplainedPlan
from splitpoint.selection import (
    FULL,
    PoolPolicy,
    Selection,
    SelectionMethod,
    SelectionUsage,
    check_served,
)
from splitpoint.shapes import ArenaLayout, DataType, Encoding, ModelShape, Numerics, WeightFormat
from splitpoint.speculation import AskedSpeculation, DraftMethod, Speculation
from splitpoint.tiers import Tier
from splitpoint.v1 import types_pb2 as pb

_Member = TypeVar("_Member", bound=Enum)
_Number = TypeVar("_Number", bound=int)
_Message = TypeVar("_Message", bound=Message)
_Dataclass = TypeVar("_Dataclass")


class _Enumeration(Generic[_Member, _Number]):
    """A Python enumeration and its numbers on the wire, where members have the same names.

    Args:
        field: the field's name in errors.
        unspecified: the member that zero stands for; None: zero is an error.
    """

    def __init__(
        self,
        members: type[_Member],
        wire: type[_Number],
        field: str,
        unspecified: _Member | None = None,
    ) -> None:
        numbers: dict[str, _Number] = dict(wire.items())  # type: ignore[attr-defined]
        prefix = next(iter(numbers)).removesuffix("UNSPECIFIED")
        self._field = field
        self._words = prefix.rstrip("_").replace("_", " ").lower()
        self._numbers = {
            member: numbers[prefix + member.name]
            for member in members
            if prefix + member.name in numbers
        }
        self._members = {int(number): member for member, number in self._numbers.items()}
        if unspecified is not None:
            self._members[0] = unspecified
            self._numbers.setdefault(unspecified, numbers[prefix + "UNSPECIFIED"])

    def __contains__(self, member: _Member) -> bool:
        """Return True if the member has a number."""
        return member in self._numbers

    def to_proto(self, member: _Member) -> _Number:
        return self._numbers[member]

    def from_proto(self, number: int) -> _Member:
        """Raise InvalidArgument for a number without a member."""
        if number not in self._members:
            raise InvalidArgument(f"unknown {self._words} {number}", field=self._field)
        return self._members[number]

    def known(self, numbers: Iterable[int]) -> Iterator[_Member]:
        """Yield the members of those numbers that have one: a newer peer may know more."""
        return (self._members[number] for number in numbers if number in self._members)


_DATA_TYPE = _Enumeration(DataType, pb.DataType, "data_type")
_ENCODING = _Enumeration(Encoding, pb.Encoding, "encoding", Encoding.NATIVE)
_RESIDENCY = _Enumeration(Residency, pb.Residency, "residency")
_METHOD = _Enumeration(RestoreMethod, pb.RestoreMethod, "method")
_SCHEDULE = _Enumeration(Schedule, pb.Schedule, "schedule", Schedule.SERIAL)
_OBJECTIVE = _Enumeration(Objective, pb.Objective, "objective", Objective.LATENCY)
_WEIGHT_FORMAT = _Enumeration(WeightFormat, pb.WeightFormat, "weight_format", WeightFormat.NATIVE)
_NUMERICS = _Enumeration(Numerics, pb.Numerics, "numerics", Numerics.FAST)
_DRAFT_METHOD = _Enumeration(DraftMethod, pb.DraftMethod, "method", DraftMethod.OFF)
_SELECTION_METHOD = _Enumeration(SelectionMethod, pb.SelectionMethod, "selection.method")
_TIER = _Enumeration(Tier, pb.Tier, "tier")
# By the name of the enumeration on the wire.
_ENUMERATIONS: dict[str, _Enumeration[Any, Any]] = {
    "DataType": _DATA_TYPE,
    "Encoding": _ENCODING,
    "Residency": _RESIDENCY,
    "RestoreMethod": _METHOD,
    "Schedule": _SCHEDULE,
    "Objective": _OBJECTIVE,
    "DraftMethod": _DRAFT_METHOD,
    "Numerics": _NUMERICS,
    "WeightFormat": _WEIGHT_FORMAT,
    "SelectionMethod": _SELECTION_METHOD,
}

data_type_from_proto = _DATA_TYPE.from_proto
encoding_to_proto, encoding_from_proto = _ENCODING.to_proto, _ENCODING.from_proto
residency_to_proto, residency_from_proto = _RESIDENCY.to_proto, _RESIDENCY.from_proto
method_to_proto, method_from_proto = _METHOD.to_proto, _METHOD.from_proto
schedule_to_proto, schedule_from_proto = _SCHEDULE.to_proto, _SCHEDULE.from_proto
objective_to_proto, objective_from_proto = _OBJECTIVE.to_proto, _OBJECTIVE.from_proto
weight_format_to_proto = _WEIGHT_FORMAT.to_proto
weight_format_from_proto = _WEIGHT_FORMAT.from_proto
numerics_to_proto, numerics_from_proto = _NUMERICS.to_proto, _NUMERICS.from_proto
draft_method_to_proto = _DRAFT_METHOD.to_proto
draft_method_from_proto = _DRAFT_METHOD.from_proto
known_draft_methods = _DRAFT_METHOD.known
tier_to_proto, tier_from_proto = _TIER.to_proto, _TIER.from_proto


def to_message(kind: type[_Message], value: object, **given: Any) -> _Message:
    """Return a message with every field taken from the attribute of its name, or given."""
    fields = dict(given)
    for field in kind.DESCRIPTOR.fields:
        if field.name in given:
            continue
        found = getattr(value, field.name)
        if field.enum_type is not None:
            found = _ENUMERATIONS[field.enum_type.name].to_proto(found)
        fields[field.name] = found
    return kind(**fields)


def plain_converter(kind: type[_Message]) -> Callable[[object], _Message]:
    """Return a `to_message` of numbers and bytes only, which takes a third of its time."""
    names = tuple(field.name for field in kind.DESCRIPTOR.fields)
    values = attrgetter(*names)
    return lambda value: kind(**dict(zip(names, values(value), strict=True)))


def from_message(kind: type[_Dataclass], message: Message, **given: Any) -> _Dataclass:
    """Return a dataclass with every field taken from the message's field of its name.

    An optional field that is absent keeps the dataclass's default. `given`: fields that the
    message has under another name or as another type.
    """
    dataclass: Any = kind
    for name, has_presence, convert in _fields_of(dataclass, message.DESCRIPTOR, frozenset(given)):
        if has_presence and not message.HasField(name):
            continue
        found = getattr(message, name)
        given[name] = found if convert is None else convert(found)
    return kind(**given)


@cache
def _fields_of(
    kind: Any, message: Descriptor, given: frozenset[str]
) -> tuple[tuple[str, bool, Callable[[Any], object] | None], ...]:
    """Return name, presence and conversion of each field that is not given."""
    fields = (each for each in dataclasses.fields(kind) if each.init and each.name not in given)
    found = []
    for name in (each.name for each in fields):
        descriptor = message.fields_by_name[name]
        convert: Callable[[Any], object] | None = None
        if descriptor.enum_type is not None:
            convert = _ENUMERATIONS[descriptor.enum_type.name].from_proto
        elif descriptor.message_type is not None:  # a map: the only kind that is read here
            convert = dict
        elif descriptor.is_repeated:
            convert = tuple
        found.append((name, descriptor.has_presence, convert))
    return tuple(found)


def shape_to_proto(shape: ModelShape) -> pb.ModelShape:
    return to_message(pb.ModelShape, shape)


def shape_from_proto(message: pb.ModelShape) -> ModelShape:
    return from_message(ModelShape, message)


def layout_to_proto(layout: ArenaLayout) -> pb.ArenaLayout:
    return to_message(pb.ArenaLayout, layout)


def layout_from_proto(message: pb.ArenaLayout) -> ArenaLayout:
    return from_message(ArenaLayout, message)


def profile_to_proto(profile: Profile) -> pb.Profile:
    return to_message(pb.Profile, profile)


def profile_from_proto(message: pb.Profile) -> Profile:
    return from_message(Profile, message)


def plan_to_proto(plan: Plan) -> pb.Plan:
    """Return the message; it has words if the plan has them."""
    given = {} if isinstance(plan, ExplainedPlan) else {"reason": "", "reason_details": ()}
    reasons = [
        pb.PlanReason(kind=reason.kind.value, values=map(_value_to_proto, reason.values))
        for reason in plan.reasons
    ]
    return to_message(pb.Plan, plan, reasons=reasons, **given)


def plan_from_proto(message: pb.Plan) -> ExplainedPlan:
    """Return the plan without the reasons whose kind this version does not know."""
    known = set(ReasonKind)
    reasons = tuple(
        Reason(ReasonKind(reason.kind), tuple(map(_value_from_proto, reason.values)))
        for reason in message.reasons
        if reason.kind in known
    )
    return from_message(ExplainedPlan, message, reasons=reasons)


def _value_to_proto(value: int | float | str) -> pb.ReasonValue:
    match value:
        case int():
            return pb.ReasonValue(count=value)
        case float():
            return pb.ReasonValue(number=value)
        case _:
            return pb.ReasonValue(text=value)


def _value_from_proto(message: pb.ReasonValue) -> int | float | str:
    field = message.WhichOneof("value") or "text"
    value: int | float | str = getattr(message, field)
    return value


def speculation_from_proto(params: pb.SpeculativeParams) -> AskedSpeculation:
    """Raises InvalidArgument naming the field below `speculation`."""
    try:
        method = draft_method_from_proto(params.method) if params.method else None
        return from_message(AskedSpeculation, params, method=method)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"speculation.{error.field}") from error


def speculation_to_proto(speculation: Speculation) -> pb.SpeculativeParams:
    return pb.SpeculativeParams(
        method=draft_method_to_proto(speculation.method),
        num_speculative_tokens=speculation.num_speculative_tokens,
        prompt_lookup_min=speculation.prompt_lookup_min,
    )


def selection_from_proto(params: pb.SelectionParams | None) -> Selection:
    """Return the selection of a request; None: every token is read.

    Raises InvalidArgument naming the field below `selection`, also for what is not served.
    """
    if params is None:
        return FULL
    method = _selection_method(params.method, params.method_name)
    selection = from_message(Selection, params, method=method, policy=_pool_policy(params.policy))
    check_served(selection)
    return selection


def selection_to_proto(selection: Selection) -> pb.SelectionParams:
    """Return the message of a request."""
    policy = "" if selection.pool is None else str(selection.policy)
    method = selection_method_fields(selection.method)
    return to_message(pb.SelectionParams, selection, policy=policy, **method)


def _pool_policy(name: str) -> PoolPolicy:
    """Raises InvalidArgument."""
    if not name:
        return PoolPolicy.COUNTER
    if name not in set(PoolPolicy):
        raise InvalidArgument(
            f"selection: policy {name!r} is not one of {', '.join(PoolPolicy)}",
            field="selection.policy",
        )
    return PoolPolicy(name)


def selection_method_fields(method: SelectionMethod) -> dict[str, Any]:
    """Return the fields of a message that name a method: by name, and by number if it has one."""
    numbers = selection_numbers([method])
    return {"method": numbers[0] if numbers else 0, "method_name": str(method)}


def selection_numbers(methods: Iterable[SelectionMethod]) -> list[pb.SelectionMethod]:
    """Return the numbers of those methods that have one."""
    return [_SELECTION_METHOD.to_proto(each) for each in methods if each in _SELECTION_METHOD]


def selection_methods(
    names: Iterable[str], numbers: Iterable[pb.SelectionMethod]
) -> tuple[SelectionMethod, ...]:
    """Return the methods that a message lists by name, or, if it is older, by number.

    Methods that this version does not know are left out.
    """
    listed = tuple(names)
    if not listed:
        return tuple(_SELECTION_METHOD.known(numbers))
    known = set(SelectionMethod)
    return tuple(SelectionMethod(name) for name in listed if name in known)


def selection_supports_from_proto(
    messages: Iterable[pb.SelectionSupport],
) -> dict[SelectionMethod, int]:
    """Return the methods that a worker can serve, with the columns of their artefacts.

    Methods that this version does not know are left out.
    """
    supports: dict[SelectionMethod, int] = {}
    for message in messages:
        names = [message.method_name] if message.method_name else []
        for method in selection_methods(names, [message.method]):
            supports[method] = message.columns
    return supports


def _selection_method(number: int, name: str) -> SelectionMethod:
    """Return the method of a name, or of a number without one. Raises InvalidArgument."""
    if not name:
        return _SELECTION_METHOD.from_proto(number)
    if name not in list(SelectionMethod):
        raise InvalidArgument(f"unknown selection method {name!r}", field="selection.method_name")
    method = SelectionMethod(name)
    if number and _SELECTION_METHOD.from_proto(number) is not method:
        raise InvalidArgument(
            f"method {number} is not {name}: give one of them", field="selection.method_name"
        )
    return method


def selection_usage_to_proto(usage: SelectionUsage) -> pb.SelectionUsage:
    return to_message(pb.SelectionUsage, usage)


def selection_usage_from_proto(message: pb.SelectionUsage) -> SelectionUsage:
    return from_message(SelectionUsage, message)
