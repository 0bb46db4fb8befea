"""Draw the readings of `splitpoint top` as text for a terminal of any width."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from splitpoint.client.answers import Queue, Telemetry, Worker
from splitpoint.config import format_rate, format_size
from splitpoint.v1.kvstore_pb2 import TierStats
from splitpoint_cli.output import duration_text, plain_reason, seconds_text
from splitpoint_cli.request.findings import findings_of
from splitpoint_cli.request.observed import Gateway, Status, Store
from splitpoint_cli.request.status import COLOURS
from splitpoint_cli.request.tiers import tier_title
from splitpoint_cli.top.bars import (
    FANCY,
    NOTHING,
    PLAIN,
    Glyphs,
    amount,
    bar,
    cell,
    flow,
    percent,
    stacked_bar,
)
from splitpoint_cli.top.rates import (
    Readings,
    TierRates,
    link_limit,
    rates_of,
    rates_of_gateway,
    rates_of_store,
    rates_of_tier,
    scheduler_rates,
)

_BAR = 12
_QUEUE_LINES = 5
_FINDINGS = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture. `away`: for how many seconds the scheduler is away, and why; None if it answers.

    `hint`: how to leave; empty in a snapshot. `fills_screen`: cut the lines at the terminal's
    height, and count the others.
    """

    address: str
    readings: Readings | None
    away: tuple[float, str] | None = None
    hint: str = ""
    fills_screen: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        encoding = options.encoding.lower()
        glyphs = FANCY if encoding in ("utf-8", "utf8") and not options.ascii_only else PLAIN
        lines = self.lines(options.max_width, glyphs)
        yield from _as_high(lines, options.size.height) if self.fills_screen else lines

    def lines(self, width: int, glyphs: Glyphs) -> list[Text]:
        """Return the lines, each at most `width` columns wide."""
        lines = self._head(width, glyphs)
        if self.readings is not None:
            lines += _scheduler(self.readings, width)
            lines += _findings(self.readings.latest.status, width)
            for worker in self.readings.latest.status.workers:
                lines += ["", *_worker(self.readings, worker, width, glyphs)]
            for store in self.readings.latest.status.stores:
                lines += ["", *_store(self.readings, store, width, glyphs)]
            for gateway in self.readings.latest.status.gateways:
                lines += ["", *_gateway(self.readings, gateway, width)]
            lines += ["", *_queue(self.readings.latest.status.queue, width)]
        return [line if isinstance(line, Text) else Text(line) for line in lines]

    def _head(self, width: int, glyphs: Glyphs) -> list[Text | str]:
        names = "" if self.readings is None else _names(self.readings)
        title = Text.assemble(
            ("splitpoint top", "bold"),
            f"  {_short(self.address)}{names}  ",
            (self.hint, "dim"),  # at the top: a low terminal shows no more than that
        )
        title.rstrip()
        title.truncate(width, overflow="ellipsis")
        lines: list[Text | str] = [title]
        if self.away is not None:
            seconds, why = self.away
            frozen = "" if self.readings is None else "; as last seen:"
            since = duration_text(seconds)
            text = f"the scheduler is away for {since} ({why}), trying again{frozen}"
            lines += [Text(part, style="bold red") for part in _wrapped(text, width)]
        return lines


def _as_high(lines: list[Text], height: int) -> list[Text]:
    """Return the lines that fit; if some do not, the last one says so."""
    left_out = len(lines) - height
    if left_out <= 0 or height < 2:
        return lines[: max(height, 0)]
    told = f"{left_out + 1} more lines: a larger terminal, or splitpoint top --once"
    return [*lines[: height - 1], Text(told, style="dim", no_wrap=True, overflow="ellipsis")]


def _names(readings: Readings) -> str:
    status = readings.latest.status
    models = ", ".join(model.name for model in status.models) or "no model yet"
    return f"  {models}  up {duration_text(readings.latest.status.scheduler.uptime_seconds)}"


def _scheduler(readings: Readings, width: int) -> list[Text | str]:
    now, rates = readings.latest.status.scheduler, scheduler_rates(readings.scheduler)
    finished = amount(now.completed_count)
    others = [(now.failed_count, "failed"), (now.cancelled_count, "cancelled")]
    if parts := [f"{count:,} {outcome}" for count, outcome in others if count]:
        finished += f" ({', '.join(parts)})"
    cells = [
        cell("running", str(now.running_count), 12),
        cell("waiting", str(now.waiting_count), 12),
        cell("finished", finished, 14),
        cell("rejected", amount(now.rejected_count), 12),
        cell("tokens/s", amount(rates.generated_per_second), 14),
        cell("prompt tokens/s", amount(rates.prompt_per_second), 21),
        cell("TTFT", _mean(rates.ttft_seconds), 12),
        cell("ITL", _mean(rates.itl_seconds), 12),
        cell("cached", percent(rates.cached_share), 11),
    ]
    if now.waiting_count:
        cells.append(cell("oldest waits", seconds_text(now.oldest_wait_seconds), 18))
    if now.resumed_count:
        cells.append(cell("resumed", amount(now.resumed_count), 12))
    if now.failover_count:
        cells.append(cell("placed again", amount(now.failover_count), 14))
    if now.redis is not None:
        state = Text("up", style="green") if now.redis.is_up else Text("away", style="bold red")
        cells.append(cell("Redis", state, 10))
    return [*flow(cells, width)]


def _findings(status: Status, width: int) -> list[Text | str]:
    """Return the findings, the worst first; `splitpoint status` also says what to do."""
    found = findings_of(status)
    lines: list[Text | str] = []
    for finding in found[:_FINDINGS]:
        why = f": {finding.why}" if finding.why else ""
        told = Text(f"{finding.severity.value}: {finding.what}{why}")
        told.stylize(COLOURS[finding.severity])
        lines += _wrapped_text(told, width)
    if len(found) > _FINDINGS:
        lines.append(Text(f"and {len(found) - _FINDINGS} more", style="dim"))
    if found:
        lines.append(Text("splitpoint status says what to do", style="dim"))
    return lines


def _mean(seconds: float | None) -> str:
    return NOTHING if seconds is None else seconds_text(seconds)


def _worker(readings: Readings, worker: Worker, width: int, glyphs: Glyphs) -> list[Text | str]:
    rates = rates_of(readings, worker.id)
    told = worker.telemetry
    state, style = _state(worker)
    head = Text.assemble(
        ("worker ", "dim"), (worker.id, "bold"), "  ", (state, style), f"  {worker.device}"
    )
    if worker.message:
        head.append(f"  {plain_reason(worker.message)}", style=style)
    if worker.loss_count:
        head.append(f"  lost {worker.loss_count}×", style="yellow")
    lines: list[Text | str] = [*_wrapped_text(head, width)]
    if told is None:
        lines.append(Text("  no telemetry yet", style="dim"))
        return lines
    limit, kind = link_limit(worker)
    split = NOTHING if told.split_tokens is None else f"{told.split_tokens:,}"
    ways = ", ".join(
        f"{percent(share)} {way}"
        for way, share in (
            ("loaded", rates.loaded_share),
            ("rebuilt", rates.rebuilt_share),
            ("recomputed", rates.recomputed_share),
        )
    )
    cells = [
        cell("running", str(worker.running_count), 11),
        cell("steps/s", amount(rates.steps_per_second), 13),
        cell("tokens/s", amount(rates.generated_per_second), 14),
        cell("prefill/s", amount(rates.prefilled_per_second), 15),
        cell("tokens/step", amount(rates.tokens_per_step), 17),
        cell("link in", _rate_bar(rates.link_in, limit, kind, glyphs), 52),
        cell("link out", _rate_text(rates.link_out), 19),
        cell(
            "busy",
            f"link {percent(rates.link_in_share)}, compute {percent(rates.compute_share)}",
            29,
        ),
        cell("cached tokens", NOTHING if rates.loaded_share is None else ways, 53),
        cell("split", split, 11),
        cell("measured/predicted", amount(rates.measured_over_predicted), 23),
        cell("cached/new", _kappa(worker), 37),
        cell(
            "cache",
            _of_bar(
                told.cache_used_bytes,
                worker.cache_capacity_bytes,
                f"{format_size(told.cache_used_bytes)} of "
                f"{format_size(worker.cache_capacity_bytes)}",
                "cyan",
                glyphs,
            ),
            40,
        ),
        cell("power", _power(worker, told, rates.host_cpu_watts, glyphs), 30),
    ]
    if worker.speculation is not None and worker.speculation.methods:
        cells.append(cell("drafts accepted", percent(rates.accepted_share), 20))
    if told.selection_step_count:
        cells.append(cell("selections read", percent(rates.read_share), 20))
    lines += [Text("  ").append_text(line) for line in flow(cells, width - 2)]
    return lines


def _state(worker: Worker) -> tuple[str, str]:
    if worker.draining:
        return "draining", "yellow"
    return ("ready", "green") if worker.ready else ("not ready", "bold red")


def _rate_bar(rate: float | None, limit: float | None, kind: str, glyphs: Glyphs) -> Text:
    """Draw the link's rate against its ceiling, emulated rate, or measured rate."""
    share = None if rate is None or not limit else rate / limit
    text = bar(share, _BAR, glyphs, "magenta")
    text.append(f" {_rate_text(rate)}")
    if limit:
        text.append(f" of {format_rate(limit)} ({kind})")
    return text


def _rate_text(rate: float | None) -> str:
    return NOTHING if rate is None else format_rate(rate)


def _of_bar(used: float, capacity: float, words: str, style: str, glyphs: Glyphs) -> Text:
    share = used / capacity if capacity else None
    return bar(share, _BAR, glyphs, style).append(f" {words}")


def _kappa(worker: Worker) -> str:
    """Return the ratio of its latest requests beside the one above which the link is the limit."""
    if worker.kappa_crit is None:
        return NOTHING
    return f"{amount(worker.recent_kappa_ratio)} (link-bound above {amount(worker.kappa_crit)})"


def _power(worker: Worker, told: Telemetry, host_cpu_watts: float | None, glyphs: Glyphs) -> Text:
    if told.power_watts is not None:
        limit = told.power_limit_watts
        if limit:
            words = f"{told.power_watts:.0f} of {limit:.0f} W"
            if worker.advised_power_watts is not None:
                words += f", {worker.advised_power_watts:.0f} W would do"
            return _of_bar(told.power_watts, limit, words, "yellow", glyphs)
        return Text(f"{told.power_watts:.0f} W (no limit told)")
    if host_cpu_watts is not None:
        return Text(f"{host_cpu_watts:.0f} W (all CPUs of the host)")
    return Text(f"no reading: {told.device_message or 'no RAPL, no GPU'}", style="dim")


def _store(readings: Readings, store: Store, width: int, glyphs: Glyphs) -> list[Text | str]:
    head = Text.assemble(("store ", "dim"), (_short(store.address), "bold"))
    stats = store.stats
    if stats is None:
        head.append(f"  {plain_reason(store.message)}", style="bold red")
        return [*_wrapped_text(head, width)]
    rates = rates_of_store(readings, store)
    # A leased slot is a sealed one.
    counts = [
        (stats.leased_slot_count, "cyan", "leased"),
        (stats.sealed_slot_count - stats.leased_slot_count, "green", "sealed"),
        (stats.writing_slot_count, "yellow", "writing"),
        (stats.quarantined_slot_count, "red", "quarantined"),
        (stats.free_slot_count, "dim", "free"),
    ]
    head.append(f"  {format_size(stats.arena_size_bytes)}  {stats.slot_count:,} slots")
    slots = stacked_bar([(count, style) for count, style, _ in counts], width - 2, glyphs)
    legend = [
        Text.assemble((glyphs.parts[place], style), f" {name} {count:,}")
        for place, (count, style, name) in enumerate(counts)
    ]
    cells = [
        cell("hits", percent(rates.hit_share), 10),
        cell("stored/s", amount(rates.sealed_per_second), 14),
        cell("evicted/s", amount(rates.evicted_per_second), 15),
        cell("leases", f"{stats.lease_count:,}", 12),
        cell("refused", f"{stats.refused_reservation_count:,}", 12),
    ]
    lines = [slots, *flow(legend, width - 2), *flow(cells, width - 2)]
    for tier in stats.tiers:
        lines += flow(_tier(tier, rates_of_tier(readings, store, tier.tier), glyphs), width - 2)
    return [*_wrapped_text(head, width), *(Text("  ").append_text(line) for line in lines)]


def _tier(tier: TierStats, rates: TierRates, glyphs: Glyphs) -> list[Text]:
    """Return the cells of one tier behind the arena."""
    title = tier_title(tier)
    if tier.capacity_bytes:
        words = f"{format_size(tier.used_bytes)} of {format_size(tier.capacity_bytes)}"
        cells = [
            cell(title, _of_bar(tier.used_bytes, tier.capacity_bytes, words, "cyan", glyphs), 40)
        ]
    else:
        state = Text("up", style="green") if tier.is_up else Text("away", style="bold red")
        cells = [cell(title, state, 20)]
    if tier.capacity_bytes and not tier.is_up:
        cells.append(cell("state", Text("away", style="bold red"), 10))
    cells += [
        cell("loaded", _rate_text(rates.read), 18),
        cell("written", _rate_text(rates.written), 19),
        # What has no bound of its own, a pool, does not count its chunks.
        cell("chunks", f"{tier.chunk_count:,}" if tier.capacity_bytes else NOTHING, 14),
        cell("dropped", f"{tier.dropped_chunk_count:,}", 12),
    ]
    return cells


def _gateway(readings: Readings, gateway: Gateway, width: int) -> list[Text | str]:
    state, style = ("ready", "green") if gateway.is_serving else ("not ready", "bold red")
    if not gateway.is_up:
        state = "no answer"
    head = Text.assemble(("gateway ", "dim"), (gateway.url, "bold"), "  ", (state, style))
    if gateway.message:
        head.append(f"  {plain_reason(gateway.message)}", style="" if gateway.is_serving else style)
    lines: list[Text | str] = [*_wrapped_text(head, width)]
    counts = gateway.counts
    if counts is None:
        return lines
    rates = rates_of_gateway(readings, gateway)
    cells = [
        cell("open", f"{counts.open_count:,}", 10),
        cell("streams", f"{counts.stream_count:,}", 12),
        cell("connections", f"{counts.connection_count:,}", 17),
        cell("requests/s", amount(rates.requests_per_second), 16),
        cell("failed/s", amount(rates.failed_per_second), 14),
        cell("answered", amount(counts.request_count), 14),
        cell("refused", amount(counts.refused_count), 13),
        cell("left", amount(counts.left_count), 10),
        cell("failed", amount(counts.failed_count), 12),
    ]
    return [*lines, *(Text("  ").append_text(line) for line in flow(cells, width - 2))]


def _short(address: str) -> str:
    """Return the address without the long folder that all sockets of a stack share."""
    if not address.startswith("unix:"):
        return address
    folder, _, name = address.removeprefix("unix:").rpartition("/")
    return f"{folder.rpartition('/')[2]}/{name}"


def _queue(queue: Queue, width: int) -> list[Text | str]:
    waiting = len(queue.requests)
    lines: list[Text | str] = [
        Text.assemble(("queue ", "dim"), f"{waiting:,} waiting, at most {queue.capacity:,} may")
    ]
    for request in queue.requests[:_QUEUE_LINES]:
        waited = duration_text(request.waited_seconds)
        line = Text(
            f"  {request.position + 1}. request {request.request_id} waiting for {waited}, "
            f"needs {format_size(request.footprint_bytes)}: {request.reason}"
        )
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if waiting > _QUEUE_LINES:
        lines.append(Text(f"  and {waiting - _QUEUE_LINES:,} more", style="dim"))
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return [line.plain for line in _wrapped_text(Text(text), width)]


def _wrapped_text(text: Text, width: int) -> list[Text]:
    return list(text.wrap(Console(width=width), width))
