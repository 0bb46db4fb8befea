"""What a streamed request that reads by a selection needs of the device, and whether it gains.

Row pages hold the fetched rows of each layer and KV head; screen pages hold what the screens keep
of every stored token. Both are ordinary pages of the cache: scheduler and worker count them by the
same functions. Pure.

A decode step that reads everything loads or rebuilds its S stored tokens by the request's split,
and takes the seconds that `SplitCosts` predicts. With a selection the layers that select carry
n rows instead, and score what the screens keep; the e exact ones read by the split as before:

    max(W + e A + (L - e) N + D / L,
        F + D + e R + (L - e) (kept bytes m + 2 n_q r S / v + o))

A and R are seconds of the link and of rebuilding in an exact layer, N those of the link for n
rows, W those for weights on the host, D the step's compute; F is A, or N without exact layers:
nothing computes before the first layer has arrived. n is what a step is expected to want: rows that
are on the device already make the gain larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from splitpoint.config import counted
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import SplitLine
from splitpoint.planning.restore_choice import NO_SPLIT
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import Scenario, SplitCosts
from splitpoint.planning.split_search import best_pipeline_options
from splitpoint.selection import Selection, Trait
from splitpoint.shapes import Encoding, ModelShape, chunks_of

# Bytes of the scale of an int8 row.
SCALE_BYTES = 2
# Share of the tokens that alpha is expected to read, whatever it is: with InfiniGen's own values, 4
# and 5 (section 5.1), `splitpoint eval` reads 3 to 13 % (docs/papers/infinigen.md).
ALPHA_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class SelectionPages:
    """Pages of one sequence.

    Attributes:
        rows: for fetched rows; screens: for what the screens keep.
    """

    rows: int
    screens: int

    @property
    def count(self) -> int:
        return self.rows + self.screens


def wanted_rows(selection: Selection, stored_tokens: int) -> int:
    """Return how many of the stored tokens a decode step wants at most, in each KV head.

    Never fewer than those that are always read, wherever the newest of them lie.
    """
    if selection.budget_tokens is not None:
        wanted = selection.budget_tokens
    else:
        share = selection.cap if selection.alpha is not None else selection.ratio
        # As `choose` rounds: 10 % of 200 tokens are 20 despite binary fractions.
        wanted = math.ceil(stored_tokens * (1.0 if share is None else share) - 1e-6)
    return min(max(wanted, selection.sinks + selection.recent), stored_tokens)


def pool_chunks(selection: Selection, chunks: int, chunk_tokens: int) -> int:
    """Return how many of a request's own chunks its pool lets it keep in the store.

    Whole chunks within the fraction, but never fewer than hold what must stay (first and newest
    tokens) and a chunk that is written over others. All of them without a pool.
    """
    least = chunks_of(selection.sinks + selection.recent, chunk_tokens) + 1
    share = 1.0 if selection.pool is None else selection.pool
    # As in `wanted_rows`: 80 % of 5 chunks are 4 despite binary fractions.
    return min(chunks, max(least, math.floor(chunks * share + 1e-6)))


def expected_rows(selection: Selection, stored_tokens: int) -> int:
    """Return how many of the stored tokens a decode step is expected to want in each KV head.

    By alpha it varies, and `wanted_rows` is its bound, for which there is room.
    """
    most = wanted_rows(selection, stored_tokens)
    if selection.alpha is None or math.isinf(selection.alpha):
        return most
    least = min(selection.sinks + selection.recent, stored_tokens)
    return min(most, max(least, math.ceil(ALPHA_SHARE * stored_tokens)))


def selection_pages(
    shape: ModelShape, selection: Selection, stored_tokens: int, chunk_tokens: int
) -> SelectionPages:
    """Return the pages for a request with this many tokens in the store at its end.

    Records that are larger than a plane of a page could not be kept: their screens count as
    large as the tokens, so that none selects.
    """
    if not stored_tokens:
        return SelectionPages(0, 0)
    rows = chunks_of(wanted_rows(selection, stored_tokens), chunk_tokens)
    size = kept_bytes(shape, selection)
    # A page has one plane for K and one for V in each layer.
    plane = chunk_tokens * shape.kv_width * shape.data_type.size
    if size > plane:
        return SelectionPages(rows, chunks_of(stored_tokens, chunk_tokens))
    screens = chunks_of(stored_tokens, 2 * (plane // size)) if size else 0
    return SelectionPages(rows, screens)


def pages_at_last(
    shape: ModelShape, selection: Selection, final_tokens: int, chunk_tokens: int
) -> SelectionPages:
    """Return the pages for a streamed request of this many tokens at its end.

    All full chunks count as stored, also those that stay on the device: they may have to leave
    it. No pages if they would be no fewer than those chunks: then everything is read.
    """
    chunks = chunks_of(final_tokens, chunk_tokens) - 1
    pages = selection_pages(shape, selection, chunks * chunk_tokens, chunk_tokens)
    return pages if pages.count < chunks else SelectionPages(0, 0)


def kept_bytes(shape: ModelShape, selection: Selection) -> int:
    """Return the bytes that a screen keeps of a token in one layer."""
    if Trait.KEEPS_NOTHING in selection.method.traits:
        return 0
    columns = selection.kept_columns(shape.head_dim)
    item = shape.data_type.size
    return shape.kv_head_count * (columns + SCALE_BYTES if selection.keeps_int8 else columns * item)


@dataclass(frozen=True, slots=True)
class SelectedStep:
    """Predicted seconds of a decode step: one that reads everything, and one that selects."""

    full_seconds: float
    selected_seconds: float


@dataclass(frozen=True, slots=True)
class StepSplit:
    """How the steps of a streamed sequence get what they read in full.

    Attributes:
        line: leading tokens rebuilt from X, by the sequence's length; all others are loaded.
        schedule: ROW: their X is on the device.
        resident_tokens: tokens whose K and V stay on the device.
        staging_tokens: tokens that fit the staging memory; 0: no bound.
    """

    line: SplitLine = NO_SPLIT
    schedule: Schedule = Schedule.PIPELINED
    resident_tokens: int = 0
    staging_tokens: int = 0


LOADS_ALL = StepSplit()


def predict_step(
    shape: ModelShape,
    profile: Profile,
    selection: Selection,
    stored_tokens: int,
    split: StepSplit = LOADS_ALL,
    chunk_tokens: int = 1,
    *,
    encoding: Encoding = Encoding.NATIVE,
) -> SelectedStep:
    """Predict both steps of one sequence, whose rows cross the link as encoded; see the module."""
    costs = SplitCosts.of(shape, profile, encoding)
    staging = split.staging_tokens
    options = replace(
        best_pipeline_options(
            costs, stored_tokens, split.schedule, chunk_tokens=chunk_tokens, staging_tokens=staging
        ),
        scenario=Scenario.DECODE_STEP,
        compute_seconds=profile.step_compute_seconds,
        ahead=min(1.0, staging / stored_tokens) if staging else 1.0,
    )
    pulled = max(0, stored_tokens - split.resident_tokens)
    rebuilt = max(0, split.line.at(stored_tokens, chunk_tokens) - split.resident_tokens)
    sends, tile, layers = split.schedule is not Schedule.ROW, options.tile_tokens, shape.layer_count
    # A step sends all weights on the host, those for rebuilding among them.
    caches = replace(costs, kv_weights=0.0)
    of_all = caches.link_seconds(rebuilt, pulled, tile, sends=sends) / layers
    rebuilding = costs.rebuild_seconds(rebuilt, tile) / layers
    of_rows = costs.copy_overhead + expected_rows(selection, pulled) * costs.load
    exact = min(selection.exact_layers, layers)
    selecting, compute = layers - exact, profile.step_compute_seconds
    linked = profile.weight_seconds + exact * of_all + selecting * of_rows
    scored = selecting * _screen_seconds(shape, profile, selection, pulled)
    # What of the other exact layers does not fit the staging memory is waited for, too.
    first = of_all * (1 + (exact - 1) * (1 - options.ahead)) if exact else of_rows
    return SelectedStep(
        costs.seconds(rebuilt, pulled, options),
        max(linked + compute / layers, first + compute + exact * rebuilding + scored),
    )


def why_not_selected(
    shape: ModelShape,
    selection: Selection,
    stored_tokens: int,
    chunk_tokens: int,
    *,
    profile: Profile | None = None,
    encoding: Encoding = Encoding.NATIVE,
    split: StepSplit = LOADS_ALL,
) -> str:
    """Return why a streamed request had better read everything; empty if it should select.

    Args:
        stored_tokens: of the request, that are in the store alone.
        profile: None: costs are unknown, and memory alone decides.
        encoding: of K and V in the store.
        split: by which the request would read everything.
    """
    if selection.reads_all:
        return f"{selection} reads every token"
    if selection.exact_layers >= shape.layer_count:
        return f"all {shape.layer_count} layers read everything"
    if not stored_tokens:
        return "the prompt is short: its whole cache stays on the device"
    pages = selection_pages(shape, selection, stored_tokens, chunk_tokens)
    stored_pages = chunks_of(stored_tokens, chunk_tokens)
    if pages.count >= stored_pages:
        return (
            f"rows and screens take {counted(pages.count, 'page')}, all of its "
            f"{stored_tokens:,} stored tokens take {stored_pages}"
        )
    if profile is None:
        return ""
    step = predict_step(
        shape, profile, selection, stored_tokens, split, chunk_tokens, encoding=encoding
    )
    if step.selected_seconds < step.full_seconds:
        return ""
    return (
        f"a step is predicted to take {step.selected_seconds * 1e3:.3g} ms with it, "
        f"{step.full_seconds * 1e3:.3g} ms if it reads all {stored_tokens:,} stored tokens"
    )


def _screen_seconds(
    shape: ModelShape, profile: Profile, selection: Selection, stored_tokens: int
) -> float:
    """Return the seconds in which a layer's tokens are scored."""
    size = kept_bytes(shape, selection)
    width = size / (shape.kv_head_count * shape.data_type.size)
    flops = 2 * shape.query_head_count * width * stored_tokens
    return (
        stored_tokens * size * profile.memory_seconds_per_byte
        + flops / profile.rebuild_flops_per_second
        + profile.operation_overhead_seconds
    )
