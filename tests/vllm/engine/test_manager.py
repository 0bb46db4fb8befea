"""The manager by itself: late answers, leases, events and outcomes, without an engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from splitpoint_vllm import manager as manager_module
from splitpoint_vllm.manager import SplitpointManager
from splitpoint_vllm.plan import Reason
from splitpoint_vllm.store import Answer, ArenaName, Lookup, Page, RemoteConnection

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]
NAME = ArenaName(b"arena", 1)


class Finder:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.connection: RemoteConnection | None = RemoteConnection(b"session", 1, 10.0, NAME)
        self.lookups: list[tuple[bytes, Sequence[bytes], Lookup]] = []
        self.released: list[int] = []
        self.outcomes: Counter[str] = Counter()
        self.is_closed = False

    def look_up(
        self, namespace: bytes, keys: Sequence[bytes], ranks: int, seconds: float
    ) -> Lookup:
        lookup = Lookup(time.monotonic() + seconds)
        self.lookups.append((namespace, keys, lookup))
        return lookup

    def answer(self, *keys: bytes, lease_id: int = 7) -> None:
        pages = {key: (Page(number, 1, 2),) for number, key in enumerate(keys)}
        self.lookups[-1][2].settle(Answer(pages, self.connection, lease_id))

    def release(self, answer: Answer) -> None:
        if answer.lease_id:
            self.released.append(answer.lease_id)

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def finder() -> Finder:
    return Finder()


@pytest.fixture
def manager(finder: Finder) -> SplitpointManager:
    found = SplitpointManager(0.2, announces=True)
    found.start(finder, b"n" * 32, 1)  # type: ignore[arg-type]
    return found


def begin(manager: SplitpointManager, name: str, keys: Sequence[OffloadKey] = KEYS) -> ReqContext:
    context = ReqContext(req_id=name)
    manager.on_new_request(context)
    manager.look_up(name, keys)
    return context


def found(manager: SplitpointManager, context: ReqContext) -> list[LookupResult]:
    return [manager.lookup(key, context) for key in KEYS]


def test_vllm_waits_for_the_answer_and_loads_what_was_found(
    manager: SplitpointManager, finder: Finder
) -> None:
    context = begin(manager, "a")
    assert set(found(manager, context)) == {LookupResult.RETRY}
    finder.answer(*KEYS[:4])
    assert found(manager, context) == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 2
    assert manager.plan("a", 512, 128, 4000).tokens == 512
    loaded = manager.prepare_load(KEYS[1:4], context)
    assert [each[0].slot for each in loaded.pages] == [1, 2, 3]
    assert loaded.arena_name == NAME
    manager.allocated("a", 512)
    assert finder.released == []
    manager.load_ended("a", 4000, 0.5, "")
    manager.complete_load(KEYS[1:4], context)
    assert finder.released == [7]
    manager.allocated("a", 0)  # vLLM tells it again when the load has ended
    told = manager.outcome("a")
    assert (told["reason"], told["found_tokens"], told["loaded_tokens"]) == ("loaded", 512, 512)
    assert told["load_seconds"] == 0.5
    assert finder.outcomes == {"loaded": 1}
    manager.on_request_finished(context)
    assert finder.released == [7]


def test_an_answer_is_waited_for_no_longer_than_it_takes(
    manager: SplitpointManager, finder: Finder
) -> None:
    begin(manager, "a")
    started = time.monotonic()
    manager.wait_for_answer("a", 0.05)
    assert time.monotonic() - started >= 0.05
    assert manager.is_waiting("a")
    finder.answer(*KEYS)
    manager.wait_for_answer("a", 60.0)
    assert time.monotonic() - started < 30.0
    assert not manager.is_waiting("a")


def test_nothing_loaded_is_never_called_loaded(manager: SplitpointManager, finder: Finder) -> None:
    context = begin(manager, "a")
    finder.answer(*KEYS)
    found(manager, context)
    assert manager.plan("a", 768, 128, 6000).reason is Reason.LOADED
    manager.allocated("a", 0)  # vLLM's own cache had as much
    assert manager.outcome("a")["reason"] == "local"
    assert finder.released == [7]


@pytest.mark.parametrize(("own_tokens", "reason"), [(768, "local"), (0, "miss")])
def test_what_the_engine_has_itself_is_no_miss(
    manager: SplitpointManager, finder: Finder, own_tokens: int, reason: str
) -> None:
    """Pages without a state to go on from are one."""
    context = begin(manager, "a")
    finder.answer(*KEYS)
    found(manager, context)
    manager.cached("a", own_tokens)
    manager.allocated("a", 0)
    assert manager.outcome("a")["reason"] == reason


def test_a_late_answer_is_a_miss_and_its_lease_is_not_kept(
    manager: SplitpointManager, finder: Finder
) -> None:
    context = begin(manager, "a")
    time.sleep(0.3)
    assert set(found(manager, context)) == {LookupResult.MISS}
    manager.allocated("a", 0)
    assert manager.outcome("a")["reason"] == "late"
    lookup = finder.lookups[0][2]
    assert not lookup.settle(Answer({}, finder.connection, 9))  # its caller releases it then


def test_a_failed_load_is_not_tried_again(manager: SplitpointManager, finder: Finder) -> None:
    context = begin(manager, "a")
    finder.answer(*KEYS)
    assert LookupResult.HIT in found(manager, context)
    manager.plan("a", 768, 128, 6000)
    manager.prepare_load(KEYS, context)
    manager.allocated("a", 768)
    manager.load_ended("a", 0, 0.1, "damaged")
    manager.complete_load(KEYS, context)
    assert set(found(manager, context)) == {LookupResult.MISS}
    manager.look_up_again("a", lambda: KEYS)
    assert len(finder.lookups) == 1
    manager.allocated("a", 0)
    assert manager.outcome("a")["reason"] == "failed"
    assert finder.outcomes == {"failed": 1}
    # What is computed instead is stored.
    assert manager.prepare_store(KEYS, context).keys_to_store == KEYS


def test_what_was_found_is_looked_up_again_after_a_preemption(
    manager: SplitpointManager, finder: Finder
) -> None:
    context = begin(manager, "a")
    finder.answer(*KEYS[:2])
    assert not manager.is_waiting("a")
    manager.look_up_again("a", lambda: KEYS)
    assert len(finder.lookups) == 1  # it is still leased
    manager.allocated("a", 0)
    assert finder.released == [7]
    manager.look_up_again("a", lambda: KEYS)
    assert len(finder.lookups) == 2
    assert manager.is_waiting("a")
    # So it is if the session was lost meanwhile.
    finder.answer(*KEYS[:2])
    assert LookupResult.HIT in found(manager, context)
    finder.connection = RemoteConnection(b"another", 2, 10.0, NAME)
    manager.look_up_again("a", lambda: KEYS)
    assert len(finder.lookups) == 3


def test_leases_of_requests_that_wait_long_are_released(
    manager: SplitpointManager, finder: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "HOLD_SECONDS", 0.05)
    context = begin(manager, "a")
    finder.answer(*KEYS)
    assert LookupResult.HIT in found(manager, context)
    time.sleep(0.1)
    manager.on_schedule_end(ScheduleEndContext([], []))
    assert finder.released == [7]
    assert set(found(manager, context)) == {LookupResult.MISS}


def test_an_aborted_load_keeps_its_lease_until_it_ended(
    manager: SplitpointManager, finder: Finder
) -> None:
    context = begin(manager, "a")
    finder.answer(*KEYS)
    found(manager, context)
    manager.prepare_load(KEYS, context)
    manager.allocated("a", 768)
    manager.on_request_finished(context)
    assert finder.released == []
    manager.load_ended("a", 1, 0.1, "")
    manager.complete_load(KEYS, context)
    assert finder.released == [7]
    assert manager._requests == {}
    # A request that ends before its answer came gives up what comes.
    context = begin(manager, "b")
    manager.on_request_finished(context)
    assert not finder.lookups[-1][2].settle(Answer({}, finder.connection, 9))


def test_only_what_is_missing_is_stored_and_once(
    manager: SplitpointManager, finder: Finder
) -> None:
    first, second = begin(manager, "a"), begin(manager, "b")
    finder.answer(KEYS[0])
    assert not manager.is_waiting("b")
    assert manager.prepare_store(KEYS[:3], second).keys_to_store == KEYS[1:3]
    assert manager.prepare_store(KEYS[:4], first).keys_to_store == [KEYS[0], KEYS[3]]
    manager.complete_store(KEYS[1:3], second)
    assert manager.prepare_store(KEYS[1:3], first).keys_to_store == KEYS[1:3]
    finder.connection = None
    assert manager.prepare_store(KEYS[4:], first).keys_to_store == []


def test_stored_blocks_are_announced_and_their_eviction_once(
    manager: SplitpointManager, finder: Finder
) -> None:
    context = begin(manager, "a")
    finder.answer()
    manager.is_waiting("a")
    manager.prepare_store(KEYS[:4], context)
    manager.unstored({KEYS[3]})
    manager.complete_store(KEYS[:4], context)
    (event,) = manager.take_events()
    assert (event.keys, event.removed) == (KEYS[:3], False)
    for name in ("b", "c"):
        begin(manager, name)
        finder.answer(KEYS[0], KEYS[1])
        assert not manager.is_waiting(name)
    (event,) = manager.take_events()
    assert (event.keys, event.removed) == ([KEYS[2]], True)
    assert manager.take_events() == []


def test_after_a_reset_nothing_older_is_found(manager: SplitpointManager, finder: Finder) -> None:
    begin(manager, "a")
    finder.answer(*KEYS)
    manager.is_waiting("a")
    manager.reset_cache()
    assert finder.released == [7]
    begin(manager, "b")
    assert finder.lookups[0][0] != finder.lookups[1][0]


def test_requests_that_are_not_looked_up_say_so(manager: SplitpointManager, finder: Finder) -> None:
    context = ReqContext(req_id="a")
    manager.on_new_request(context)
    assert manager.lookup(KEYS[0], context) is LookupResult.MISS
    manager.allocated("a", 0)
    assert manager.outcome("a")["reason"] == Reason.DISABLED.value
    assert manager.prepare_store(KEYS, context).keys_to_store == []
    manager.shutdown()
    assert finder.is_closed
