"""Between the shared dataclasses and their messages; no logic of its own."""

from __future__ import annotations

from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.planner import Objective, Plan, Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import ArenaLayout, DataType, Encoding, ModelShape
from splitpoint.v1 import types_pb2 as pb

_DATA_TYPES = {
    DataType.FLOAT32: pb.DATA_TYPE_FLOAT32,
    DataType.BFLOAT16: pb.DATA_TYPE_BFLOAT16,
    DataType.FLOAT16: pb.DATA_TYPE_FLOAT16,
}
_ENCODINGS = {
    Encoding.NATIVE: pb.ENCODING_UNSPECIFIED,
    Encoding.INT8: pb.ENCODING_INT8,
    Encoding.INT4: pb.ENCODING_INT4,
}
_RESIDENCIES = {
    Residency.RESIDENT: pb.RESIDENCY_RESIDENT,
    Residency.STREAMED: pb.RESIDENCY_STREAMED,
}
_METHODS = {
    RestoreMethod.NONE: pb.RESTORE_METHOD_NONE,
    RestoreMethod.LOAD: pb.RESTORE_METHOD_LOAD,
    RestoreMethod.SPLIT: pb.RESTORE_METHOD_SPLIT,
    RestoreMethod.RECOMPUTE: pb.RESTORE_METHOD_RECOMPUTE,
    RestoreMethod.TOKENS: pb.RESTORE_METHOD_TOKENS,
}
_SCHEDULES = {
    Schedule.SERIAL: pb.SCHEDULE_SERIAL,
    Schedule.COLUMN: pb.SCHEDULE_COLUMN,
    Schedule.ROW: pb.SCHEDULE_ROW,
    Schedule.PIPELINED: pb.SCHEDULE_PIPELINED,
}
_OBJECTIVES = {
    Objective.LATENCY: pb.OBJECTIVE_LATENCY,
    Objective.THROUGHPUT: pb.OBJECTIVE_THROUGHPUT,
}
_DATA_TYPES_BACK: dict[int, DataType] = {number: value for value, number in _DATA_TYPES.items()}
_ENCODINGS_BACK: dict[int, Encoding] = {number: value for value, number in _ENCODINGS.items()}
_RESIDENCIES_BACK: dict[int, Residency] = {number: value for value, number in _RESIDENCIES.items()}
_METHODS_BACK: dict[int, RestoreMethod] = {number: value for value, number in _METHODS.items()}
_SCHEDULES_BACK: dict[int, Schedule] = {number: value for value, number in _SCHEDULES.items()}
_OBJECTIVES_BACK: dict[int, Objective] = {number: value for value, number in _OBJECTIVES.items()}


def data_type_to_proto(value: DataType) -> pb.DataType:
    return _DATA_TYPES[value]


def data_type_from_proto(number: int) -> DataType:
    try:
        return _DATA_TYPES_BACK[number]
    except KeyError:
        raise InvalidArgument(f"unknown data type {number}", field="data_type") from None


def encoding_to_proto(value: Encoding) -> pb.Encoding:
    return _ENCODINGS[value]


def encoding_from_proto(number: int) -> Encoding:
    """Zero, which an older sender leaves, is native. Raises InvalidArgument."""
    try:
        return _ENCODINGS_BACK[number]
    except KeyError:
        raise InvalidArgument(f"unknown encoding {number}", field="encoding") from None


def residency_to_proto(value: Residency) -> pb.Residency:
    return _RESIDENCIES[value]


def residency_from_proto(number: int) -> Residency:
    """Raises InvalidArgument for anything but resident and streamed."""
    try:
        return _RESIDENCIES_BACK[number]
    except KeyError:
        raise InvalidArgument(f"unknown residency {number}", field="residency") from None


def method_to_proto(value: RestoreMethod) -> pb.RestoreMethod:
    return _METHODS[value]


def method_from_proto(number: int) -> RestoreMethod:
    try:
        return _METHODS_BACK[number]
    except KeyError:
        raise InvalidArgument(f"unknown restore method {number}", field="method") from None


def schedule_to_proto(value: Schedule) -> pb.Schedule:
    return _SCHEDULES[value]


def schedule_from_proto(number: int) -> Schedule:
    """Unspecified is serial: what everybody spoke before there was a choice."""
    if number == pb.SCHEDULE_UNSPECIFIED:
        return Schedule.SERIAL
    try:
        return _SCHEDULES_BACK[number]
    except KeyError:
        raise InvalidArgument(f"unknown schedule {number}", field="schedule") from None


def objective_to_proto(value: Objective) -> pb.Objective:
    return _OBJECTIVES[value]


def objective_from_proto(number: int) -> Objective:
    """Unspecified is latency."""
    if number == pb.OBJECTIVE_UNSPECIFIED:
        return Objective.LATENCY
    try:
        return _OBJECTIVES_BACK[number]
    except KeyError:
        raise InvalidArgument(f"unknown objective {number}", field="objective") from None


def shape_to_proto(shape: ModelShape) -> pb.ModelShape:
    return pb.ModelShape(
        name=shape.name,
        family=shape.family,
        layer_count=shape.layer_count,
        hidden_size=shape.hidden_size,
        query_head_count=shape.query_head_count,
        kv_head_count=shape.kv_head_count,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocabulary_size=shape.vocabulary_size,
        context_length=shape.context_length,
        data_type=data_type_to_proto(shape.data_type),
        parameter_count=shape.parameter_count,
        gated_mlp=shape.gated_mlp,
        tied_embeddings=shape.tied_embeddings,
    )


def shape_from_proto(message: pb.ModelShape) -> ModelShape:
    return ModelShape(
        name=message.name,
        family=message.family,
        layer_count=message.layer_count,
        hidden_size=message.hidden_size,
        query_head_count=message.query_head_count,
        kv_head_count=message.kv_head_count,
        head_dim=message.head_dim,
        intermediate_size=message.intermediate_size,
        vocabulary_size=message.vocabulary_size,
        context_length=message.context_length,
        data_type=data_type_from_proto(message.data_type),
        gated_mlp=message.gated_mlp,
        tied_embeddings=message.tied_embeddings,
    )


def layout_to_proto(layout: ArenaLayout) -> pb.ArenaLayout:
    return pb.ArenaLayout(
        chunk_tokens=layout.chunk_tokens,
        layer_count=layout.layer_count,
        kv_head_count=layout.kv_head_count,
        head_dim=layout.head_dim,
        hidden_size=layout.hidden_size,
        data_type=data_type_to_proto(layout.data_type),
        has_activations=layout.has_activations,
        model_fingerprint=layout.model_fingerprint,
        layout_hash=layout.layout_hash,
        encoding=encoding_to_proto(layout.encoding),
    )


def layout_from_proto(message: pb.ArenaLayout) -> ArenaLayout:
    return ArenaLayout(
        chunk_tokens=message.chunk_tokens,
        layer_count=message.layer_count,
        kv_head_count=message.kv_head_count,
        head_dim=message.head_dim,
        hidden_size=message.hidden_size,
        data_type=data_type_from_proto(message.data_type),
        has_activations=message.has_activations,
        model_fingerprint=message.model_fingerprint,
        encoding=encoding_from_proto(message.encoding),
    )


def profile_to_proto(profile: Profile) -> pb.Profile:
    return pb.Profile(
        link_bytes_per_second=profile.link_bytes_per_second,
        link_overhead_seconds=profile.link_overhead_seconds,
        rebuild_flops_per_second=profile.rebuild_flops_per_second,
        rebuild_overhead_seconds=profile.rebuild_overhead_seconds,
        prefill_flops_per_second=profile.prefill_flops_per_second,
        description=profile.description,
        remote_bytes_per_second=profile.remote_bytes_per_second,
        prefill_overhead_seconds=profile.prefill_overhead_seconds,
        step_compute_seconds=profile.step_compute_seconds,
        host_weight_bytes=profile.host_weight_bytes,
        host_kv_weight_bytes=profile.host_kv_weight_bytes,
        restore_overhead_seconds=profile.restore_overhead_seconds,
        operation_overhead_seconds=profile.operation_overhead_seconds,
    )


def profile_from_proto(message: pb.Profile) -> Profile:
    return Profile(
        link_bytes_per_second=message.link_bytes_per_second,
        link_overhead_seconds=message.link_overhead_seconds,
        rebuild_flops_per_second=message.rebuild_flops_per_second,
        rebuild_overhead_seconds=message.rebuild_overhead_seconds,
        prefill_flops_per_second=message.prefill_flops_per_second,
        description=message.description,
        remote_bytes_per_second=dict(message.remote_bytes_per_second),
        prefill_overhead_seconds=message.prefill_overhead_seconds,
        step_compute_seconds=message.step_compute_seconds,
        host_weight_bytes=message.host_weight_bytes,
        host_kv_weight_bytes=message.host_kv_weight_bytes,
        restore_overhead_seconds=message.restore_overhead_seconds,
        operation_overhead_seconds=message.operation_overhead_seconds,
    )


def plan_to_proto(plan: Plan) -> pb.Plan:
    return pb.Plan(
        residency=residency_to_proto(plan.residency),
        method=method_to_proto(plan.method),
        split_tokens=plan.split_tokens,
        reason=plan.reason,
        cached_tokens=plan.cached_tokens,
        new_tokens=plan.new_tokens,
        footprint_bytes=plan.footprint_bytes,
        predicted_restore_seconds=plan.predicted_restore_seconds,
        predicted_load_seconds=plan.predicted_load_seconds,
        predicted_ttft_seconds=plan.predicted_ttft_seconds,
        split_slope=plan.split_slope,
        split_intercept=plan.split_intercept,
        split_cap=plan.split_cap,
        fetched_tokens=plan.fetched_tokens,
        predicted_fetch_seconds=plan.predicted_fetch_seconds,
        schedule=schedule_to_proto(plan.schedule),
        recomputed_tokens=plan.recomputed_tokens,
        resident_tokens=plan.resident_tokens,
        tile_tokens=plan.tile_tokens,
        predicted_step_seconds=plan.predicted_step_seconds,
        objective=objective_to_proto(plan.objective),
    )


def plan_from_proto(message: pb.Plan) -> Plan:
    return Plan(
        residency=residency_from_proto(message.residency),
        method=method_from_proto(message.method),
        split_tokens=message.split_tokens,
        reason=message.reason,
        cached_tokens=message.cached_tokens,
        new_tokens=message.new_tokens,
        footprint_bytes=message.footprint_bytes,
        predicted_restore_seconds=message.predicted_restore_seconds,
        predicted_load_seconds=message.predicted_load_seconds,
        predicted_ttft_seconds=message.predicted_ttft_seconds,
        split_slope=message.split_slope,
        split_intercept=message.split_intercept,
        split_cap=message.split_cap,
        fetched_tokens=message.fetched_tokens,
        predicted_fetch_seconds=message.predicted_fetch_seconds,
        schedule=schedule_from_proto(message.schedule),
        recomputed_tokens=message.recomputed_tokens,
        resident_tokens=message.resident_tokens,
        tile_tokens=message.tile_tokens,
        predicted_step_seconds=message.predicted_step_seconds,
        objective=objective_from_proto(message.objective),
    )
