"""A cell tells the policy what the scheduler would tell it of the same request and worker."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from scheduler_doubles import queued_request
from simulated import CHUNK, cell, requests, worker

from scheduler_service.placement.charging import Charging
from scheduler_service.placement.footprint import Fits, footprint_of
from scheduler_service.placement.ledger import Charge
from scheduler_service.placement.routing import candidate_of
from scheduler_service.prefixes.marks import ChunkMarks
from splitpoint.costs.first_token import Backlog
from splitpoint_cli.traces.arrival import Arrival


@pytest.mark.parametrize("seed", range(60))
def test_a_cell_and_the_scheduler_see_the_same_request(seed: int) -> None:
    random = Random(seed)
    tokens, answer = random.randint(1, 1_500), random.randint(1, 300)
    marks = [n.to_bytes(8, "big") for n in range((tokens - 1) // CHUNK)]
    # Small ones must stream a long prompt.
    made = cell([worker(pages=random.choice((10, 60, 200))), worker()])
    name, station = next(iter(made.stations.items()))
    ledger = station.ledger
    for number in range(random.randint(0, 3)):
        charge = Charge(marks[: random.randint(0, len(marks))], random.randint(0, 3))
        if ledger.has_room(charge):
            ledger.grant(100 + number, charge)
    kept = marks[: random.randint(0, len(marks))] if random.random() < 0.5 else []
    station.kept.update(dict.fromkeys(kept))
    ledger.device_marks = frozenset(kept)
    stored = random.randint(0, len(marks)) * CHUNK

    (simulated,) = requests([Arrival(0.0, tokens, answer)])
    simulated.marks, simulated.cached_tokens = tuple(marks), stored
    asked = queued_request(0, tokens + 1, cached={name: stored})
    asked.sampling.max_tokens = answer
    packed = ChunkMarks(b"".join(marks))
    asked.cached = replace(asked.cached, marks={ledger.facts.key_space: packed})

    fits = footprint_of(tokens + answer, None, ledger.facts)
    found = made.need(simulated, name)
    assert isinstance(fits, Fits)
    assert found is not None
    expected = Charging(None).way(asked, ledger, fits)
    assert list(found.charge.marks) == list(expected.charge.marks)
    assert replace(found, can_start=True, charge=Charge()) == replace(expected, charge=Charge())
    assert found.can_start == ledger.has_room(expected.charge)

    backlog = Backlog(made.queue.rooms.bound_tokens(name), made.queue.rooms.link_bytes(name))
    told = made._candidate(simulated, name, found)
    assert told == candidate_of(asked, ledger, fits, backlog)
