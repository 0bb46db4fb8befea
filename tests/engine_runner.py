"""Runs an Engine to its end in the test's own thread: no store, no sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.planning.plan import Residency
from splitpoint.shapes import ArenaLayout, Encoding
from splitpoint.speculation import PLAIN, STEP_DRAFT_TOKENS, DraftMethod, Speculation
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import STAGING_PAGES, MemoryPlan, divide
from worker_service.drafts.drafter import Drafter
from worker_service.engine.engine import Engine
from worker_service.engine.messages import DraftEvent, FinishEvent, StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.engine.sequence import Sequence as EngineSequence
from worker_service.graphs.recorder import Recorder
from worker_service.graphs.support import graphs_of
from worker_service.lanes.lanes import Lanes
from worker_service.model.decoder import Decoder
from worker_service.model.model import Model
from worker_service.store.verifier import Verifier

CPU = torch.device("cpu")


def own_decoder(engine: Engine) -> Decoder:
    """Return the engine's model, for tests that change or measure its tensors."""
    assert isinstance(engine.model, Decoder)
    return engine.model


def make_engine(
    source: Path | Model,
    *,
    chunk_tokens: int = 16,
    max_batch_size: int = 16,
    max_batched_tokens: int = 64,
    cache_pages: int | None = None,
    device_memory_bytes: int = 1 << 26,
    eos_token_ids: tuple[int, ...] = (),
    device: torch.device = CPU,
    has_activations: bool = False,
    encoding: Encoding = Encoding.NATIVE,
    staging_pages: int = STAGING_PAGES,
    room_pages: int | None = None,
    has_store: bool = True,
    lanes: Lanes | None = None,
    verifier: Verifier | None = None,
    shares_prefixes: bool = True,
    window_pages: int = 0,
    recorder: Recorder | None = None,
    graph_bytes: int = 1 << 20,
    drafters: Mapping[DraftMethod, Drafter[EngineSequence]] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """Return an fp32 engine of a checkpoint or model; `cache_pages` sizes its budget exactly.

    With a `recorder` it has graphs, which may take `graph_bytes`.
    """
    model = Decoder.load(source, device, torch.float32) if isinstance(source, Path) else source
    layout = ArenaLayout.of(
        model.shape, chunk_tokens=chunk_tokens, has_activations=has_activations, encoding=encoding
    )

    def plan_for(budget: int) -> MemoryPlan:
        return divide(
            model.shape,
            layout,
            budget_bytes=budget,
            weight_bytes=model.weight_bytes,
            max_batch_size=max_batch_size,
            max_batched_tokens=max_batched_tokens,
            staging_pages=staging_pages,
            has_store=has_store,
            window_pages=window_pages,
            graph_bytes=0 if recorder is None else graph_bytes,
            draft_tokens=STEP_DRAFT_TOKENS if drafters else 0,
        )

    plan = plan_for(device_memory_bytes)
    if cache_pages is not None:
        plan = replace(plan, page_count=cache_pages)
    if room_pages is not None:
        plan = replace(plan, room_page_count=room_pages)
    cache = DeviceCache(layout, plan, device)
    windows = [layer.window for layer in model.layers]
    return Engine(
        model,
        cache,
        max_batch_size=max_batch_size,
        max_batched_tokens=max_batched_tokens,
        eos_token_ids=eos_token_ids,
        lanes=lanes,
        verifier=verifier,
        shares_prefixes=shares_prefixes,
        graphs=graphs_of(cache, windows, max_batch_size=max_batch_size, recorder=recorder),
        drafters=drafters or {},
        tokenizer=tokenizer,
    )


def admission(
    name: str,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    delivered: Sequence[int] = (),
    attempt: int = 0,
    speculation: Speculation = PLAIN,
) -> Admission:
    return Admission(
        request_id=name,
        attempt=attempt,
        prompt=tuple(prompt),
        delivered=tuple(delivered),
        sampling=sampling,
        residency=Residency.RESIDENT,
        split_tokens=0,
        salt=b"",
        speculation=speculation,
    )


@dataclass
class Transcript:
    """Outputs of an engine, by request id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    first_index: dict[str, int] = field(default_factory=dict)
    finishes: dict[str, FinishEvent] = field(default_factory=dict)
    drafts: list[DraftEvent] = field(default_factory=list)
    steps: int = 0
    decoded_tokens: int = 0

    def add(self, output: StepOutput) -> None:
        self.steps += output.ran
        if output.step is not None:
            self.decoded_tokens += output.step.decoded_tokens
        self.drafts += output.drafts
        for event in output.tokens:
            name = event.key[0]
            expected = self.first_index.setdefault(name, event.index) + len(
                self.tokens.setdefault(name, [])
            )
            assert event.index == expected, "token indices have a gap"
            self.tokens[name].append(event.choice.token_id)
        for finish in output.finishes:
            assert finish.key[0] not in self.finishes, "finished twice"
            self.finishes[finish.key[0]] = finish


def run_all(engine: Engine, admissions: Sequence[Admission], *, limit: int = 5000) -> Transcript:
    """Admit everything at once and step until idle."""
    for each in admissions:
        engine.admit(each)
    transcript = Transcript()
    for _ in range(limit):
        transcript.add(engine.step())
        if engine.is_idle:
            return transcript
    raise AssertionError(f"not idle after {limit} steps")
