// The page: its parts put together, and its input.

import { answer, health, models, versions } from "./api.js";
import { Conversation } from "./conversation.js";
import { ApiError, inWords } from "./errors.js";
import { Panels, summary } from "./panels.js";
import { Settings } from "./settings.js";
import { Versions } from "./versions.js";

const HEALTH_EVERY_MS = 3000;
const HEALTH_WORDS = { ok: "ready", degraded: "degraded", unavailable: "unavailable" };

const find = (id) => document.getElementById(id);
const settings = new Settings(find);
const conversation = new Conversation(find("log"));
const panels = new Panels(find);
const ofDrafters = new Versions(find);
let running = null; // AbortController of the answer that streams
let modelsKnown = false;

// --- one answer ---

async function send() {
  const question = find("prompt").value.trim();
  if (!question || running) return;
  if (settings.complaint) return conversation.note("error", settings.complaint);
  find("welcome").hidden = true;
  find("prompt").value = "";
  conversation.ask(question);
  running = new AbortController();
  showRunning(true);
  try {
    await converse(running.signal);
  } finally {
    running = null;
    showRunning(false);
    find("prompt").focus();
  }
}

async function converse(signal) {
  const shown = conversation.answer(settings.model);
  const latest = { speculation: null }; // kept where the answer breaks off, too
  let failure = null;
  const beganAt = performance.now();
  panels.begin();
  try {
    await stream(shown, latest, signal);
  } catch (error) {
    if (!signal.aborted) failure = error;
  }
  if (failure instanceof ApiError && failure.asksForTemplate && settings.form === "chat" && !shown.text) {
    shown.remove();
    settings.form = "text";
    conversation.note("hint", "This model has no chat template, so it continues your text instead of answering it.");
    return converse(signal);
  }
  if (shown.text) conversation.keep(shown.text);
  else shown.remove();
  const foot = summary(latest.speculation, (performance.now() - beganAt) / 1000);
  shown.end(signal.aborted ? `stopped · ${foot}` : foot);
  find("announcement").textContent = signal.aborted ? "Stopped." : failure ? "" : `Answer complete: ${foot}`;
  if (failure) conversation.note("error", inWords(failure));
  if (!shown.text) giveBack();
}

async function stream(shown, latest, signal) {
  const turns = [...conversation.turns];
  for await (const chunk of answer(settings.form, turns, settings.sampling, settings.apiKey, signal)) {
    shown.append(chunk.pieces);
    if (chunk.speculation === null) continue;
    latest.speculation = chunk.speculation;
    panels.show(chunk.speculation);
  }
}

// A question without an answer goes back to where it can be sent again.
function giveBack() {
  const question = conversation.takeBack();
  if (!find("prompt").value) find("prompt").value = question;
}

function showRunning(yes) {
  find("send").hidden = yes;
  find("stop").hidden = !yes;
  find("clear").disabled = yes;
}

function stop() {
  running?.abort();
}

// --- the daemon's health and models ---

async function lookAtHealth() {
  if (document.hidden) return;
  const { state, reason } = await health();
  find("health").dataset.state = state;
  const text = reason && state !== "ok" ? `${HEALTH_WORDS[state]}: ${reason}` : HEALTH_WORDS[state];
  if (find("health-text").textContent !== text) find("health-text").textContent = text; // screen readers say a change, not each look
  if (state !== "unavailable" && !modelsKnown) await offerModels();
  const known = state === "unavailable" ? null : await versions(settings.apiKey);
  if (known) ofDrafters.show(known);
}

async function watchHealth() {
  await lookAtHealth();
  setTimeout(watchHealth, HEALTH_EVERY_MS);
}

async function offerModels() {
  try {
    settings.offer(await models(settings.apiKey));
    modelsKnown = true;
  } catch (error) {
    if (error instanceof ApiError && error.status !== 401) conversation.note("error", inWords(error));
  }
}

// --- input ---

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
document.addEventListener("visibilitychange", lookAtHealth); // news may have come meanwhile
find("stop").addEventListener("click", stop);
find("api-key").addEventListener("change", offerModels);
find("clear").addEventListener("click", () => {
  conversation.clear();
  find("welcome").hidden = false;
  find("prompt").focus();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    find("prompt").value = example.textContent;
    send();
  });
}
new ResizeObserver(() => panels.redraw()).observe(find("speed-chart"));

watchHealth();
