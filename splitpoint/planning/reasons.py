"""The words of a plan: a headline with its figures, and what led to it. They decide nothing.

`explained` writes the headline from the plan's values. Code that changes a plan does so by this
function, and gives what it found out as details, one clause each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from splitpoint.config import counted, format_size
from splitpoint.planning.choices import Candidate, Chooser, Comparison
from splitpoint.planning.plan import Objective, Plan, PlanInput, Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.tiers import Tier

# Link and device count as equally busy within this share.
_BALANCED = 0.9


def explained(plan: Plan, *details: str, **changes: Any) -> Plan:
    """Return the plan with these changes and further details, and the headline that fits it.

    `changes`: new values of the plan's fields.
    """
    plan = replace(plan, **changes, reason_details=(*plan.reason_details, *details))
    return replace(plan, reason=_headline(plan))


# -- the headline ----------------------------------------------------------------


def _headline(plan: Plan) -> str:
    if plan.residency is Residency.STREAMED:
        return _streamed_headline(plan)
    if not plan.cached_tokens:
        return _cold(plan.new_tokens)
    if plan.device_tokens >= plan.cached_tokens:
        return f"nothing is restored: {_cached(plan)} on the device"
    seconds = plan.predicted_restore_seconds + plan.predicted_fetch_seconds
    words = f"{_restored(plan)}: {_time(seconds)} predicted"
    if plan.device_tokens:
        words = f"{plan.device_tokens:,} of {_cached(plan)} on the device, the others {words}"
    instead = _alternatives(plan)
    return f"{words}; {instead}" if instead else words


def _streamed_headline(plan: Plan) -> str:
    step = "streamed from host memory in each step"
    if plan.predicted_step_seconds:
        step = f"{step}: {_time(plan.predicted_step_seconds)} predicted"
    return step if plan.cached_tokens else f"{_cold(plan.new_tokens)}, then {step}"


def _restored(plan: Plan) -> str:
    """Return what is done with the cached tokens that are not on the device."""
    found = ""
    if plan.fetched_tokens:
        place = plan.fetch_source
        place = f"the {place} tier" if place in list(Tier) else place or "another store"
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
        instead = f"loading everything would take {_time(plan.predicted_load_seconds)}"
    recomputes_all = plan.recomputed_tokens >= plan.cached_tokens - plan.device_tokens
    if plan.predicted_recompute_seconds and not recomputes_all:
        seconds = _time(plan.predicted_recompute_seconds)
        instead += f", recomputing {seconds}" if instead else f"recomputing would take {seconds}"
    return instead


def _cached(plan: Plan) -> str:
    return counted(plan.cached_tokens, "cached token is", "cached tokens are")


def _cold(new_tokens: int) -> str:
    return f"nothing is cached: {_tokens(new_tokens)} prefilled"


# -- the details -----------------------------------------------------------------


def details_of(chooser: Chooser, comparison: Comparison, load_seconds: float) -> tuple[str, ...]:
    """Return why `comparison.best` was chosen. `load_seconds`: of loading everything."""
    request = chooser.request
    details = [
        *_why(chooser, comparison, load_seconds),
        _host_weights(chooser),
        request.residency_reason,
    ]
    return tuple(detail for detail in details if detail)


def _why(chooser: Chooser, comparison: Comparison, load_seconds: float) -> list[str]:
    request, best = chooser.request, comparison.best
    if not chooser.length:
        return [_split_of_nothing(request)]
    each_step = "" if request.cached_tokens else "in each step, "
    if request.forced_split_tokens is not None or request.forced_method is not None:
        seconds, loading = best.seconds, load_seconds
        if each_step:
            seconds, loading = best.step_seconds, comparison.load.step_seconds
        return [f"{each_step}{_wish(chooser, best)}{_against(best, seconds, loading)}"]
    if best.method is RestoreMethod.TOKENS:
        first, *more = _why_tokens(chooser, comparison, load_seconds)
    elif best.split:
        first, *more = _why_split(chooser, comparison, load_seconds)
    else:
        first, *more = _why_load(chooser, comparison)
    return [each_step + first, *more, _throughput(comparison, request.objective)]


# -- what the client asked for ---------------------------------------------------


def _split_of_nothing(request: PlanInput) -> str:
    if not request.forced_split_tokens:
        return ""
    return (
        f"split {request.forced_split_tokens:,} was asked for and capped at 0, since only "
        "cached tokens can be rebuilt"
    )


def _wish(chooser: Chooser, best: Candidate) -> str:
    wanted = chooser.request.forced_split_tokens
    if wanted is not None and best.split < wanted:
        return f"split {wanted:,} was asked for and capped at {best.split:,}, all that is cached: "
    if wanted is not None:
        return f"split {best.split:,} was asked for: "
    if best.method is RestoreMethod.TOKENS:
        return f"method tokens was asked for: {_recomputed(chooser, best)}"
    return "loading was asked for: "


def _against(best: Candidate, seconds: float, load_seconds: float) -> str:
    predicted = f"predicted {_time(seconds)}"
    if not best.split and not best.recomputed:
        return predicted  # it is loading everything
    return f"{predicted} against {_time(load_seconds)} for loading everything"


# -- recomputing from token ids --------------------------------------------------


def _why_tokens(chooser: Chooser, comparison: Comparison, load_seconds: float) -> list[str]:
    best = comparison.best
    if not chooser.shape.activations_can_pay:
        instead = f"sending activations could not pay (rho {chooser.shape.rho:.2f} >= 1)"
    elif comparison.split is None:
        instead = "the store holds no activations"
    else:
        instead = f"the best split with activations would take {_time(comparison.split.score)}"
    return [f"tokens: {_recomputed(chooser, best)}{_share(best, load_seconds)}", instead]


def _recomputed(chooser: Chooser, best: Candidate) -> str:
    """Return which tokens are recomputed, with a comma at the end."""
    rest = chooser.request.cached_tokens - best.recomputed
    if not rest:
        if best.recomputed == 1:
            return "the one cached token is recomputed from its id, "
        return f"all {best.recomputed:,} cached tokens are recomputed from their ids, "
    if not best.recomputed:
        return f"nothing is recomputed from token ids, {_tokens(rest)} loaded, "
    return (
        f"[0, {best.recomputed:,}) is recomputed from token ids while {_tokens(rest)} "
        "loaded from the back, "
    )


def _why_no_tokens(chooser: Chooser, tokens: Candidate, load: Candidate) -> str:
    request = chooser.request
    if tokens.recomputed:
        little = ": too little to gain" if tokens.score < load.score else ""
        which = "token from its id"
        if tokens.recomputed > 1:
            which = f"{tokens.recomputed:,} from their ids"
        return f"also recomputing the first {which} would take {_instead(tokens, load)}{little}"
    first = min(request.chunk_tokens, request.cached_tokens)
    if first == request.cached_tokens:
        return ""  # the headline says what that would take
    seconds = chooser.token_recompute.block_seconds(0, first)
    many = f"even {first:,} tokens from their ids" if first > 1 else "a token from its id"
    return (
        f"recomputing {many} keeps the device busy for {_time(seconds)}, loading everything the "
        f"link for {_time(load.link_seconds)}"
    )


def _not_considered(chooser: Chooser) -> str:
    """Return why a resident restore was not compared with recomputing, if it was not."""
    request = chooser.request
    if request.is_streamed or request.schedule is Schedule.PIPELINED:
        return ""
    why = f"schedule {request.schedule.value} cannot restore from both ends"
    if request.schedule is Schedule.SERIAL:
        why = "nothing overlaps with schedule serial"
    return f"recomputing from token ids was not considered: {why}"


# -- rebuilding from activations -------------------------------------------------


def _why_split(chooser: Chooser, comparison: Comparison, load_seconds: float) -> list[str]:
    best, length = comparison.best, chooser.length
    first = _at_first(chooser, best)
    if best.split == length:
        what = f"split {best.split:,}{first}: everything is rebuilt from arriving activations"
    elif best.schedule is Schedule.SERIAL:
        what = (
            f"split {best.split:,} of {length:,}{first}: the front is rebuilt, then the rest loaded"
        )
    else:
        what = (
            f"split {best.split:,} of {length:,}{first}: the front is rebuilt while the rest is "
            "loaded"
        )
    if chooser.request.is_streamed:
        return [
            f"{what}{_stays(chooser, best)}: a step takes {_time(best.step_seconds)}, "
            f"{_time(comparison.load.step_seconds)} without rebuilding",
            _limit(chooser, best),
        ]
    what = f"{what}, {_share(best, load_seconds)}"
    if best.schedule is Schedule.SERIAL:
        return [what, _not_considered(chooser)]
    return [what, _limit(chooser, best)]


def _share(best: Candidate, load_seconds: float) -> str:
    return (
        f"predicted {_time(best.seconds)}, {best.seconds / load_seconds:.2f} of the "
        f"{_time(load_seconds)} for loading everything"
    )


def _at_first(chooser: Chooser, best: Candidate) -> str:
    """Return the split of the cached tokens, where `best.split` is that of a later length."""
    request = chooser.request
    if not request.cached_tokens or chooser.length == request.cached_tokens:
        return ""
    return f" once the new tokens are stored (at first {best.now:,} of {request.cached_tokens:,})"


def _limit(chooser: Chooser, best: Candidate) -> str:
    """Return what keeps it from being faster."""
    link, device = best.link_seconds, best.compute_seconds
    if chooser.request.is_streamed:
        device += chooser.compute_seconds
        link = _step_link_seconds(chooser, best)
    words = f"link {_time(link)}, device {_time(device)}"
    if min(link, device) >= _BALANCED * max(link, device):
        return f"{words}, about equally busy"
    return f"{words}, {'the link' if link > device else 'compute'} is the limit"


def _step_link_seconds(chooser: Chooser, best: Candidate) -> float:
    """Return the link seconds of a streamed step with all weights that come from the host.

    `best.link_seconds` counts W_K and W_V only, and only where something is rebuilt.
    """
    ready = 0 if best.schedule is Schedule.ROW else best.resident
    counted_already = chooser.costs.kv_weights if best.split > ready else 0.0
    return best.link_seconds - counted_already + chooser.costs.weights


def _stays(chooser: Chooser, best: Candidate) -> str:
    """Return what of a streamed prefix is on the device all the time."""
    if not best.resident:
        return ""
    if best.schedule is Schedule.ROW:
        size = format_size(best.resident * chooser.shape.activation_bytes_per_token)
        return f" from X that stays on the device ({size}, less than its keys and values)"
    size = format_size(best.resident * chooser.shape.kv_bytes_per_token)
    return f", keys and values of the first {best.resident:,} stay on the device ({size})"


# -- loading ---------------------------------------------------------------------


def _why_load(chooser: Chooser, comparison: Comparison) -> list[str]:
    best = comparison.best
    if best.resident == chooser.length:
        return [f"split 0: nothing is loaded{_stays(chooser, best)}"]
    loaded, kind = chooser.length - best.resident, "other" if best.resident else "cached"
    which = f"all {loaded:,} {kind} tokens are" if loaded > 1 else f"the one {kind} token is"
    why = f"split 0: {which} loaded{_stays(chooser, best)}, {_why_no_split(chooser, comparison)}"
    if comparison.tokens is None:
        return [why, _not_considered(chooser)]
    return [why, _why_no_tokens(chooser, comparison.tokens, comparison.load)]


def _why_no_split(chooser: Chooser, comparison: Comparison) -> str:
    shape, costs, request = chooser.shape, chooser.costs, chooser.request
    load, split = comparison.load, comparison.split
    on_link = request.schedule is not Schedule.ROW
    if on_link and not shape.activations_can_pay:
        return (
            f"since an activation is {shape.rho:.2f} x the bytes of its keys and values "
            "(rho >= 1): sending it can never pay"
        )
    if split is None:
        return "since the store holds no activations"
    if split.split:
        return (
            f"since rebuilding {split.split:,} of them would take {_instead(split, load)}: "
            "too little to gain"
        )
    send = costs.activation if on_link else 0.0
    if request.schedule is Schedule.SERIAL and send + costs.rebuild >= costs.load:
        return (
            f"since loading a token takes {_us(costs.load)} a layer and rebuilding it "
            f"{_us(send + costs.rebuild)}"
        )
    if chooser.compute_seconds >= load.link_seconds:
        return (
            "since the device is busier than the link already: it computes for "
            f"{_time(chooser.compute_seconds)} without rebuilding, the link copies for "
            f"{_time(load.link_seconds)}"
        )
    if costs.rebuild > 8 * costs.load:
        return (
            f"since rebuilding a token takes {_us(costs.rebuild)} a layer, loading it "
            f"{_us(costs.load)}"
        )
    chunks = -(-chooser.length // request.chunk_tokens)
    few = f" ({counted(chunks, 'chunk')})" if request.chunk_tokens > 1 else ""
    which = "one token" if chooser.length == 1 else f"some of {chooser.length:,} tokens"
    return (
        f"since rebuilding {which}{few} would take longer: every copy and every product has an "
        "overhead"
    )


# -- parts -----------------------------------------------------------------------


def _host_weights(chooser: Chooser) -> str:
    """Return what weights on the host take, whatever is cached: often most of a step."""
    if not chooser.profile.host_weight_bytes:
        return ""
    size = format_size(chooser.profile.host_weight_bytes)
    return (
        f"weights that come from the host take {_time(chooser.costs.weights)} of each step "
        f"({size}; --device-memory)"
    )


def _throughput(comparison: Comparison, objective: Objective) -> str:
    if objective is Objective.LATENCY:
        return ""
    return (
        f"for throughput: the busier of link and device works for "
        f"{_time(comparison.best.score)}, with loading for {_time(comparison.load.score)}"
    )


def _instead(other: Candidate, load: Candidate) -> str:
    """Return both times and their difference, which their three digits may not show."""
    words = f"{_time(other.score)} instead of {_time(load.score)}"
    if not load.score:
        return words
    share = 1 - other.score / load.score
    return f"{words} ({abs(share):.2%} {'less' if share >= 0 else 'more'})"


def _tokens(count: int) -> str:
    return counted(count, "token is", "tokens are")


def _time(seconds: float) -> str:
    milliseconds = f"{seconds * 1e3:.3g}"
    # 999.9 ms would be rounded to three digits as 1e+03 ms.
    return f"{seconds:.3g} s" if float(milliseconds) >= 1000 else f"{milliseconds} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs"
