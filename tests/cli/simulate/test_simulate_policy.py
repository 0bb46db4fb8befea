"""A cell tells the policy what the scheduler would tell it of the same request and worker."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from scheduler_doubles import queued_request, started
from simulated import CHUNK, cell, requests, worker

from scheduler_service.placement.account import Charge
from scheduler_service.placement.routing import candidate_of
from scheduler_service.prefixes.lookup import CachedPrefix, ChunkMarks
from splitpoint_cli.traces.arrival import Arrival


@pytest.mark.parametrize("seed", range(60))
def test_a_cell_and_the_scheduler_see_the_same_request(seed: int) -> None:
    random = Random(seed)
    tokens, answer = random.randint(1, 1_500), random.randint(1, 300)
    marks = [n.to_bytes(8, "big") for n in range((tokens - 1) // CHUNK)]
    # Small ones must stream a long prompt.
    made = cell([worker(pages=random.choice((10, 60, 200))), worker()])
    name, station = next(iter(made.stations.items()))
    account, workers = station.account, made.queue.workers
    for number in range(random.randint(0, 3)):
        shared, own = marks[: random.randint(0, len(marks))], random.randint(0, 3)
        if account.has_room_for(len(shared) + own):
            started(account, 100 + number, own, shared)
    kept = marks[: random.randint(0, len(marks))] if random.random() < 0.5 else []
    station.kept.update(dict.fromkeys(kept))
    stored = random.randint(0, len(marks)) * CHUNK

    (simulated,) = requests([Arrival(0.0, tokens, answer)])
    space = account.facts.key_space
    simulated.cached = CachedPrefix({name: stored}, marks={space: tuple(marks)})
    asked = queued_request(0, tokens + 1, cached={name: stored})
    asked.sampling.max_tokens = answer
    asked.cached = replace(asked.cached, marks={space: ChunkMarks(b"".join(marks))})

    found, expected = workers.need(simulated, name), workers.need(asked, name)
    assert found is not None
    assert expected is not None
    assert list(found.charge.marks) == list(expected.charge.marks)
    assert replace(found, charge=Charge()) == replace(expected, charge=Charge())
    assert candidate_of(simulated, account, found) == candidate_of(asked, account, expected)
