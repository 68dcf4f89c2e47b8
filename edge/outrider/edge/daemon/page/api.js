// The daemon's HTTP API as this page uses it.

import { ApiError } from "./errors.js";
import { DRAFT, OWN, UNKNOWN } from "./origins.js";
import { events } from "./sse.js";

export async function models(apiKey) {
  const response = await fetch("v1/models", { headers: headers(apiKey) });
  if (!response.ok) throw await ApiError.of(response);
  return (await response.json()).data.map((model) => model.id);
}

// { state: "ok" | "degraded" | "unavailable", reason, drafter }
export async function health(apiKey) {
  try {
    const response = await fetch("health", { cache: "no-store", headers: headers(apiKey) });
    const body = await response.json();
    const reason = body.reason ?? body.error?.message ?? "";
    return { state: response.ok ? body.status : "unavailable", reason, drafter: body.drafter ?? "" };
  } catch {
    return { state: "unavailable", reason: "the daemon does not answer", drafter: "" };
  }
}

// What the daemon knows of each version of its drafters; null: it does not say.
export async function versions(apiKey) {
  try {
    const response = await fetch("drafters", { cache: "no-store", headers: headers(apiKey) });
    return response.ok ? (await response.json()).versions : null;
  } catch {
    return null;
  }
}

// One answer as it streams: { text, pieces, speculation, finish } for each chunk.
// `turns` are {role, content} of the whole conversation; `form` is "chat" or "text".
export async function* answer(form, turns, settings, signal) {
  const content = form === "chat" ? { messages: settings.withSystem(turns) } : { prompt: asText(turns) };
  const response = await fetch(form === "chat" ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { ...headers(settings.apiKey), "Content-Type": "application/json" },
    body: JSON.stringify({
      ...settings.sampling,
      ...content,
      stream: true,
      stream_options: { include_usage: true, include_speculation: true },
    }),
    signal,
  });
  if (!response.ok) throw await ApiError.of(response);
  for await (const event of events(response)) {
    if (event.done) return;
    if (event.json.error) throw ApiError.ofEvent(event.json.error);
    yield chunkOf(event.json);
  }
  throw new ApiError(502, "the answer broke off before its end");
}

function chunkOf(json) {
  const choice = json.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  const speculation = json.speculation ?? null;
  return { text, pieces: piecesOf(text, speculation), speculation, finish: choice?.finish_reason ?? null };
}

// The text in pieces with their origin; text that the daemon says nothing about is one piece of unknown origin.
function piecesOf(text, speculation) {
  const pieces = speculation?.pieces ?? [];
  if (pieces.map((piece) => piece.text).join("") === text) {
    return pieces.map((piece) => ({ text: piece.text, origin: piece.accepted ? DRAFT : OWN }));
  }
  return [{ text, origin: UNKNOWN }];
}

// A model without a chat template continues text: answers follow what they answered, questions begin a line.
function asText(turns) {
  return turns.map(({ role, content }, i) => (role === "user" && i > 0 ? `\n${content}` : content)).join("");
}

function headers(apiKey) {
  return apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
}
