"""The words of a plan: why this way, in one sentence with its numbers.

Decides nothing: reads what `choices` compared.
"""

from __future__ import annotations

from splitpoint.config import format_size
from splitpoint.planning.choices import Choice, Choices, Chooser
from splitpoint.planning.plan import Objective, PlanInput, Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.words import counted

# Link and device count as equally busy within this.
_BALANCED = 0.9


def reason_of(chooser: Chooser, choices: Choices, load_seconds: float) -> str:
    """Why `choices.best`. `load_seconds`: what loading everything takes."""
    return _why(chooser, choices, load_seconds) + _weight_words(chooser)


def _why(chooser: Chooser, choices: Choices, load_seconds: float) -> str:
    request, best = chooser.request, choices.best
    cold = f"nothing is cached: {_tokens(request.new_tokens)} prefilled"
    if not chooser.length:
        return f"{cold}{_split_of_nothing(request)}"
    if request.forced_split_tokens is not None or request.forced_method is not None:
        wish = _wish(chooser, best)
        if request.cached_tokens:
            return f"{wish}{_against(best, best.seconds, load_seconds)}"
        step = _against(best, best.step_seconds, choices.load.step_seconds)
        return f"{cold}; in a step {wish}{step}"
    if best.method is RestoreMethod.TOKENS:
        words = _why_tokens(chooser, choices, load_seconds)
    elif best.split:
        words = _why_split(chooser, choices, load_seconds)
    else:
        words = _why_load(chooser, choices)
    if not request.cached_tokens:
        words = f"{cold}; in a step {words}"
    return words + _objective_words(choices, request.objective)


def _split_of_nothing(request: PlanInput) -> str:
    """What becomes of a split that was asked for where nothing is cached."""
    if not request.forced_split_tokens:
        return ""
    return (
        f"; split {request.forced_split_tokens:,} was asked for and capped at 0, since only "
        "cached tokens can be rebuilt"
    )


def _wish(chooser: Chooser, best: Choice) -> str:
    """What the client asked for."""
    request = chooser.request
    if request.forced_split_tokens is not None:
        if best.split < request.forced_split_tokens:
            return (
                f"split {request.forced_split_tokens:,} was asked for and capped at "
                f"{best.split:,}, all that is cached: "
            )
        return f"split {best.split:,} was asked for: "
    if best.method is RestoreMethod.TOKENS:
        return f"method tokens was asked for: {_what(chooser, best)}"
    return "loading was asked for: "


def _against(best: Choice, seconds: float, load_seconds: float) -> str:
    predicted = f"predicted {_time(seconds)}"
    if not best.split and not best.recomputed:
        return predicted  # it is loading everything
    return f"{predicted} against {_time(load_seconds)} for loading everything"


def _what(chooser: Chooser, best: Choice) -> str:
    """Of token ids: which of them, with a comma at the end."""
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


def _why_tokens(chooser: Chooser, choices: Choices, load_seconds: float) -> str:
    best = choices.best
    against = (
        f"{_time(best.seconds)} against {_time(load_seconds)} for loading everything "
        f"(x {best.seconds / load_seconds:.2f})"
    )
    what = _what(chooser, best)
    if not chooser.shape.activations_can_pay:
        instead = f"sending activations could not pay (rho {chooser.shape.rho:.2f} >= 1)"
    elif choices.split is None:
        instead = "the store holds no activations"
    else:
        instead = f"the best split with activations would take {_time(choices.split.score)}"
    return f"tokens: {what}predicted {against}; {instead}"


def _why_split(chooser: Chooser, choices: Choices, load_seconds: float) -> str:
    best, length = choices.best, chooser.length
    if best.split == length:
        what = (
            f"split {best.split:,}{_at_first(chooser, best)}: everything is rebuilt from "
            "activations as they come"
        )
    else:
        meanwhile = "" if best.schedule is Schedule.SERIAL else " meanwhile"
        what = (
            f"split {best.split:,} of {length:,}{_at_first(chooser, best)}: the front is "
            f"rebuilt, the rest{meanwhile} loaded"
        )
    if chooser.request.residency is Residency.STREAMED:
        return (
            f"{what}{_stays(chooser, best)}: a step takes {_time(best.step_seconds)}, "
            f"{_time(choices.load.step_seconds)} without rebuilding: {_limit(chooser, best)}"
        )
    against = (
        f"{_time(best.seconds)} against {_time(load_seconds)} for loading everything "
        f"(x {best.seconds / load_seconds:.2f})"
    )
    if best.schedule is Schedule.SERIAL:
        return f"{what}, one after the other, predicted {against}{_not_considered(chooser)}"
    return f"{what}, predicted {against}: {_limit(chooser, best)}"


def _at_first(chooser: Chooser, best: Choice) -> str:
    """A streamed prefix grows: what the plan's split is, where the reason tells a later one."""
    request = chooser.request
    if not request.cached_tokens or chooser.length == request.cached_tokens:
        return ""
    return f" once the new tokens are stored (at first {best.now:,} of {request.cached_tokens:,})"


def _limit(chooser: Chooser, best: Choice) -> str:
    """What keeps it from being faster."""
    link, device = best.link_seconds, best.compute_seconds
    if chooser.request.residency is Residency.STREAMED:
        device += chooser.compute_seconds
        link = _step_link_seconds(chooser, best)
    words = f"link {_time(link)}, device {_time(device)}"
    if min(link, device) >= _BALANCED * max(link, device):
        return f"{words}, about equally busy"
    return f"{words}, {'the link' if link > device else 'compute'} is the limit"


def _step_link_seconds(chooser: Chooser, choice: Choice) -> float:
    """Of a streamed step: what is pulled, and all weights that come from the host.

    `choice.link_seconds` counts W_K and W_V alone, and only where something is rebuilt.
    """
    held = 0 if choice.schedule is Schedule.ROW else choice.resident
    counted = chooser.costs.kv_weights if choice.split > held else 0.0
    return choice.link_seconds - counted + chooser.costs.weights


def _weight_words(chooser: Chooser) -> str:
    """What weights on the host take, whatever is cached: usually most of a step."""
    if not chooser.profile.host_weight_bytes:
        return ""
    size = format_size(chooser.profile.host_weight_bytes)
    return (
        f"; of a step {_time(chooser.costs.weights)} are weights that come from the host "
        f"({size}; --device-memory)"
    )


def _stays(chooser: Chooser, best: Choice) -> str:
    """What of a streamed prefix is on the device all the time."""
    if not best.resident:
        return ""
    if best.schedule is Schedule.ROW:
        size = format_size(best.resident * chooser.shape.activation_bytes_per_token)
        return f" from X that stays on the device ({size}, less than its keys and values)"
    size = format_size(best.resident * chooser.shape.kv_bytes_per_token)
    return f", keys and values of the first {best.resident:,} stay on the device ({size})"


def _why_load(chooser: Chooser, choices: Choices) -> str:
    best = choices.best
    if best.resident == chooser.length:
        return f"split 0: nothing is pulled{_stays(chooser, best)}"
    pulled, kind = chooser.length - best.resident, "other" if best.resident else "cached"
    which = f"all {pulled:,} {kind} tokens are" if pulled > 1 else f"the one {kind} token is"
    words = f"split 0: {which} loaded{_stays(chooser, best)}, {_why_no_split(chooser, choices)}"
    if choices.tokens is None:
        return words + _not_considered(chooser)
    return f"{words}; {_why_no_tokens(chooser, choices.tokens, choices.load)}"


def _why_no_split(chooser: Chooser, choices: Choices) -> str:
    shape, costs, request = chooser.shape, chooser.costs, chooser.request
    on_link = request.schedule is not Schedule.ROW
    if on_link and not shape.activations_can_pay:
        return (
            f"since an activation is {shape.rho:.2f} x the bytes of its keys and values "
            "(rho >= 1): sending it can never pay"
        )
    if choices.split is None:
        return "since the store holds no activations"
    if choices.split.split:
        return (
            f"since rebuilding {choices.split.split:,} of them would take "
            f"{_instead(choices.split, choices.load)}: too little to gain"
        )
    send = costs.activation if on_link else 0.0
    if request.schedule is Schedule.SERIAL and send + costs.rebuild >= costs.load:
        return (
            f"since loading a token takes {_us(costs.load)} a layer and rebuilding it "
            f"{_us(send + costs.rebuild)}"
        )
    if chooser.compute_seconds >= choices.load.link_seconds:
        return (
            f"since compute is the limit: the link takes {_time(choices.load.link_seconds)}, the "
            f"device has {_time(chooser.compute_seconds)} to do without rebuilding"
        )
    if costs.rebuild > 8 * costs.load:
        return (
            f"since compute is the limit: rebuilding a token takes {_us(costs.rebuild)} a layer, "
            f"loading it {_us(costs.load)}"
        )
    chunks = -(-chooser.length // request.chunk_tokens)
    few = f" ({counted(chunks, 'chunk')})" if request.chunk_tokens > 1 else ""
    if chooser.length == 1:
        return f"since one token{few} is too little to pay for a second operation"
    return f"since {chooser.length:,} tokens{few} are too few to pay for a second operation"


def _why_no_tokens(chooser: Chooser, tokens: Choice, load: Choice) -> str:
    request = chooser.request
    if tokens.recomputed:
        little = ": too little to gain" if tokens.score < load.score else ""
        which = "token from its id"
        if tokens.recomputed > 1:
            which = f"{tokens.recomputed:,} from their ids"
        return (
            f"recomputing the first {which} meanwhile would take {_instead(tokens, load)}{little}"
        )
    first = min(request.chunk_tokens, request.cached_tokens)
    seconds = chooser.profile.prefill_seconds(chooser.shape.prefill_flops(first))
    many = f"even {first:,} tokens from their ids" if first > 1 else "a token from its id"
    return f"recomputing {many} takes {_time(seconds)}, loading everything {_time(load.seconds)}"


def _not_considered(chooser: Chooser) -> str:
    """A restore's way that was left out because of the schedule."""
    request = chooser.request
    if request.residency is Residency.STREAMED or request.schedule is Schedule.PIPELINED:
        return ""
    why = f"schedule {request.schedule.value} has no restore from both ends"
    if request.schedule is Schedule.SERIAL:
        why = "nothing overlaps with schedule serial"
    return f"; recomputing from token ids was not considered: {why}"


def _objective_words(choices: Choices, objective: Objective) -> str:
    if objective is Objective.LATENCY:
        return ""
    best, load = choices.best, choices.load
    return (
        f"; for throughput: the busier of link and device has {_time(best.score)} to do, "
        f"{_time(load.score)} with loading"
    )


def _instead(other: Choice, load: Choice) -> str:
    """Both times, and by how much they differ, which their three digits may not show."""
    words = f"{_time(other.score)} instead of {_time(load.score)}"
    if not load.score:
        return words
    share = 1 - other.score / load.score
    return f"{words} ({abs(share):.2%} {'less' if share >= 0 else 'more'})"


def _tokens(count: int) -> str:
    return counted(count, "token is", "tokens are")


def _time(seconds: float) -> str:
    milliseconds = f"{seconds * 1e3:.3g}"
    # Three digits of 999.9 ms are those of a second.
    return f"{seconds:.3g} s" if float(milliseconds) >= 1000 else f"{milliseconds} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs"
