"""Drafts as a request asks for them, over what a worker is configured to do."""

from __future__ import annotations

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint.speculation import AS_CONFIGURED, PLAIN, AskedSpeculation, DraftMethod, Speculation
from splitpoint.transport.convert import speculation_from_proto, speculation_to_proto
from splitpoint.v1 import types_pb2

CONFIGURED = Speculation(DraftMethod.SUFFIX, 4, 3)


def test_what_a_request_leaves_open_is_as_configured() -> None:
    for configured in (PLAIN, CONFIGURED):
        assert AS_CONFIGURED.over(configured) == configured
    off = AskedSpeculation(DraftMethod.OFF)
    assert off.over(CONFIGURED) == Speculation(DraftMethod.OFF, 4, 3)
    none = AskedSpeculation(num_speculative_tokens=0)
    assert none.over(CONFIGURED) == Speculation(DraftMethod.SUFFIX, 0, 3)
    asked = AskedSpeculation(DraftMethod.MODEL, 8, 1)
    assert asked.over(CONFIGURED) == Speculation(DraftMethod.MODEL, 8, 1)


def test_params_are_what_was_set_and_no_more() -> None:
    assert speculation_from_proto(types_pb2.SpeculativeParams()) == AS_CONFIGURED
    params = types_pb2.SpeculativeParams(num_speculative_tokens=0)
    assert speculation_from_proto(params) == AskedSpeculation(num_speculative_tokens=0)
    for drafts in (PLAIN, CONFIGURED, Speculation(DraftMethod.AUTO)):
        assert speculation_from_proto(speculation_to_proto(drafts)).over(PLAIN) == drafts


def test_params_out_of_bounds_name_their_field() -> None:
    with pytest.raises(InvalidArgument) as caught:
        speculation_from_proto(types_pb2.SpeculativeParams(prompt_lookup_min=65))
    assert caught.value.field == "speculation.prompt_lookup_min"
