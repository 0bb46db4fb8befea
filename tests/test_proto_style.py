"""The contract's style, read from protoc's own descriptors (comments included)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))

# Paths inside a FileDescriptorProto, as descriptor.proto numbers its fields.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _RPC = 2, 2
_Field = descriptor_pb2.FieldDescriptorProto


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("proto") / "set"
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'proto'}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
            *map(str, PROTOS),
        ]
    )
    assert status == 0
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


Files = list[descriptor_pb2.FileDescriptorProto]


def comments(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Comment in front of each element, by its path."""
    return {
        tuple(place.path): place.leading_comments.strip()
        for place in file.source_code_info.location
        if place.leading_comments.strip()
    }


def all_fields(files: Files) -> Iterator[tuple[str, descriptor_pb2.FieldDescriptorProto]]:
    for file in files:
        for message in file.message_type:
            for field in message.field:
                yield f"{message.name}.{field.name}", field


def test_every_file_is_in_the_package(files: Files) -> None:
    assert {file.package for file in files} == {"splitpoint.v1"}
    assert {Path(file.name).parent.as_posix() for file in files} == {"splitpoint/v1"}


def test_services_and_rpcs_are_commented(files: Files) -> None:
    missing = []
    for file in files:
        found = comments(file)
        for i, service in enumerate(file.service):
            if (_SERVICE, i) not in found:
                missing.append(service.name)
            # An rpc that only reads may be covered by what its service says.
            quiet = "No call changes anything" in found.get((_SERVICE, i), "")
            missing += [
                f"{service.name}.{rpc.name}"
                for j, rpc in enumerate(service.method)
                if not quiet and (_SERVICE, i, _RPC, j) not in found
            ]
    assert not missing, "\n".join(missing)


def test_requests_and_responses_are_unique_and_named_after_their_rpc(files: Files) -> None:
    seen: list[str] = []
    for file in files:
        for service in file.service:
            for rpc in service.method:
                names = [rpc.input_type.split(".")[-1], rpc.output_type.split(".")[-1]]
                assert names == [f"{rpc.name}Request", f"{rpc.name}Response"]
                seen += names
    assert seen
    assert len(set(seen)) == len(seen)


def test_enums_start_with_unspecified_and_carry_their_name(files: Files) -> None:
    for file in files:
        for enum in file.enum_type:
            prefix = re.sub(r"(?<!^)([A-Z])", r"_\1", enum.name).upper()
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
            assert enum.value[0].number == 0
            assert all(value.name.startswith(f"{prefix}_") for value in enum.value)


def test_integers_are_signed_and_counts_are_counts(files: Files) -> None:
    unsigned = {_Field.TYPE_UINT32, _Field.TYPE_UINT64, _Field.TYPE_FIXED32}
    for name, field in all_fields(files):
        assert field.type not in unsigned, f"{name} is unsigned"
        is_vllm = name == "SpeculativeParams.num_speculative_tokens"  # whose name users know
        assert is_vllm or not field.name.startswith("num_"), f"{name}: say _count"
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name), name
        if field.type == _Field.TYPE_FIXED64:
            assert field.name == "checksum", f"{name}: fixed64 is for checksums only"


def test_quantities_carry_their_unit(files: Files) -> None:
    """Times are Durations or end in _seconds, sizes end in _bytes, rates name both."""
    duration = ".google.protobuf.Duration"
    for name, field in all_fields(files):
        if field.type_name == duration:
            assert field.name.endswith("_duration"), name
        stem = field.name
        if "duration" in stem:
            assert field.type_name == duration, name
        if re.search(r"(latency|timeout|elapsed)", stem):
            assert stem.endswith("_seconds"), name
        if re.search(r"(memory|footprint|capacity_b|size_b)", stem) and field.type in (
            _Field.TYPE_INT32,
            _Field.TYPE_INT64,
        ):
            assert stem.endswith("_bytes"), name


def test_every_field_is_explained(files: Files) -> None:
    """By a comment of its own, of the group it stands in, or of its message.

    A group is a run of fields without a blank line or another comment between
    them; its first field carries the comment. A comment in front of a message
    explains fields that no group comment does.
    """
    missing = []
    for file in files:
        found = comments(file)
        lines = {tuple(p.path): p.span[0] for p in file.source_code_info.location}
        source = (ROOT / "proto" / file.name).read_text().splitlines()
        for i, message in enumerate(file.message_type):
            explained = (_MESSAGE, i) in found
            for j, field in enumerate(message.field):
                path = (_MESSAGE, i, _FIELD, j)
                line = lines[path]
                starts_group = j == 0 or not source[line - 1].strip()
                if path in found:
                    explained = True
                elif starts_group:
                    explained = (_MESSAGE, i) in found
                if not explained and not speaks_for_itself(field):
                    missing.append(f"{message.name}.{field.name}")
    assert not missing, "\n".join(missing)


def speaks_for_itself(field: descriptor_pb2.FieldDescriptorProto) -> bool:
    """Fields whose name and type are the whole meaning, explained where the type is."""
    shared = {"session_id", "request_id", "worker_id", "epoch", "attempt", "tenant_salt"}
    return field.name in shared or field.type == _Field.TYPE_MESSAGE
