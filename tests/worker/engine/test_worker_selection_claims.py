"""What a worker claims for a selection is never more than the scheduler charges. About 3 s."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from engine_runner import CPU, admission

from scheduler_service.placement.footprint import Fits, footprint_of, grant_of
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.selection import Selection
from splitpoint.shapes import ArenaLayout, DataType
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan
from worker_service.engine.pages import PageManager
from worker_service.engine.sampling import Sampling
from worker_service.lanes.lanes import SerialLanes
from worker_service.retrieval.selector import Selector
from worker_service.selection.screen_factory import Screens

CHUNK = 8
CONFIG = read_decoder(resolve_model(None), DataType.FLOAT32)
SHAPE = CONFIG.shape
# Costs at which a worker selects, and costs at which it does not.
PROFILE = BUILT_IN_PROFILES["a100-80"]
PROFILES = [None, PROFILE, replace(PROFILE, link_bytes_per_second=1e6)]


def random_selection(rng: random.Random) -> Selection:
    ratio = rng.choice([0.01, 0.1, 0.3, 0.5, 0.9])
    rule = rng.choice([f"{ratio}", f"budget_tokens={rng.randrange(1, 200)}"])
    method = rng.choice(["columns", "window"])
    words = ["verify"] if rng.random() < 0.3 else []
    if method == "columns":
        words += rng.choice([[], ["int8"], ["columns=4"], ["columns=64"]])
        rule = rng.choice([rule, f"alpha=4,cap={ratio}"])
    return Selection.parsed(f"{method}:{','.join([rule, *words])}")


def worker_of(rng: random.Random) -> tuple[PageManager, WorkerFacts]:
    """Return the pages of a worker without anything running, and what the scheduler knows of it."""
    layout = ArenaLayout.of(SHAPE, chunk_tokens=CHUNK, has_activations=False)
    window = rng.choice([0, 0, 2, 9])
    plan = MemoryPlan(
        budget_bytes=0,
        weight_bytes=0,
        workspace_bytes=0,
        page_bytes=SHAPE.page_bytes(CHUNK),
        page_count=rng.randrange(1, 40),
        input_page_count=0,
        streamed_page_count=1 + window + bool(window),
        room_page_count=1,
        window_page_count=window,
        sink_page_count=int(bool(window)),
        collected_bytes=1 << 30,
    )
    cache = DeviceCache(layout, plan, CPU)
    profile = rng.choice(PROFILES)
    selector = Selector(
        CONFIG,
        SHAPE,
        cache,
        SerialLanes(CPU),
        partial(Screens, CONFIG),
        lambda: profile,
        can_draft=True,
    )
    facts = WorkerFacts(
        worker_id="0",
        address="",
        shape=SHAPE,
        profile=PROFILE,
        chunk_tokens=CHUNK,
        has_activations=False,
        cache_capacity_bytes=plan.cache_capacity_bytes,
        page_bytes=plan.page_bytes,
        streamed_page_count=plan.streamed_page_count,
        max_batch_size=8,
        kvstore_address="unix:/store",
    )
    return PageManager(cache, shares_prefixes=False, selector=selector), facts


def test_a_claim_never_exceeds_the_charge() -> None:
    selecting = 0
    for seed in range(40):
        rng = random.Random(seed)
        pages, facts = worker_of(rng)
        for _ in range(50):
            selection, tokens = random_selection(rng), rng.randrange(2, 800)
            asked = rng.choice([Residency.STREAMED, None])
            fits = footprint_of(tokens, asked, facts, selection)
            if not isinstance(fits, Fits) or fits.residency is Residency.RESIDENT:
                continue
            free = rng.randrange(facts.cache_capacity_bytes + 1)
            grant = grant_of(fits, free, facts.page_bytes)
            request = replace(
                admission("a", [5] * (tokens - 1), Sampling(max_tokens=1)),
                residency=Residency.STREAMED,
                resident_tokens=grant.spare_bytes // facts.page_bytes * CHUNK,
                schedule=Schedule.PIPELINED,
                selection=selection,
            )
            charged = grant.size_bytes // facts.page_bytes
            claimed = pages.claim_of(request)
            assert claimed <= charged, (seed, tokens, str(selection))
            selecting += claimed > pages.claim_of(replace(request, selection=Selection()))
    assert selecting > 100
