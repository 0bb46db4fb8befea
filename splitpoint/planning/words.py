"""The words of a plan: a headline of its figures, and a sentence for each reason.

The only file with prose about plans. It decides nothing, and nothing reads it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from splitpoint.config import counted, format_seconds, format_size
from splitpoint.costs.fetching import Basis, SourceRate
from splitpoint.planning.plan import (
    Objective,
    Plan,
    Reason,
    ReasonKind,
    Residency,
    RestoreMethod,
)
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Numerics
from splitpoint.tiers import ChunkSource, Tier, Transfer

# Link and device count as equally busy within this share.
_BALANCED = 0.9
# Link or device limits a restore if it is busy for this part of it.
_LIMITS = 0.5
_TRANSFER_NAMES = {Transfer.STREAM.value: "gRPC", Transfer.DIRECT.value: "direct reads"}


@dataclass(frozen=True, slots=True)
class ExplainedPlan(Plan):
    """A plan as clients get it.

    Attributes:
        reason: the headline: what is done with the cached tokens, and its predicted time.
        reason_details: a sentence for each of the reasons.
    """

    reason: str = ""
    reason_details: tuple[str, ...] = ()


def in_words(plan: Plan) -> ExplainedPlan:
    """Return the plan with its words."""
    values = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    details = tuple(sentence(reason) for reason in plan.reasons)
    return ExplainedPlan(**values, reason=headline(plan), reason_details=details)


def sentence(reason: Reason) -> str:
    """Return what one reason says."""
    return _WORDS[reason.kind](*reason.values)


# -- the headline ----------------------------------------------------------------


def headline(plan: Plan) -> str:
    """Return what is done, its predicted time, and those of the alternatives."""
    if plan.residency is Residency.STREAMED:
        return _streamed_headline(plan)
    if not plan.cached_tokens:
        return _cold(plan.new_tokens)
    if plan.device_tokens >= plan.cached_tokens:
        return f"nothing is restored: {_cached(plan)} on the device"
    seconds = plan.predicted_restore_seconds + plan.predicted_fetch_seconds
    words = f"{_restored(plan)}: {format_seconds(seconds)} predicted"
    if plan.device_tokens:
        words = f"{plan.device_tokens:,} of {_cached(plan)} on the device, the others {words}"
    instead = _alternatives(plan)
    return f"{words}; {instead}" if instead else words


def _streamed_headline(plan: Plan) -> str:
    step = "streamed from host memory in each step"
    if plan.predicted_step_seconds:
        seconds = format_seconds(plan.predicted_step_seconds)
        step = f"{step}: {seconds} predicted for this request alone"
    return step if plan.cached_tokens else f"{_cold(plan.new_tokens)}, then {step}"


def _restored(plan: Plan) -> str:
    """Return what is done with the cached tokens that are not on the device."""
    found = ""
    if plan.fetched_tokens:
        place = ChunkSource.words_of(plan.fetch_source or "another store")
        found = f"{counted(plan.fetched_tokens, 'token')} fetched from {place}, "
    rest = plan.cached_tokens - plan.device_tokens
    if plan.method is RestoreMethod.TOKENS:
        if plan.recomputed_tokens >= rest:
            return f"{found}recomputed from token ids"
        if plan.recomputed_tokens:
            return f"{found}{plan.recomputed_tokens:,} of {rest:,} recomputed, the others loaded"
    elif plan.method is RestoreMethod.RECOMPUTE:
        return f"{found}rebuilt from stored activations"
    elif plan.method is RestoreMethod.SPLIT:
        return (
            f"{found}{plan.split_tokens:,} of {plan.cached_tokens:,} rebuilt from stored "
            "activations, the others loaded"
        )
    return f"{found}loaded from host memory"


def _alternatives(plan: Plan) -> str:
    """Return what the other methods would take, as far as that is known."""
    loads = plan.method in (RestoreMethod.NONE, RestoreMethod.LOAD)
    instead = ""
    if plan.predicted_load_seconds and not loads and not plan.fetched_tokens:
        instead = f"loading everything would take {format_seconds(plan.predicted_load_seconds)}"
    recomputes_all = plan.recomputed_tokens >= plan.cached_tokens - plan.device_tokens
    if plan.predicted_recompute_seconds and not recomputes_all:
        seconds = format_seconds(plan.predicted_recompute_seconds)
        instead += f", recomputing {seconds}" if instead else f"recomputing would take {seconds}"
    return instead


def _cached(plan: Plan) -> str:
    return counted(plan.cached_tokens, "cached token is", "cached tokens are")


def _cold(new_tokens: int) -> str:
    return f"nothing is cached: {_tokens(new_tokens)} prefilled"


# -- the reasons -----------------------------------------------------------------


def _asked_split(wanted: int, split: int) -> str:
    if split == wanted:
        return f"split {split:,} was asked for" if split else "loading was asked for"
    limit = "all that is cached" if split else "since only cached tokens can be rebuilt"
    return f"split {wanted:,} was asked for and capped at {split:,}, {limit}"


def _split(split: int, length: int, schedule: str) -> str:
    if split == length:
        return f"split {split:,}: everything is rebuilt from arriving activations"
    front = f"split {split:,} of {length:,}: the front is rebuilt"
    if schedule == Schedule.SERIAL.value:
        return f"{front}, then the rest loaded"
    return f"{front} while the rest is loaded"


def _recomputed(recomputed: int, cached: int) -> str:
    rest = cached - recomputed
    if not rest and recomputed == 1:
        return "the one cached token is recomputed from its id"
    if not rest:
        return f"all {recomputed:,} cached tokens are recomputed from their ids"
    if not recomputed:
        return f"nothing is recomputed from token ids, {_tokens(rest)} loaded"
    return (
        f"[0, {recomputed:,}) is recomputed from token ids while {_tokens(rest)} loaded from the "
        "back"
    )


def _loaded(tokens: int, resident: int) -> str:
    if not tokens:
        return "split 0: nothing is loaded"
    kind = "other" if resident else "cached"
    which = f"all {tokens:,} {kind} tokens are" if tokens > 1 else f"the one {kind} token is"
    return f"split 0: {which} loaded"


def _predicted(seconds: float, load_seconds: float) -> str:
    if seconds == load_seconds:
        return f"predicted {format_seconds(seconds)}"
    share = f"{seconds / load_seconds:.2f} of the " if load_seconds else ""
    loading = f"{share}{format_seconds(load_seconds)} for loading everything"
    return f"predicted {format_seconds(seconds)}, {loading}"


def _step(seconds: float, load_seconds: float) -> str:
    takes = f"a step takes {format_seconds(seconds)}"
    if seconds == load_seconds:
        return takes
    return f"{takes}, {format_seconds(load_seconds)} without rebuilding"


def _limit(link: float, device: float) -> str:
    words = f"link {format_seconds(link)}, device {format_seconds(device)}"
    if min(link, device) >= _BALANCED * max(link, device):
        return f"{words}, about equally busy"
    return f"{words}, {'the link' if link > device else 'compute'} is the limit"


def _instead(seconds: float, chosen: float) -> str:
    """Return both times and their difference, which their three digits may not show."""
    words = f"would take {format_seconds(seconds)} instead of {format_seconds(chosen)}"
    if not chosen:
        return words
    share = 1 - seconds / chosen
    if share > 0:
        return f"{words} ({share:.2%} less): too little to gain"
    return f"{words} ({-share:.2%} more)"


def _split_instead(split: int, seconds: float, chosen: float) -> str:
    return f"the best split with activations, {split:,}, {_instead(seconds, chosen)}"


def _tokens_instead(tokens: int, seconds: float, chosen: float) -> str:
    which = f"{tokens:,} tokens from their ids" if tokens > 1 else "token from its id"
    return f"recomputing the first {which} {_instead(seconds, chosen)}"


def _overheads(tokens: int, chunks: int) -> str:
    which = "one token" if tokens == 1 else f"some of {tokens:,} tokens"
    few = f" ({counted(chunks, 'chunk')})" if chunks else ""
    return (
        f"rebuilding {which}{few} would take longer: every copy and every product has an overhead"
    )


def _first_chunk(tokens: int, seconds: float, link_seconds: float) -> str:
    many = f"even {tokens:,} tokens from their ids" if tokens > 1 else "a token from its id"
    return (
        f"recomputing {many} keeps the device busy for {format_seconds(seconds)}, loading "
        f"everything the link for {format_seconds(link_seconds)}"
    )


def _tokens_not_considered(schedule: str) -> str:
    why = f"schedule {schedule} cannot restore from both ends"
    if schedule == Schedule.SERIAL.value:
        why = "nothing overlaps with schedule serial"
    return f"recomputing from token ids was not considered: {why}"


def _stream_now(stream: float, wait: float, objective: str) -> str:
    is_throughput = objective == Objective.THROUGHPUT.value
    goal = "tokens/s" if is_throughput else "mean finishing time"
    return (
        f"streamed: streaming at once finishes in {stream:.3g} s, waiting for device memory in "
        f"{wait:.3g} s; with the requests that run beside it streaming has the better {goal}"
    )


def _full_batch(count: int, streamed: int, rate: float, residents: float) -> str:
    return (
        f"streamed: the weights from the host cross the link once for {counted(count, 'request')}, "
        f"{streamed:,} of them streamed: {rate:.3g} tokens/s; with as many residents as fit "
        f"alone {residents:.3g} tokens/s"
    )


def _charged(size: int, selected: int, selection: str) -> str:
    parts = f", {counted(selected, 'page')} of it for what {selection} reads" if selected else ""
    return f"{format_size(size)} are charged{parts}"


def _expected_answer(answer: int, most: int) -> str:
    return f"charged for an expected answer of {counted(answer, 'token')} of at most {most:,}"


def _numerics(numerics: str) -> str:
    compared = "may in their last bits differ from the stored ones"
    if numerics == Numerics.INVARIANT.value:
        compared = "equal the stored ones"
    return f"numerics are {numerics}: rebuilt rows {compared}"


def _fetch(
    tokens: int,
    source: str,
    transfer: str,
    rate: float,
    basis: str,
    seconds: float,
    recompute_seconds: float,
    missing: int,
) -> str:
    verb = "loading" if source in list(Tier) else "fetching"
    by = " by direct reads" if transfer == Transfer.DIRECT.value else ""
    recomputed = f"the {missing:,} that the device lacks" if missing else "them"
    return (
        f"{verb} {counted(tokens, 'token')} from {ChunkSource.words_of(source)}{by} "
        f"at {_rate(rate, basis)}: {_short(seconds)}, "
        f"recomputing {recomputed}: {_short(recompute_seconds)}"
    )


def _no_fetch(tokens: int, source: str, *values: Any) -> str:
    verb = "loaded" if source in list(Tier) else "fetched"
    return f"not {verb}: {_fetch(tokens, source, *values)}"


def _meeting(
    tokens: int,
    computed: int,
    tier: str,
    rate: float,
    basis: str,
    seconds: float,
    recompute_seconds: float,
) -> str:
    return (
        f"loading {counted(tokens, 'token')} from {ChunkSource.words_of(tier)} "
        f"at {_rate(rate, basis)} while {counted(computed, 'token')} before them are computed: "
        f"{_short(seconds)}, recomputing all: {_short(recompute_seconds)}"
    )


def _fetched(tokens: int, transfers: str, seconds: float) -> str:
    if not tokens:
        return "fetched nothing"
    names = [_TRANSFER_NAMES.get(each, each) for each in transfers.split(", ") if each]
    by = f" by {' and '.join(names)}" if names else ""
    return f"fetched {counted(tokens, 'token')}{by} in {seconds:.2g} s"


def _found_on_device(found: int, expected: int) -> str:
    if not expected:
        return f"{counted(found, 'token was', 'tokens were')} on the device already"
    if not found:
        left = counted(expected, "token that was", "tokens that were")
        return f"the {left} expected on the device had left it"
    return f"{found:,} of {counted(expected, 'token')} expected on the device were there"


def _met(met: int, expected: int) -> str:
    return f"they met at {met:,}" + (f" where {expected:,} was expected" if expected else "")


def _restored_in(seconds: float, predicted: float, device: float, link: float) -> str:
    busy = f"the link was busy {format_seconds(link)}, the device {format_seconds(device)}"
    if device > link:
        busy = f"the device was busy {format_seconds(device)}, the link {format_seconds(link)}"
    if max(device, link) < _LIMITS * seconds:
        busy = f"{busy}, neither of them most of the time"
    ratio = seconds / predicted
    times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
    return f"restored in {format_seconds(seconds)}, {times} x the prediction: {busy}"


def _drafted(method: str, tokens: int, steps: int, accepted: int) -> str:
    return (
        f"{method} drafted {counted(tokens, 'token')} in {counted(steps, 'step')}, "
        f"{accepted:,} ({accepted / tokens:.0%}) were accepted"
    )


def _selected(
    selection: str, read_ratio: float, steps: int, unit: str, fetched: int, rows: int
) -> str:
    return (
        f"{selection} read {read_ratio:.1%} of the tokens in {steps:,} {unit} and fetched "
        f"{fetched:,} of {counted(rows, 'row')}"
    )


# Each takes the values of its kind.
_WORDS: dict[ReasonKind, Callable[..., str]] = {
    ReasonKind.ASKED_SPLIT: _asked_split,
    ReasonKind.ASKED_TOKENS: "method tokens was asked for".format,
    ReasonKind.SPLIT: _split,
    ReasonKind.AT_FIRST: "at first {:,} of {:,}, until the new tokens are stored".format,
    ReasonKind.RECOMPUTED: _recomputed,
    ReasonKind.LOADED: _loaded,
    ReasonKind.KEYS_STAY: lambda tokens, size: (
        f"keys and values of the first {tokens:,} stay on the device ({format_size(size)})"
    ),
    ReasonKind.INPUTS_STAY: lambda tokens, size: (
        f"X of the first {tokens:,} stays on the device ({format_size(size)}, less than their "
        "keys and values)"
    ),
    ReasonKind.PREDICTED: _predicted,
    ReasonKind.STEP: _step,
    ReasonKind.LIMIT: _limit,
    ReasonKind.CANNOT_PAY: (
        "an activation is {:.2f} x the bytes of its keys and values (rho >= 1): sending it can "
        "never pay"
    ).format,
    ReasonKind.NO_ACTIVATIONS: "the store holds no activations".format,
    ReasonKind.SPLIT_INSTEAD: _split_instead,
    ReasonKind.TOKENS_INSTEAD: _tokens_instead,
    ReasonKind.REBUILD_COSTS: lambda rebuild, load: (
        f"rebuilding a token takes {_us(rebuild)} a layer, loading it {_us(load)}"
    ),
    ReasonKind.DEVICE_BUSY: lambda device, link: (
        f"the device is busier than the link already: it computes for {format_seconds(device)} "
        f"without rebuilding, the link copies for {format_seconds(link)}"
    ),
    ReasonKind.OVERHEADS: _overheads,
    ReasonKind.FIRST_CHUNK: _first_chunk,
    ReasonKind.TOKENS_NOT_CONSIDERED: _tokens_not_considered,
    ReasonKind.THROUGHPUT: lambda chosen, load: (
        f"for throughput: the busier of link and device works for {format_seconds(chosen)}, with "
        f"loading for {format_seconds(load)}"
    ),
    ReasonKind.HOST_WEIGHTS: lambda seconds, size: (
        f"weights that come from the host take {format_seconds(seconds)} of each step "
        f"({format_size(size)}; --device-memory)"
    ),
    ReasonKind.FITS: lambda size, capacity: (
        f"resident: {format_size(size)} of cache fit the worker's {format_size(capacity)}"
    ),
    ReasonKind.EXCEEDS: lambda size, capacity: (
        f"streamed: {format_size(size)} of cache exceed the worker's {format_size(capacity)}"
    ),
    ReasonKind.ASKED_STREAMED: "streamed, as asked for".format,
    ReasonKind.STREAM_NOW: _stream_now,
    ReasonKind.FULL_BATCH: _full_batch,
    ReasonKind.CHARGED: _charged,
    ReasonKind.SPARE: lambda size: f"{format_size(size)} more for a part that stays on the device",
    ReasonKind.EXPECTED_ANSWER: _expected_answer,
    ReasonKind.SHARED_PAGES: lambda pages: f"{counted(pages, 'page')} shared with running requests",
    ReasonKind.LOSSY_CACHE: "the store keeps {}, so cached tokens are approximate".format,
    ReasonKind.LOSSY_WEIGHTS: "weights are {}: answers are approximate".format,
    ReasonKind.NUMERICS: _numerics,
    ReasonKind.ON_DEVICE: lambda tokens: f"{_tokens(tokens)} on the device already",
    ReasonKind.FETCH: _fetch,
    ReasonKind.NO_FETCH: _no_fetch,
    ReasonKind.MEETING: _meeting,
    ReasonKind.FETCHED: _fetched,
    ReasonKind.FOUND_ON_DEVICE: _found_on_device,
    ReasonKind.FOUND_CACHED: lambda found, expected: (
        f"the worker found {counted(found, 'token')} cached instead of {expected:,}"
    ),
    ReasonKind.MET: _met,
    ReasonKind.USED: "the worker used method {} with split {:,}".format,
    ReasonKind.RESTORED: _restored_in,
    ReasonKind.FIRST_USE: lambda size: (
        f"{format_size(size)} of the worker's cache was used for the first time"
    ),
    ReasonKind.DRAFTED: _drafted,
    ReasonKind.NO_DRAFTER: "{} drafted nothing: the worker has no such drafter".format,
    ReasonKind.DRAFTS_ARE_FOR_STREAMS: (
        "{} drafted nothing: drafts of this kind pay only while the cache is streamed"
    ).format,
    ReasonKind.NO_DRAFTS: "{} drafted nothing: no draft was found, or none would have paid".format,
    ReasonKind.SELECTED: _selected,
    ReasonKind.READ_ALL: "other steps read every token: {}".format,
    ReasonKind.NOT_SELECTED: "{} was not used: {}".format,
    ReasonKind.DRAFTS_OFF: "the worker's drafts are off beside it".format,
}


# -- parts -----------------------------------------------------------------------


def _rate(bytes_per_second: float, basis: str) -> str:
    return str(SourceRate(bytes_per_second, Basis(basis)))


def _tokens(count: int) -> str:
    return counted(count, "token is", "tokens are")


def _short(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs"
