// The plan of an answer, drawn: which tokens of the prompt came from where, and why.

import { bytes, count, counted, el, percent, rate, seconds } from "./dom.js";

const METHODS = {
  none: "nothing was cached",
  load: "loaded",
  split: "split",
  recompute: "rebuilt from layer inputs",
  tokens: "rebuilt from token ids while the rest was loaded",
};

const KINDS = [
  ["device", "on the device"],
  ["rebuilt", "rebuilt"],
  ["loaded", "loaded"],
  ["new", "new"],
];

// [kind, tokens] from the first token to the last one, and the split point (null: none).
export function segments(report) {
  const { plan, prompt_tokens: prompt } = report;
  const cached = Math.min(report.cached_tokens, prompt);
  const isStreamed = plan !== null && plan.residency === "streamed";
  const onDevice = plan === null ? 0 : Math.min(cached, isStreamed ? plan.resident_tokens : plan.device_tokens);
  const split = plan === null ? 0 : Math.min(cached, splitOf(plan, cached));
  const rebuilt = Math.max(0, split - onDevice);
  return {
    parts: [
      ["device", onDevice],
      ["rebuilt", rebuilt],
      ["loaded", cached - onDevice - rebuilt],
      ["new", prompt - cached],
    ].filter(([, tokens]) => tokens > 0),
    split: rebuilt > 0 ? split : null,
  };
}

const isRestored = (report) => segments(report).parts.some(([kind]) => kind === "rebuilt" || kind === "loaded");

function splitOf(plan, cached) {
  if (plan.method === "recompute") return cached;
  return plan.method === "tokens" ? plan.recomputed_tokens : plan.split_tokens;
}

export function planView(report, finish) {
  const { plan } = report;
  return el(
    "section",
    { class: "plan", "aria-label": "Plan of this answer" },
    strip(report),
    parts(report),
    el("ul", { class: "facts" }, ...facts(report, finish)),
    plan ? el("p", { class: "reason" }, plan.reason) : null,
    details(report),
  );
}

function strip(report) {
  const { parts, split } = segments(report);
  const total = report.prompt_tokens;
  const names = Object.fromEntries(KINDS);
  const label = parts.map(([kind, tokens]) => `${counted(tokens, "token")} ${names[kind]}`).join(", ");
  const row = el("div", { class: "segments", role: "img", "aria-label": `Prompt of ${counted(total, "token")}: ${label}` });
  for (const [kind, tokens] of parts) {
    const segment = el("span", { class: kind, title: `${counted(tokens, "token")} ${names[kind]}` });
    segment.style.flex = `${tokens} 0 0`;
    row.append(segment);
  }
  const view = el("div", { class: "strip" }, row);
  if (split !== null && split < report.cached_tokens) {
    const mark = el("span", { class: "split-mark", title: `split point: token ${count(split)}` });
    mark.style.left = `${(100 * split) / total}%`;
    view.append(mark);
  }
  return view;
}

// Says in words what the strip says in colours.
function parts(report) {
  const names = Object.fromEntries(KINDS);
  const items = segments(report).parts.map(([kind, tokens]) =>
    el("li", {}, el("span", { class: `swatch ${kind}` }), el("b", {}, count(tokens)), ` ${names[kind]}`));
  return el("ul", { class: "parts", "aria-label": "Tokens of the prompt" }, ...items);
}

function facts(report, finish) {
  const { plan } = report;
  const share = report.prompt_tokens ? report.cached_tokens / report.prompt_tokens : 0;
  const decoding = report.total_seconds - report.ttft_seconds;
  const { split } = segments(report);
  const list = [
    fact("", percent(share), ` of ${counted(report.prompt_tokens, "prompt token")} cached`),
    plan && isRestored(report) ? fact("split at ", count(split ?? 0)) : null,
    fact("first token after ", seconds(report.ttft_seconds)),
    report.completion_tokens > 1 && decoding > 0
      ? fact("", rate((report.completion_tokens - 1) / decoding), " tokens/s")
      : null,
    fact("", count(report.completion_tokens), ` ${report.completion_tokens === 1 ? "token" : "tokens"}, ${ENDINGS[finish] || finish}`),
  ];
  return list.filter((item) => item !== null);
}

export const ENDINGS = {
  stop: "ended by itself",
  length: "cut at max tokens",
  tool_calls: "calls a tool",
};

const fact = (before, value, after = "") => el("li", {}, before, el("b", {}, value), after);

function details(report) {
  const { plan } = report;
  const rows = [
    ["worker", report.worker || "none"],
    ["request", report.request_id],
    ["seed", report.seed],
    ["waited in the queue", seconds(report.queue_seconds)],
    ["total", seconds(report.total_seconds)],
  ];
  if (plan) {
    rows.push(["residency", plan.residency]);
    if (report.cached_tokens) {
      rows.push(
        ["restore", `${METHODS[plan.method]}, ${plan.schedule}`],
        ["restored in", beside(report.restore_seconds, plan.predicted_restore_seconds)],
        ["loading all would take", seconds(plan.predicted_load_seconds)],
      );
    }
    if (plan.predicted_recompute_seconds) {
      rows.push(["recomputing would take", seconds(plan.predicted_recompute_seconds)]);
    }
    rows.push(
      ["first token", beside(report.ttft_seconds - report.queue_seconds, plan.predicted_ttft_seconds)],
      ["device memory", bytes(plan.footprint_bytes)],
    );
    if (report.step_seconds !== null) rows.push(["step", beside(report.step_seconds, plan.predicted_step_seconds)]);
    if (report.drafted_tokens) {
      rows.push(["drafts accepted", `${count(report.accepted_tokens)} of ${counted(report.drafted_tokens, "token")}`]);
    }
    if (plan.fetched_tokens) rows.push([`fetched from ${plan.fetch_source || "another store"}`, counted(plan.fetched_tokens, "token")]);
  }
  const list = el("dl", { class: "table" });
  for (const [name, value] of rows) list.append(el("dt", {}, name), el("dd", {}, value));
  const why = el("ul", { class: "reason-details", "aria-label": "What led to the plan" });
  for (const clause of plan ? plan.reason_details : []) why.append(el("li", {}, clause));
  return el("details", {}, el("summary", {}, "All figures"), list, plan ? why : null);
}

const beside = (measured, predicted) => `${seconds(Math.max(0, measured))} (${seconds(predicted)} predicted)`;
