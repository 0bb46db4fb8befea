// The live view: differences of two readings of /splitpoint/status, once a second while it is seen.

import { getJson, hasKey } from "./api.js";
import { byId, byteRate, bytes, count, counted, duration, el, percent, rate, seconds, setText } from "./dom.js";

const PERIOD = 1000;
const HISTORY = 60;

let scheduler = null; // its reading before
const cards = new Map(); // worker id -> Card
let timer = null;
let isReading = false;
let isRefused = false; // until there is another key

export function startLive() {
  document.addEventListener("visibilitychange", soon);
  soon();
}

// Read at once, as when an answer has ended.
export function soon() {
  if (isRefused) return;
  clearTimeout(timer);
  timer = setTimeout(tick, 0);
}

export function useNewKey() {
  isRefused = false;
  soon();
}

async function tick() {
  if (document.hidden || isReading) return;
  isReading = true;
  try {
    if (byId("panel").checkVisibility()) show(await getJson("/splitpoint/status"));
  } catch (error) {
    refuse(error);
  } finally {
    isReading = false;
    clearTimeout(timer);
    if (!isRefused) timer = setTimeout(tick, PERIOD);
  }
}

function refuse(error) {
  const reason = {
    401: hasKey() ? "The live view needs another API key: this one is not known." : "The live view needs an API key.",
    403: "The live view needs a key with the role admin. This key may generate, and its answers show their plans.",
  }[error.status];
  isRefused = reason !== undefined;
  scheduler = null;
  byId("live-message").textContent = reason || error.message;
  byId("live-message").hidden = false;
  byId("live-body").hidden = true;
  byId("live-note").textContent = "";
}

function show(now) {
  byId("live-message").hidden = true;
  byId("live-body").hidden = false;
  setText(byId("live-note"), `up ${duration(now.scheduler.uptime_seconds)}`);
  schedulerFigures(now.scheduler, unlessRestarted(scheduler, now.scheduler));
  scheduler = now.scheduler;
  queue(now.queue);
  const seen = now.workers.map((worker) => {
    const name = worker.id || worker.address;
    if (!cards.has(name)) cards.set(name, new Card(name));
    cards.get(name).show(worker);
    return cards.get(name).view;
  });
  const list = byId("live-workers");
  if (seen.length !== list.children.length || seen.some((view, at) => view !== list.children[at])) {
    list.replaceChildren(...seen);
  }
}

// The earlier reading of a process; null after its start, when counters begin at zero again.
function unlessRestarted(earlier, later) {
  return earlier && later.uptime_seconds > earlier.uptime_seconds ? earlier : null;
}

// -- the scheduler ----------------------------------------------------------------------

function schedulerFigures(now, old) {
  const span = old ? now.uptime_seconds - old.uptime_seconds : 0;
  const generated = span > 0 ? Math.max(0, now.generated_token_count - old.generated_token_count) / span : 0;
  const ttft = old && now.ttft_count > old.ttft_count
    ? (now.ttft_seconds_sum - old.ttft_seconds_sum) / (now.ttft_count - old.ttft_count)
    : now.ttft_count ? now.ttft_seconds_sum / now.ttft_count : null;
  const cached = now.prompt_token_count ? now.cached_token_count / now.prompt_token_count : 0;
  const values = {
    running: count(now.running_count),
    waiting: count(now.waiting_count),
    answered: count(now.completed_count),
    generating: rate(generated),
    ttft: ttft === null ? "none yet" : seconds(ttft),
    cached: percent(cached),
  };
  for (const [name, value] of Object.entries(values)) setText(byId(`live-${name}`), value);
}

function queue(now) {
  const view = byId("live-queue");
  if (!now.waiting_count) return view.replaceChildren();
  const lines = now.requests.map((request) => el("li", {}, `${duration(request.waited_seconds)}: ${request.reason}`));
  const more = now.waiting_count - now.requests.length;
  if (more > 0) lines.push(el("li", {}, `and ${count(more)} more`));
  return view.replaceChildren(
    el("div", { class: "queue" }, el("h3", {}, `${counted(now.waiting_count, "request")} in the queue of ${count(now.capacity)}`), el("ul", {}, ...lines)),
  );
}

// -- a worker -----------------------------------------------------------------------------

const STATES = { ready: "good", draining: "wait", "not ready": "bad" };

// One worker's card. It is filled in place, so that what is selected or hovered stays so.
class Card {
  constructor(name) {
    this.before = null; // its telemetry before
    this.history = []; // one entry for each second, the newest last
    this.dot = el("span", { class: "dot", "aria-hidden": "true" });
    this.title = el("h3", {});
    this.state = el("span", { class: "muted" });
    this.device = el("p", { class: "device-name" });
    this.note = el("p", { class: "note" });
    this.meters = { link: new Meter("link", "link"), compute: new Meter("compute", "compute"), cache: new Meter("cache", "memory") };
    this.curve = new Curve(["compute", "link"]);
    this.detail = el("p", { class: "detail" });
    this.figures = el("div", {},
      ...Object.values(this.meters).map((meter) => meter.view),
      this.curve.view,
      el("p", { class: "curve-note" },
        el("span", {}, el("i", { class: "loaded" }), "link busy"),
        el("span", {}, el("i", { class: "rebuilt" }), "compute busy"),
        el("span", {}, "last minute")),
      this.detail);
    this.view = el("article", { class: "worker", "aria-label": `Worker ${name}` },
      el("div", { class: "worker-head" }, this.dot, this.title, this.state),
      this.device, this.note, this.figures);
  }

  show(worker) {
    this.dot.className = `dot ${STATES[worker.state]}`;
    setText(this.title, worker.id ? `Worker ${worker.id}` : worker.address);
    setText(this.state, worker.state === "ready" ? `${count(worker.running_count)} running` : worker.state);
    setText(this.device, worker.device);
    this.device.title = worker.device;
    setText(this.note, worker.message);
    this.note.hidden = !worker.message;
    this.figures.hidden = !worker.telemetry;
    if (worker.telemetry) this.follow(worker, worker.telemetry);
    else this.before = null;
  }

  follow(worker, now) {
    const old = unlessRestarted(this.before, now);
    // A worker tells its counters once a second: some readings bring nothing new.
    if (old || !this.before || now.uptime_seconds < this.before.uptime_seconds) this.before = now;
    if (old) this.remember(now, old);
    const last = this.history.at(-1) ?? { link: 0, compute: 0, bytes: 0, tokens: 0 };
    const memory = worker.cache_capacity_bytes ? Math.min(1, now.cache_used_bytes / worker.cache_capacity_bytes) : 0;
    const of = `of ${bytes(worker.cache_capacity_bytes)}`;
    this.meters.link.show(last.link, byteRate(last.bytes), `busy ${percent(last.link)}`);
    this.meters.compute.show(last.compute, `${rate(last.tokens)} tokens/s`, `busy ${percent(last.compute)}`);
    this.meters.cache.show(memory, `${bytes(now.cache_used_bytes)} ${of}`, `${percent(memory)} ${of} of device memory`);
    this.curve.show(this.history);
    setText(this.detail, linkText(worker));
  }

  remember(now, old) {
    const span = now.uptime_seconds - old.uptime_seconds;
    const grown = (name) => Math.max(0, now[name] - old[name]) / span;
    this.history.push({
      link: Math.min(1, grown("link_in_busy_seconds")),
      compute: Math.min(1, grown("compute_busy_seconds")),
      bytes: grown("link_in_bytes"),
      tokens: grown("generated_token_count"),
    });
    this.history = this.history.slice(-HISTORY);
  }
}

function linkText(worker) {
  const now = worker.telemetry;
  const restored = now.loaded_token_count + now.rebuilt_token_count + now.recomputed_token_count;
  const parts = [];
  if (worker.link) parts.push(`link ${worker.link.kind} ${byteRate(worker.link.bytes_per_second)}`);
  if (now.split_tokens !== null) parts.push(`latest split ${count(now.split_tokens)}`);
  if (restored) {
    const rebuilt = now.rebuilt_token_count + now.recomputed_token_count;
    parts.push(`${counted(restored, "token")} restored, ${percent(rebuilt / restored)} of them rebuilt`);
  } else parts.push("nothing restored yet");
  return parts.join(" · ");
}

class Meter {
  constructor(name, kind) {
    this.name = name;
    this.fill = el("span", { class: kind });
    this.track = el("div", { class: "track", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }, this.fill);
    this.value = el("span", { class: "value" });
    this.view = el("div", { class: "meter" }, el("span", { class: "name" }, name), this.track, this.value);
  }

  show(share, value, meaning) {
    this.fill.style.width = `${(100 * share).toFixed(1)}%`;
    this.track.title = meaning;
    this.track.setAttribute("aria-label", `${this.name} ${meaning}`);
    this.track.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    setText(this.value, value);
  }
}

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Shares over the last minute, one line for each name.
class Curve {
  constructor(names) {
    this.lines = new Map(names.map((name) => [name, svg("path", { class: `${name}-line` })]));
    this.view = svg("svg", { viewBox: `0 0 ${HISTORY - 1} 100`, preserveAspectRatio: "none", class: "curve", "aria-hidden": "true" });
    this.view.append(svg("path", { d: `M0 97H${HISTORY - 1}`, class: "base" }), ...this.lines.values());
  }

  show(history) {
    const first = HISTORY - history.length;
    for (const [name, line] of this.lines) {
      const points = history.map((point, at) => `${at ? "L" : "M"}${first + at} ${(97 - 94 * point[name]).toFixed(1)}`);
      line.setAttribute("d", points.join(""));
    }
  }
}
