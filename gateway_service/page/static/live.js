// The live view: differences of two readings of /splitpoint/status, once a second while it is seen.

import { getJson } from "./api.js";
import { byId, byteRate, bytes, count, counted, duration, el, percent, rate, seconds } from "./dom.js";

const PERIOD = 1000;
const HISTORY = 60;

let before = null;
const curves = new Map(); // worker id -> [{link, compute}]
let timer = null;
let isReading = false;

export function startLive() {
  document.addEventListener("visibilitychange", soon);
  soon();
}

// Read at once, as after a new key.
export function soon() {
  clearTimeout(timer);
  timer = setTimeout(tick, 0);
}

async function tick() {
  if (document.hidden || isReading) return;
  isReading = true;
  let pause = PERIOD;
  try {
    if (byId("panel").checkVisibility()) show(await getJson("/splitpoint/status"));
  } catch (error) {
    refuse(error);
    if (error.status === 401 || error.status === 403) pause = 15 * PERIOD;
  } finally {
    isReading = false;
    timer = setTimeout(tick, pause);
  }
}

function refuse(error) {
  before = null;
  const reason = {
    401: "The live view needs an API key.",
    403: "The live view needs a key with the role admin. This key may generate, and its answers show their plans.",
  }[error.status];
  byId("live-message").textContent = reason || error.message;
  byId("live-message").hidden = false;
  byId("live-body").hidden = true;
  byId("live-note").textContent = "";
}

function show(now) {
  byId("live-message").hidden = true;
  byId("live-body").hidden = false;
  byId("live-note").textContent = `up ${duration(now.scheduler.uptime_seconds)}`;
  schedulerFigures(now.scheduler, restarted(before?.scheduler, now.scheduler));
  queue(now.queue);
  const known = new Map((before?.workers ?? []).map((worker) => [worker.id, worker]));
  byId("live-workers").replaceChildren(...now.workers.map((worker) => workerCard(worker, known.get(worker.id))));
  before = keepOlder(before, now);
}

// The earlier reading of a process; null after its start, when counters begin at zero again.
function restarted(earlier, later) {
  return earlier && later.uptime_seconds > earlier.uptime_seconds ? earlier : null;
}

// A worker tells its counters once a second: one that has told nothing new keeps its old reading.
function keepOlder(earlier, now) {
  const known = new Map((earlier?.workers ?? []).map((worker) => [worker.id, worker]));
  const workers = now.workers.map((worker) => {
    const old = known.get(worker.id);
    const isSame = old?.telemetry && worker.telemetry?.uptime_seconds === old.telemetry.uptime_seconds;
    return isSame ? old : worker;
  });
  return { ...now, workers };
}

function figure(name, value, unit) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value, unit ? el("small", {}, ` ${unit}`) : null));
}

function schedulerFigures(now, old) {
  const span = old ? now.uptime_seconds - old.uptime_seconds : 0;
  const per = (name) => (span > 0 ? Math.max(0, now[name] - old[name]) / span : 0);
  const ttft = old && now.ttft_count > old.ttft_count
    ? (now.ttft_seconds_sum - old.ttft_seconds_sum) / (now.ttft_count - old.ttft_count)
    : now.ttft_count ? now.ttft_seconds_sum / now.ttft_count : null;
  const cached = now.prompt_token_count ? now.cached_token_count / now.prompt_token_count : 0;
  byId("live-scheduler").replaceChildren(
    figure("running", count(now.running_count)),
    figure("waiting", count(now.waiting_count)),
    figure("answered", count(now.completed_count)),
    figure("generating", rate(per("generated_token_count")), "tokens/s"),
    figure("first token", ttft === null ? "none yet" : seconds(ttft)),
    figure("cached", percent(cached), "of prompts"),
  );
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

const STATES = { ready: "good", draining: "wait", "not ready": "bad" };

function workerCard(worker, known) {
  const card = el(
    "article",
    { class: "worker", "aria-label": `Worker ${worker.id || worker.address}` },
    el("div", { class: "worker-head" },
      el("span", { class: `dot ${STATES[worker.state]}`, "aria-hidden": "true" }),
      el("h3", {}, worker.id ? `Worker ${worker.id}` : worker.address),
      el("span", { class: "muted" }, worker.state === "ready" ? `${count(worker.running_count)} running` : worker.state)),
    worker.device ? el("p", { class: "device-name", title: worker.device }, worker.device) : null,
    worker.message ? el("p", { class: "note" }, worker.message) : null,
  );
  if (worker.telemetry) telemetry(card, worker, restarted(known?.telemetry, worker.telemetry));
  return card;
}

function telemetry(card, worker, old) {
  const now = worker.telemetry;
  const span = old ? now.uptime_seconds - old.uptime_seconds : 0;
  const history = curves.get(worker.id) ?? [];
  if (span > 0) {
    const busy = (name) => Math.min(1, Math.max(0, now[name] - old[name]) / span);
    history.push({
      link: busy("link_in_busy_seconds"),
      compute: busy("compute_busy_seconds"),
      bytesPerSecond: Math.max(0, now.link_in_bytes - old.link_in_bytes) / span,
      tokens: Math.max(0, now.generated_token_count - old.generated_token_count) / span,
      restored: ["loaded", "rebuilt", "recomputed"].map((name) => Math.max(0, now[`${name}_token_count`] - old[`${name}_token_count`])),
    });
    curves.set(worker.id, history.slice(-HISTORY));
  }
  const last = history.at(-1) ?? { link: 0, compute: 0, bytesPerSecond: 0, tokens: 0 };
  const memory = worker.cache_capacity_bytes ? Math.min(1, now.cache_used_bytes / worker.cache_capacity_bytes) : 0;
  card.append(
    meter("link", "link", last.link, byteRate(last.bytesPerSecond), `busy ${percent(last.link)}`),
    meter("compute", "compute", last.compute, `${rate(last.tokens)} tokens/s`, `busy ${percent(last.compute)}`),
    meter("cache", "memory", memory, `${bytes(now.cache_used_bytes)} of ${bytes(worker.cache_capacity_bytes)}`, `${percent(memory)} of ${bytes(worker.cache_capacity_bytes)} of device memory`),
    curve(history),
    el("p", { class: "curve-note" },
      el("span", {}, el("i", { class: "loaded" }), "link busy"),
      el("span", {}, el("i", { class: "rebuilt" }), "compute busy"),
      el("span", {}, "last minute")),
    el("p", { class: "detail" }, linkText(worker)),
  );
}

function linkText(worker) {
  const now = worker.telemetry;
  const brought = now.loaded_token_count + now.rebuilt_token_count + now.recomputed_token_count;
  const parts = [];
  if (worker.link) parts.push(`link ${worker.link.kind} ${byteRate(worker.link.bytes_per_second)}`);
  if (now.split_tokens !== null) parts.push(`latest split ${count(now.split_tokens)}`);
  if (brought) {
    const rebuilt = now.rebuilt_token_count + now.recomputed_token_count;
    parts.push(`${counted(brought, "token")} restored, ${percent(rebuilt / brought)} of them rebuilt`);
  } else parts.push("nothing restored yet");
  return parts.join(" · ");
}

function meter(name, kind, share, value, title) {
  const fill = el("span", { class: kind });
  fill.style.width = `${(100 * share).toFixed(1)}%`;
  const track = el("div", { class: "track", role: "meter", "aria-label": `${name} ${title}`, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(100 * share)), title }, fill);
  return el("div", { class: "meter" }, el("span", { class: "name" }, name), track, el("span", { class: "value" }, value));
}

const SVG = "http://www.w3.org/2000/svg";

function curve(history) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "curve");
  svg.setAttribute("aria-hidden", "true");
  const shown = history.slice(-HISTORY);
  const line = (name, of) => {
    const path = document.createElementNS(SVG, "path");
    const first = HISTORY - shown.length;
    path.setAttribute("d", shown.map((point, at) => `${at ? "L" : "M"}${first + at} ${(97 - 94 * of(point)).toFixed(1)}`).join(""));
    path.setAttribute("class", name);
    svg.append(path);
  };
  const base = document.createElementNS(SVG, "path");
  base.setAttribute("d", `M0 97H${HISTORY - 1}`);
  base.setAttribute("class", "base");
  svg.append(base);
  line("compute-line", (point) => point.compute);
  line("link-line", (point) => point.link);
  return svg;
}
