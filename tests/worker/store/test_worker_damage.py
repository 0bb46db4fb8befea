"""Damage that the store finds while a worker computes, and slots that only look damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_runner import CPU, admission
from test_worker_streamed import CHUNK, GREEDY, NEW, Case, make_case

from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.lanes.lanes import SerialLanes
from worker_service.store.arena_tensors import DamagedChunks, StoredChunk, SuspectChunks
from worker_service.store.verifier import Verifier


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    yield from make_case("llama", tmp_path)


def salted(name: str, prompt: list[int], sampling: Sampling, salt: bytes) -> Admission:
    return replace(admission(name, prompt, sampling), salt=salt)


def stored_chunks(case: Case, salt: bytes, tokens: list[int]) -> list[StoredChunk]:
    store, session = case.runner.store, case.runner.connection.session_id
    found = store.match(session, salt, tokens)
    store.sessions.release(session, [found.lease_id], [])
    return [
        StoredChunk(each.slot, each.generation, each.token_count, each.key, each.checksum)
        for each in found.entries
    ]


def damage(case: Case, chunk: StoredChunk) -> None:
    for plane in case.runner.connection.tensors.values:
        plane[chunk.slot] += 1


@pytest.mark.parametrize("is_decoding", [False, True])
def test_a_resident_request_on_a_damaged_chunk_starts_over_when_the_store_says_so(
    case: Case, is_decoding: bool
) -> None:
    """No chunk computed after the damaged one is stored, and no token is answered."""
    number, salt = (1 if is_decoding else 2), b"seal"
    prompt, wanted = case.prompts[number], case.wanted[number]
    prefix = prompt if is_decoding else prompt[: 3 * CHUNK]
    few = Sampling(max_tokens=1, ignore_eos=True)
    case.runner.run(case.engine(SerialLanes(CPU)), [salted("0", prefix, few, salt)])
    victim = stored_chunks(case, salt, prefix)[1]
    if not is_decoding:
        damage(case, victim)
    engine = case.engine(SerialLanes(CPU))
    engine.max_batched_tokens = 2 * CHUNK
    found, losses, delivered = [0], [0], [0]

    def note(output: StepOutput) -> None:
        losses[0] += output.loss_count
        delivered[0] += len(output.tokens) if not losses[0] else 0
        # It has read the chunk, and has not filled the next one.
        if not found[0] and (output.tokens or not is_decoding):
            if is_decoding:
                damage(case, victim)
            found[0] = case.runner.scrub()

    case.runner.after_step = note
    transcript = case.runner.run(engine, [salted("1", prompt, GREEDY, salt)])
    assert (found, losses) == ([1], [1])
    assert (delivered[0] > 0) == is_decoding
    assert transcript.finishes["1"].error is None
    assert transcript.tokens["1"] == wanted
    assert len(wanted) == NEW
    # It stores again, and what it stores is right.
    case.runner.after_step = lambda _: None
    assert len(stored_chunks(case, salt, prompt)) >= len(prompt) // CHUNK
    again = case.runner.run(case.engine(SerialLanes(CPU)), [salted("2", prompt, GREEDY, salt)])
    assert again.tokens["2"] == wanted


def test_a_slot_that_was_used_again_is_not_counted_as_damaged(case: Case) -> None:
    """A worker without its lease reads another chunk's bytes. No memory is damaged."""
    tensors, verifier = case.runner.connection.tensors, Verifier(0.0)
    first, second, *_ = stored_chunks(case, b"", case.prompts[2])
    replaced = replace(first, generation=first.generation - 1, checksum=first.checksum ^ 1)
    check = verifier.begin(tensors, [replaced, second])
    assert check is not None
    with pytest.raises(SuspectChunks) as caught:
        check.wait()
    assert type(caught.value) is SuspectChunks
    assert caught.value.chunks == (replaced,)
    assert (verifier.intact_count, verifier.damaged_count) == (1, 0)
    damage(case, second)
    check = verifier.begin(tensors, [first, replaced], always=[second])
    assert check is not None
    with pytest.raises(DamagedChunks) as damaged:
        check.wait()
    assert damaged.value.chunks == (second,)
    assert (verifier.intact_count, verifier.damaged_count) == (2, 1)
    verifier.close()
