"""The workload and the results of `bench decode`, as JSON and as a table; needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from splitpoint.shapes import WeightFormat
from splitpoint_cli.bench.harness import (
    Column,
    agreeing_share,
    contender_table,
    json_report,
    text_of,
)
from splitpoint_cli.bench.peers import TRANSFORMERS

OURS = "splitpoint"
OURS_INT8 = "splitpoint int8 weights"
LIMIT = "memory limit"
# A setting of a peer that is slower by this factor is timed once.
SLOWEST_KEPT = 1.25


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of each contender: `batch` prompts of `prompt` tokens, `new` tokens each.

    Attributes:
        shape: a built-in shape with random weights, or the name of `model`.
        peers: what runs beside our engine.
        text: the file that prompts are taken from; empty: prompts are random.
        model: the checkpoint folder whose weights are used; empty: weights are random.
        speculate: draft methods; each is a contender beside plain decoding.
        speculative_tokens: the most drafts of a step; None: the engine's choice.
        temperature: of sampling, by the seed; 0: greedy.
        draft_model: the draft model's folder for the method "model"; empty if there is none.
        weights: the format of a further contender's weights; native: there is none.
    """

    shape: str
    dtype: str
    batch: int
    prompt: int
    new: int
    repeats: int
    device: str
    threads: int
    seed: int
    peers: tuple[str, ...] = (TRANSFORMERS,)
    text: str = ""
    model: str = ""
    speculate: tuple[str, ...] = ()
    speculative_tokens: int | None = None
    draft_model: str = ""
    temperature: float = 0.0
    weights: str = WeightFormat.NATIVE.value


@dataclass(frozen=True, slots=True)
class Run:
    """One run: times in seconds, and the tokens of each sequence.

    `first_token_seconds` is when the last sequence had its first token;
    `tokens_before` counts all tokens there were by then. `drafted` and `accepted` count
    guessed tokens.
    """

    seconds: float
    first_token_seconds: float
    tokens_before: int
    tokens: tuple[tuple[int, ...], ...]
    drafted: int = 0
    accepted: int = 0

    @property
    def token_count(self) -> int:
        return sum(len(each) for each in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.token_count / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        return (self.token_count - self.tokens_before) / (self.seconds - self.first_token_seconds)

    @property
    def rates(self) -> tuple[float, float, float]:
        """Tokens a second in all and in decode, and first tokens a second: more is better."""
        return self.tokens_per_second, self.decode_tokens_per_second, 1 / self.first_token_seconds


@dataclass(frozen=True, slots=True)
class Parts:
    """Median seconds of the parts of a decode step of ours.

    Attributes:
        products: what computes rows of the layers and the head, norms and rotation included.
        attention: over the cache, and writing into it.
        rest: all else that the engine does.
    """

    products: float
    attention: float
    rest: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a benchmark measured.

    Attributes:
        runs: by contender.
        peer_of: the peer that each contender but ours belongs to.
        read_bytes_per_second: the fastest read of memory in the run.
        step_bytes: bytes that a decode step of all sequences must read, at their mean length.
        cache_bytes: of them those of K and V.
        parts: of a plain step of ours; None: not measured.
        versions: of the peers' packages.
        spin_count: how long OpenMP's threads of our process spin, not the peers'; empty: as
            long as GNU OpenMP's default says.
        perplexities: of the text, by our contender; empty without text or int8 weights.
    """

    runs: Mapping[str, Sequence[Run]]
    peer_of: Mapping[str, str]
    read_bytes_per_second: float
    step_bytes: int
    versions: Mapping[str, str] = field(default_factory=dict)
    spin_count: str = ""
    perplexities: Mapping[str, float] = field(default_factory=dict)
    cache_bytes: int = 0
    parts: Parts | None = None

    @property
    def limit_seconds(self) -> float:
        """The shortest time of a decode step."""
        return self.step_bytes / self.read_bytes_per_second


def too_slow(runs: Mapping[str, Sequence[Run]], peer_of: Mapping[str, str]) -> set[str]:
    """Return the settings that cannot be their peer's fastest, by one run of each contender.

    A setting stays if it is within SLOWEST_KEPT of the peer's best in any figure.
    """
    slow = set(peer_of)
    for peer in set(peer_of.values()):
        names = [name for name in peer_of if peer_of[name] == peer]
        rates = {name: runs[name][0].rates for name in names}
        best = [max(column) for column in zip(*rates.values(), strict=True)]
        slow -= {
            name
            for name in names
            if any(
                rate * SLOWEST_KEPT >= most for rate, most in zip(rates[name], best, strict=True)
            )
        }
    return slow


def report_of(workload: Workload, measured: Measured) -> dict[str, Any]:
    """Return the JSON object: what was measured, on what, and how it compares."""
    contenders = {
        name: _facts(workload.batch, each, measured.limit_seconds)
        for name, each in measured.runs.items()
    }
    peers = [name for name in contenders if name in measured.peer_of]
    facts = {
        "versions": dict(measured.versions),
        "spin_count": measured.spin_count,
        "contenders": contenders,
        "ratios": {
            peer: _compared(
                contenders,
                [name for name in peers if measured.peer_of[name] == peer],
                measured.runs,
            )
            for peer in dict.fromkeys(measured.peer_of.values())
        },
        "memory_limit": {
            "read_bytes_per_second": round(measured.read_bytes_per_second),
            "step_bytes": measured.step_bytes,
            "step_seconds": round(measured.limit_seconds, 5),
        },
        "parts": None if measured.parts is None else _parts(measured.parts, measured),
        "speculation": {
            name.removeprefix(f"{OURS} "): _speculation(contenders, name, measured.runs)
            for name in contenders
            if name not in (OURS, OURS_INT8, *measured.peer_of)
        },
        "int8_weights": _int8(contenders, measured) if OURS_INT8 in contenders else None,
    }
    return json_report("decode", asdict(workload), facts)


def _parts(parts: Parts, measured: Measured) -> dict[str, dict[str, float | int]]:
    """Return seconds, bytes and the limit of each part of a step."""
    read = {
        "products": measured.step_bytes - measured.cache_bytes,
        "attention": measured.cache_bytes,
        "rest": 0,
    }
    return {
        name: {
            "seconds": round(getattr(parts, name), 6),
            "bytes": size,
            "limit_seconds": round(size / measured.read_bytes_per_second, 6),
        }
        for name, size in read.items()
    }


def _facts(batch: int, runs: Sequence[Run], limit_seconds: float) -> dict[str, Any]:
    """Return the medians of a contender's runs."""
    decode = _median(run.decode_tokens_per_second for run in runs)
    step_seconds = batch / decode
    return {
        "tokens_per_second": _median(run.tokens_per_second for run in runs),
        "decode_tokens_per_second": decode,
        "first_token_seconds": _median(run.first_token_seconds for run in runs),
        # For each token of all sequences; with drafts, a step may give several.
        "step_seconds": round(step_seconds, 5),
        "step_over_limit": round(step_seconds / limit_seconds, 3),
        "seconds": [round(run.seconds, 3) for run in runs],
    }


def _compared(
    contenders: Mapping[str, Mapping[str, Any]],
    peers: Sequence[str],
    runs: Mapping[str, Sequence[Run]],
) -> dict[str, Any]:
    """Return our figures over a peer's best setting: above 1 is better, except first tokens."""
    fastest = _best(contenders, peers, "tokens_per_second")
    mine, theirs = runs[OURS][0].tokens, runs[fastest][0].tokens
    first = min(float(contenders[name]["first_token_seconds"]) for name in peers)
    return {
        "fastest_peer": fastest,
        "ratio": _ratio(contenders, peers, "tokens_per_second"),
        "decode_ratio": _ratio(contenders, peers, "decode_tokens_per_second"),
        "first_token_ratio": round(float(contenders[OURS]["first_token_seconds"]) / first, 3),
        "agreeing_token_share": round(agreeing_share(mine, theirs), 4),
        "tokens_agree": mine == theirs,
    }


def _speculation(
    contenders: Mapping[str, Mapping[str, Any]], name: str, runs: Mapping[str, Sequence[Run]]
) -> dict[str, Any]:
    """Return what a draft method gained over plain decoding."""
    drafted = sum(run.drafted for run in runs[name])
    accepted = sum(run.accepted for run in runs[name])

    def over_plain(key: str) -> float:
        return round(float(contenders[name][key]) / float(contenders[OURS][key]), 3)

    return {
        "ratio": over_plain("tokens_per_second"),
        "decode_ratio": over_plain("decode_tokens_per_second"),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 3) if drafted else None,
        "tokens_agree": runs[name][0].tokens == runs[OURS][0].tokens,
    }


def _int8(contenders: Mapping[str, Mapping[str, Any]], measured: Measured) -> dict[str, Any]:
    """Return what int8 weights gain over native ones, and what they cost."""

    def over_native(key: str) -> float:
        return round(float(contenders[OURS_INT8][key]) / float(contenders[OURS][key]), 3)

    native, approximate = (measured.runs[name][0].tokens for name in (OURS, OURS_INT8))
    perplexities = measured.perplexities
    return {
        "step_ratio": over_native("step_seconds"),
        "first_token_ratio": over_native("first_token_seconds"),
        "agreeing_token_share": round(agreeing_share(approximate, native), 4),
        "native_perplexity": round(perplexities[OURS], 4) if perplexities else None,
        "int8_perplexity": round(perplexities[OURS_INT8], 4) if perplexities else None,
    }


def table_of(report: Mapping[str, Any]) -> Table:
    what = f"the text of {report['text']}" if report["text"] else "random prompts"
    limit = report["memory_limit"]
    bound = {
        "decode_tokens_per_second": report["batch"] / limit["step_seconds"],
        "step_seconds": limit["step_seconds"],
        "step_over_limit": 1.0,
    }
    read = (
        f"a step reads {limit['step_bytes'] / 1e6:.0f} MB, "
        f"memory {limit['read_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    return contender_table(
        f"{report['shape']} {report['dtype']}: {report['batch']} sequences, {what}, prompt "
        f"{report['prompt']}, {report['new']} new, {report['device']}, {report['threads']} threads,"
        f" {report['hardware']}",
        "contender",
        (
            Column("tokens/s", _figure("tokens_per_second", "{:.1f}")),
            Column("in decode", _figure("decode_tokens_per_second", "{:.1f}")),
            Column("TTFT", _figure("first_token_seconds", "{:.2f} s")),
            Column("step", lambda each: f"{1e3 * each['step_seconds']:.1f} ms"),
            Column("x limit", _figure("step_over_limit", "{:.2f}")),
        ),
        {**report["contenders"], LIMIT: bound},
        [
            read,
            *_part_lines(report),
            *_peer_lines(report),
            *_speculation_lines(report),
            *_int8_lines(report),
        ],
    )


def _part_lines(report: Mapping[str, Any]) -> list[str]:
    if report["parts"] is None:
        return []
    parts = report["parts"]
    listed = [
        f"{name} {1e3 * facts['seconds']:.1f} ms for {facts['bytes'] / 1e6:.0f} MB "
        f"(limit {1e3 * facts['limit_seconds']:.1f})"
        for name, facts in parts.items()
        if facts["bytes"]
    ]
    listed.append(f"rest {1e3 * parts['rest']['seconds']:.1f} ms")
    return ["our step, in a run of its own: " + ", ".join(listed)]


def _figure(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda facts: text_of(facts.get(key), form.format)


def _int8_lines(report: Mapping[str, Any]) -> list[str]:
    facts = report["int8_weights"]
    if facts is None:
        return []
    line = (
        f"int8 weights: a step takes {facts['step_ratio']:.2f} x that of native ones, first tokens "
        f"{facts['first_token_ratio']:.2f} x; equal tokens: "
        f"{100 * facts['agreeing_token_share']:.1f} %"
    )
    if facts["native_perplexity"] is None:
        return [line]
    native, approximate = facts["native_perplexity"], facts["int8_perplexity"]
    return [line, f"perplexity of the prompts: {approximate:.4f}, native {native:.4f}"]


def _peer_lines(report: Mapping[str, Any]) -> list[str]:
    return [
        f"{facts['ratio']:.2f} x {facts['fastest_peer']} in all, "
        f"{facts['decode_ratio']:.2f} x the fastest {peer} in decode, first tokens after "
        f"{facts['first_token_ratio']:.2f} x its time; equal tokens: "
        f"{100 * facts['agreeing_token_share']:.1f} %"
        for peer, facts in report["ratios"].items()
    ]


def _speculation_lines(report: Mapping[str, Any]) -> list[str]:
    return [
        f"{method}: {facts['decode_ratio']:.2f} x plain decode, "
        f"{_accepted(facts)}; "
        f"{'the same text' if facts['tokens_agree'] else 'ANOTHER TEXT'}"
        for method, facts in report["speculation"].items()
    ]


def _accepted(facts: Mapping[str, Any]) -> str:
    if not facts["drafted"]:
        return "nothing was drafted, so the ratio is noise"
    return f"{facts['accepted']} of {facts['drafted']} drafted tokens accepted"


def _ratio(contenders: Mapping[str, Mapping[str, Any]], among: Sequence[str], key: str) -> float:
    peer = contenders[_best(contenders, among, key)]
    return round(float(contenders[OURS][key]) / float(peer[key]), 3)


def _best(contenders: Mapping[str, Mapping[str, Any]], among: Sequence[str], key: str) -> str:
    return max(among, key=lambda name: float(contenders[name][key]))


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)
