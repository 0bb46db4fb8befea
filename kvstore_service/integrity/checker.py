"""Checks the invariants of a store's tables and reports each violation; changes nothing.

Counts are conserved, free runs never overlap, leases name live chunks, generations only grow,
and index, records and sessions agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore_service.integrity.inspection import check_record
from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.sessions import Session
from splitpoint.arena.format import ArenaFormatError
from splitpoint.arena.records import SlotState


class IntegrityChecker:
    """Remembers each slot's generation between two checks, since generations only grow."""

    def __init__(self, pool: ChunkPool, sessions: Iterable[Session]) -> None:
        self._pool = pool
        self._sessions = sessions
        self._generations = [0] * pool.slot_count

    def check_integrity(self) -> list[str]:
        """Check everything. Return one line per violation."""
        entries = self._pool.chunks().values()
        return [*self.check_counts(), *self.check_records(entries), *self.check_parents(entries)]

    def check_counts(self) -> list[str]:
        """Check what must agree as a whole, at one moment."""
        pool = self._pool
        return [
            *pool.slots.check_integrity(),
            *pool.leases.check_integrity(set(pool.chunks()) | pool.damaged_leased),
            *self._check_free_runs(),
            *self._check_generations(),
            *self._check_sessions(),
            *self._check_index(),
        ]

    def _check_free_runs(self) -> list[str]:
        pool = self._pool
        violations = []
        in_runs: set[int] = set()
        end_before = -1
        for run in pool.grants.allocator.runs():
            if run.first <= end_before:
                violations.append(f"free runs overlap or touch at slot {run.first}")
            in_runs.update(run)
            end_before = run.first + run.count
        free = set(pool.slots.in_state(SlotState.FREE))
        prepared, set_aside = pool.grants.prepared, pool.grants.set_aside
        counted = len(in_runs) + len(prepared) + len(set_aside)
        if in_runs | prepared | set_aside != free or counted != len(free):
            violations.append(
                f"free runs, prepared slots, slots set aside and free slots differ: "
                f"{sorted(in_runs ^ free ^ prepared ^ set_aside)}"
            )
        if pool.grants.allocator.free_count != len(in_runs):
            violations.append("the allocator's count differs from its runs")
        return violations

    def _check_generations(self) -> list[str]:
        slots = self._pool.slots
        violations = []
        for slot, before in enumerate(self._generations):
            now = slots.generation(slot)
            if now < before:
                violations.append(f"the generation of slot {slot} fell from {before} to {now}")
            self._generations[slot] = now
        return violations

    def _check_sessions(self) -> list[str]:
        pool = self._pool
        violations = []
        holder: dict[int, bytes] = {}
        for session in self._sessions:
            name = session.session_id.hex()
            expected = SlotState.QUARANTINED if session.is_orphaned else SlotState.WRITING
            for slot, generation in session.granted.items():
                if slot in holder:
                    violations.append(f"slot {slot} is granted twice")
                holder[slot] = session.session_id
                if pool.slots.state(slot) is not expected:
                    violations.append(f"slot {slot} of session {name} is not {expected.name}")
                if pool.slots.generation(slot) != generation:
                    violations.append(f"slot {slot} of session {name} has another generation")
            held = {
                lease.lease_id for lease in pool.leases if lease.session_id == session.session_id
            }
            if held != session.lease_ids:
                violations.append(f"session {name} and the lease table disagree")
        unsealed = {
            *pool.slots.in_state(SlotState.WRITING),
            *pool.slots.in_state(SlotState.QUARANTINED),
        }
        expected_unsealed = set(holder) | pool.damaged_leased
        if unsealed != expected_unsealed:
            violations.append(
                f"unsealed slots without a session: {sorted(unsealed ^ expected_unsealed)}"
            )
        known = {session.session_id for session in self._sessions}
        violations += [
            f"lease {lease.lease_id} has no session"
            for lease in pool.leases
            if lease.session_id not in known
        ]
        return violations

    def _check_index(self) -> list[str]:
        pool = self._pool
        chunks = pool.chunks()
        violations = []
        if set(chunks) != set(pool.slots.in_state(SlotState.SEALED)):
            violations.append("sealed slots and chunks differ")
        if {entry.key: entry.slot for entry in pool.index} != {
            entry.key: slot for slot, entry in chunks.items()
        }:
            violations.append("the index and the chunks differ")
        if not pool.unverified <= set(chunks):
            violations.append("unverified slots hold no chunk")
        return violations

    def check_records(self, entries: Iterable[Entry]) -> list[str]:
        """Check the records and token rows of chunks; slow for many."""
        pool = self._pool
        violations = []
        for entry in entries:
            try:
                if pool.holds(entry):
                    check_record(pool.arena, entry)
            except ArenaFormatError as error:
                violations.append(f"slot {entry.slot}: {type(error).__name__}: {error.message}")
        return violations

    def check_parents(self, entries: Iterable[Entry]) -> list[str]:
        """Check that chunks follow their parents."""
        pool = self._pool
        violations = []
        for entry in entries:
            slot = entry.slot
            if not pool.holds(entry):
                continue
            parent = pool.index.get(entry.parent_key)
            if entry.parent_key:
                if parent is None:
                    violations.append(f"slot {slot}: the parent is not in the index")
                elif (
                    parent.token_count != pool.layout.chunk_tokens
                    or parent.chunk_index + 1 != entry.chunk_index
                    or parent.salt_tag != entry.salt_tag
                ):
                    violations.append(f"slot {slot}: the parent does not fit")
        return violations
