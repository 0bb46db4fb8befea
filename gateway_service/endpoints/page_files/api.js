// Calls of the gateway. The API key is kept here, in memory, and nowhere else.

let key = "";

export const hasKey = () => key !== "";

export function setKey(text) {
  key = text.trim();
}

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(more = {}) {
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`;
  let code = null;
  try {
    const { error } = await response.json();
    message = error.message || message;
    code = error.code;
  } catch {
    // Not of the gateway: a proxy's own page, for example.
  }
  return new ApiError(response.status, message, code);
}

async function send(path, options) {
  try {
    return await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The gateway does not answer. It may be starting again; the page goes on trying.");
  }
}

export async function getJson(path) {
  const response = await send(path, { headers: headers() });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

// Yields the JSON object of each server-sent event, until [DONE].
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const message = JSON.parse(data);
    if (message.error) throw new ApiError(500, message.error.message, message.error.code);
    yield message;
  }
  throw new ApiError(0, "The connection to the gateway broke before the answer ended.");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        return; // the caller says that the end is missing
      }
      if (piece.done) return;
      rest += piece.value.replaceAll("\r", "");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const lines = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
        rest = rest.slice(end + 2);
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
