"""Plans and profiles over the wire: every field survives, every name has a number."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Objective, Reason, ReasonKind, Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.words import ExplainedPlan
from splitpoint.transport import convert
from splitpoint.v1 import types_pb2

PLAN = ExplainedPlan(
    residency=Residency.STREAMED,
    method=RestoreMethod.TOKENS,
    split_tokens=64,
    reason="because",
    cached_tokens=2000,
    new_tokens=48,
    footprint_bytes=1 << 33,
    predicted_restore_seconds=0.25,
    predicted_load_seconds=0.5,
    predicted_ttft_seconds=0.75,
    split_slope=0.5,
    split_intercept=-3.0,
    split_cap=1024,
    fetched_tokens=128,
    fetch_source="a:1",
    fetch_transfer="direct",
    predicted_fetch_seconds=0.125,
    schedule=Schedule.PIPELINED,
    recomputed_tokens=896,
    resident_tokens=32,
    tile_tokens=256,
    predicted_step_seconds=0.0625,
    objective=Objective.THROUGHPUT,
    device_tokens=16,
    predicted_recompute_seconds=1.5,
    reasons=(
        Reason(ReasonKind.SPLIT, (64, 2000, "pipelined")),
        Reason(ReasonKind.PREDICTED, (0.25, 0.5)),
    ),
    reason_details=("one", "two"),
)


def test_every_field_of_a_plan_survives_the_wire() -> None:
    unlike_default = [field.name for field in fields(PLAN) if not getattr(PLAN, field.name)]
    assert unlike_default == []
    assert convert.plan_from_proto(convert.plan_to_proto(PLAN)) == PLAN


def test_reasons_that_only_newer_schedulers_give_are_left_out() -> None:
    message = convert.plan_to_proto(PLAN)
    message.reasons[0].kind = "of_later"
    plan = convert.plan_from_proto(message)
    assert (plan.reasons, plan.reason_details) == (PLAN.reasons[1:], PLAN.reason_details)


def test_every_field_of_a_profile_survives_the_wire() -> None:
    profile = replace(
        BUILT_IN_PROFILES["h100"],
        model="llama-3.1-8b",
        device_type="cuda",
        remote_bytes_per_second={"a:1": 2e9},
        aged_sources=("a:1",),
        prefill_overhead_seconds=3e-5,
        step_compute_seconds=0.004,
        host_weight_bytes=7 << 30,
        host_kv_weight_bytes=1 << 30,
        restore_overhead_seconds=2e-4,
        operation_overhead_seconds=3e-5,
    )
    unlike_default = [field.name for field in fields(profile) if not getattr(profile, field.name)]
    assert unlike_default == []
    assert convert.profile_from_proto(convert.profile_to_proto(profile)) == profile


def test_every_name_goes_there_and_back() -> None:
    for method in RestoreMethod:
        assert convert.method_from_proto(convert.method_to_proto(method)) is method
    for schedule in Schedule:
        assert convert.schedule_from_proto(convert.schedule_to_proto(schedule)) is schedule
    for objective in Objective:
        assert convert.objective_from_proto(convert.objective_to_proto(objective)) is objective


def test_a_plan_of_before_the_choice_is_serial_and_for_latency() -> None:
    message = convert.plan_to_proto(PLAN)
    message.ClearField("schedule")
    message.ClearField("objective")
    plan = convert.plan_from_proto(message)
    assert (plan.schedule, plan.objective) == (Schedule.SERIAL, Objective.LATENCY)
    for unknown in (convert.schedule_from_proto, convert.objective_from_proto):
        with pytest.raises(InvalidArgument, match="unknown"):
            unknown(99)
    with pytest.raises(InvalidArgument, match="unknown"):
        convert.method_from_proto(types_pb2.RESTORE_METHOD_UNSPECIFIED)
