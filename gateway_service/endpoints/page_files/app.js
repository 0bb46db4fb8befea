// The page: requests, their answers as they come, and what surrounds them.

import { ApiError, getJson, hasKey, setKey, stream } from "./api.js";
import { byId, counted, el, percent, setText } from "./dom.js";
import { soon, startLive, useNewKey } from "./live.js";
import { ENDINGS, planView } from "./plan.js";

const turns = byId("turns");
const prompt = byId("prompt");
const welcome = byId("welcome");

let messages = []; // of the chat, as sent next
let running = null; // AbortController of the request that runs
let models = [];
let modelsTimer = null;
let hasAskedForKey = false;
const keyText = byId("key-text").textContent;

// -- models and the state of the stack --------------------------------------------------

async function loadModels() {
  clearTimeout(modelsTimer);
  let pause = 5000;
  try {
    showModels((await getJson("/v1/models")).data);
    showKey("API key set");
  } catch (error) {
    if (!models.length) setText(byId("model").firstElementChild, "no model");
    if (error.status === 401) {
      showKey("Unknown key");
      setState("wait", hasKey() ? "the key is not known" : "needs an API key");
      if (!hasAskedForKey) askKey(refusedKey());
      hasAskedForKey = true;
      return; // until there is another key
    }
    setState("bad", { 403: "this key may not ask", 503: "no worker is ready" }[error.status] ?? "not reachable");
    pause = 2000;
  }
  modelsTimer = setTimeout(loadModels, pause);
}

function showModels(found) {
  const select = byId("model");
  const names = found.map((model) => model.id);
  if (names.join("\n") !== models.map((model) => model.id).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
    select.disabled = names.length < 2;
  }
  models = found;
  const ready = found.reduce((sum, model) => sum + model.ready_worker_count, 0);
  setState(ready ? "good" : "bad", ready ? `${counted(ready, "worker")} ready` : "no worker is ready");
  showModes();
}

const model = () => models.find((each) => each.id === byId("model").value);

function setState(kind, text) {
  byId("state").firstElementChild.className = `dot ${kind}`;
  setText(byId("state-text"), text);
}

// -- chat or prompt ---------------------------------------------------------------------

const mode = () => document.querySelector("input[name=mode]:checked").value;

function showModes() {
  const chat = document.querySelector("input[name=mode][value=chat]");
  const served = model();
  chat.disabled = served !== undefined && !served.has_chat_template;
  chat.parentElement.title = chat.disabled ? "This model has no chat template." : "";
  if (chat.disabled) document.querySelector("input[name=mode][value=prompt]").checked = true;
  const isChat = mode() === "chat";
  byId("composer").classList.toggle("prompt", !isChat);
  const name = isChat ? "Message" : "Text to continue";
  prompt.placeholder = name;
  byId("prompt-label").textContent = name;
  byId("system").closest("label").hidden = !isChat;
}

// -- settings ---------------------------------------------------------------------------

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

function settings() {
  const body = {};
  for (const name of NUMBERS) {
    const field = byId(name);
    if (field.value !== "" && field.checkValidity()) body[name] = field.valueAsNumber;
  }
  if (byId("stop").value) body.stop = [byId("stop").value];
  return body;
}

function requestOf(kind, text) {
  const shared = {
    model: byId("model").value,
    ...settings(),
    stream: true,
    stream_options: { include_usage: true, include_plan: true },
  };
  const withTokens = byId("show_tokens").checked;
  if (kind === "prompt") {
    return { path: "/v1/completions", body: { ...shared, prompt: text, ...(withTokens && { logprobs: 0 }) } };
  }
  const system = byId("system").value.trim();
  const said = [...messages, { role: "user", content: text }];
  return {
    path: "/v1/chat/completions",
    body: {
      ...shared,
      messages: system ? [{ role: "system", content: system }, ...said] : said,
      ...(withTokens && { logprobs: true }),
    },
  };
}

// -- one request ------------------------------------------------------------------------

async function ask(text, kind = mode()) {
  const { path, body } = requestOf(kind, text);
  const answer = el(kind === "chat" ? "div" : "span", { class: "answer" });
  const view = el("article", { class: `turn ${kind} running` }, ...(kind === "chat"
    ? [el("div", { class: "said" }, text), answer]
    : [el("div", { class: "document" }, el("span", { class: "said" }, text), answer)]));
  welcome.remove();
  turns.append(view);
  turns.scrollTop = turns.scrollHeight;
  running = new AbortController();
  showRunning();
  const ended = { text: "", finish: "", report: null, error: null };
  try {
    for await (const message of stream(path, body, running.signal)) take(message, answer, ended);
  } catch (error) {
    ended.error = error;
  }
  view.classList.remove("running");
  running = null;
  showRunning();
  finish(view, kind, text, ended);
}

function take(message, answer, ended) {
  const choice = message.choices?.[0];
  if (message.splitpoint) ended.report = message.splitpoint;
  if (!choice) return;
  const piece = choice.text ?? choice.delta?.content ?? "";
  if (choice.finish_reason) ended.finish = choice.finish_reason;
  if (!piece) return;
  ended.text += piece;
  const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
  if (byId("show_tokens").checked) answer.append(tokenView(piece, choice.logprobs));
  else if (answer.lastChild instanceof Text) answer.lastChild.appendData(piece);
  else answer.append(piece);
  if (isAtEnd) turns.scrollTop = turns.scrollHeight;
}

// A piece is what one event brought: a token, or several that came together.
function tokenView(piece, logprobs) {
  const chosen = logprobs?.token_logprobs ?? logprobs?.content?.map((entry) => entry.logprob) ?? [];
  const view = el("span", { class: "token" }, piece);
  if (chosen.length) {
    const likelihood = Math.exp(Math.min(...chosen));
    view.style.setProperty("--p", likelihood.toFixed(3));
    view.title = `probability ${likelihood.toFixed(3)}`;
  }
  return view;
}

function finish(view, kind, text, ended) {
  const wasStopped = ended.error?.name === "AbortError";
  if (ended.error && !wasStopped) {
    problem(view, kind, text, ended);
  } else {
    if (kind === "chat") messages.push({ role: "user", content: text }, { role: "assistant", content: ended.text });
    if (ended.report) view.append(planView(ended.report, ended.finish));
    else view.append(el("p", { class: "muted" }, wasStopped ? "Stopped. The worker is free again; a plan comes with a whole answer." : "Done."));
    if (kind === "prompt" && ended.text) {
      view.append(el("p", {}, el("button", { type: "button", class: "link", onclick: () => goOn(text + ended.text) }, "Go on from here")));
    }
  }
  byId("announcer").textContent = spoken(ended, wasStopped);
  // What was added below the text must be seen, too.
  if (turns.scrollHeight - turns.scrollTop - turns.clientHeight < 400) turns.scrollTop = turns.scrollHeight;
  soon();
}

function problem(view, kind, text, ended) {
  const isRefused = ended.error.status === 401;
  const again = () => {
    if (running) return;
    view.remove();
    void ask(text, kind);
  };
  view.append(
    el("p", { class: "problem", role: "alert" }, isRefused ? refusedKey() : ended.error.message,
      el("button", { type: "button", class: "link", onclick: again }, "Try again")),
  );
  if (!(ended.error instanceof ApiError)) console.error(ended.error);
  if (isRefused) askKey(refusedKey());
}

function spoken({ report, finish, error }, wasStopped) {
  if (wasStopped) return "Stopped.";
  if (error) return `Failed: ${error.message}`;
  if (!report) return "The answer is complete.";
  const share = report.prompt_tokens ? report.cached_tokens / report.prompt_tokens : 0;
  return `${counted(report.completion_tokens, "token")}, ${ENDINGS[finish] || finish}; ${percent(share)} of the prompt was cached.`;
}

function goOn(text) {
  if (!running) void ask(text, "prompt");
}

function stop() {
  running?.abort();
}

// -- the composer -----------------------------------------------------------------------

function showRunning() {
  const button = byId("send-button");
  button.textContent = running ? "Stop" : "Send";
  button.classList.toggle("stop", running !== null);
  byId("clear-button").disabled = running !== null;
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

async function submit(event) {
  event?.preventDefault();
  if (running) return stop();
  if (!models.length) await loadModels(); // sent before the page knows what is served
  // A prompt's own spaces and line breaks count, those around a message do not.
  const text = mode() === "chat" ? prompt.value.trim() : prompt.value;
  if (!text || !byId("settings-form").checkValidity()) {
    if (text) {
      byId("settings").open = true;
      byId("settings-form").reportValidity();
    }
    return undefined;
  }
  prompt.value = "";
  fit();
  return ask(text);
}

function clear() {
  messages = [];
  turns.replaceChildren(welcome);
  byId("announcer").textContent = "Cleared.";
  prompt.focus();
}

// -- key, theme, panel ------------------------------------------------------------------

const refusedKey = () => hasKey() ? "The gateway does not know this API key." : "The gateway needs an API key.";

function showKey(state) {
  setText(byId("key-button"), hasKey() ? state : "API key");
}

function askKey(reason = "") {
  byId("key-text").textContent = `${reason} ${keyText}`.trim();
  byId("key").value = "";
  byId("key-dialog").returnValue = ""; // that of the last time, if Escape closes it
  byId("key-dialog").showModal();
}

function takeKey() {
  if (byId("key-dialog").returnValue !== "use") return;
  setKey(byId("key").value);
  byId("key").value = "";
  showKey("API key set");
  void loadModels();
  useNewKey();
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
}

function switchPanel() {
  const isOpen = document.body.classList.toggle("panel-open");
  byId("panel-button").setAttribute("aria-expanded", String(isOpen));
  byId("panel-button").textContent = isOpen ? "Close" : "More";
  soon();
}

function onKey(event) {
  if (event.key === "Escape" && running && !byId("key-dialog").open) {
    event.preventDefault();
    stop();
  } else if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.target.closest("input, textarea, select, dialog")) {
    event.preventDefault();
    prompt.focus();
  }
}

byId("composer").addEventListener("submit", submit);
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  // Enter also ends the composition of a character in some input methods.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) void submit();
  }
});
byId("mode").addEventListener("change", showModes);
byId("model").addEventListener("change", showModes);
byId("clear-button").addEventListener("click", clear);
byId("key-button").addEventListener("click", () => askKey());
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-dialog").addEventListener("close", takeKey);
byId("theme-button").addEventListener("click", switchTheme);
byId("panel-button").addEventListener("click", switchPanel);
document.addEventListener("keydown", onKey);

showModes();
void loadModels();
startLive();
prompt.focus();
