// The page: its parts put together, and its input.

import { answer } from "./api.js";
import { ChatList } from "./chat_list.js";
import { Chats } from "./chats.js";
import { ApiError, inWords } from "./errors.js";
import { Drawers } from "./drawers.js";
import { Origins } from "./origins.js";
import { Panels, summary } from "./panels.js";
import { Settings } from "./settings.js";
import { kept } from "./storage.js";
import { Thread } from "./thread.js";
import { Transfer } from "./transfer.js";
import { Watch } from "./watch.js";

const SAVE_EVERY_MS = 2000;

const find = (id) => document.getElementById(id);
const chats = new Chats();
const settings = new Settings(find, onSettings);
const panels = new Panels(find);
const watch = new Watch(find, settings, panels);
const drawers = new Drawers(find);
const thread = new Thread(find, { edit, again });
const list = new ChatList(find("chat-list"), { open, rename, remove });
let chat = chats.create();
let run = null; // { chat, turn, controller } of the answer that streams
let answersShown = settings.answers;

// --- chats ---

function open(id) {
  show(run?.chat.id === id ? run.chat : chats.get(id) ?? chats.create());
  drawers.closeOverlay();
  find("prompt").focus();
}

function show(shown) {
  chat = shown;
  if (chat.turns.at(-1)?.content === "" && run?.chat !== chat) chat.turns.pop(); // the page went away before its first word
  history.replaceState(null, "", chat.turns.length ? `#${chat.id}` : location.pathname); // a reload comes back to it
  thread.show(chat.turns, settings.answers, run?.turn);
  find("welcome").hidden = chat.turns.length > 0;
  if (run?.chat !== chat) panels.recall(chat.turns.findLast((turn) => turn.speculation)?.speculation ?? null);
  showList();
}

function showList() {
  list.show(chats.list(), chat.id);
}

function save(saved) {
  const gone = chats.save(saved);
  if (gone === null) thread.note("error", "This chat is too long for the browser’s storage: it is gone when you close the page.");
  else if (gone.length) thread.note("hint", `The browser’s storage is full, so the oldest chats went: ${gone.join(", ")}.`);
  showList();
}

function rename(id, title) {
  const renamed = chat.id === id ? chat : run?.chat.id === id ? run.chat : chats.get(id);
  if (renamed && title.trim() !== renamed.title) chats.rename(renamed, title);
  showList();
}

function remove(id) {
  if (run?.chat.id === id) {
    run.isDeleted = true;
    stop();
  }
  const removed = chat.id === id ? chat : chats.get(id);
  chats.remove(id);
  if (chat.id === id) show(chats.create());
  else showList();
  thread.note("hint", `“${removed.title}” is deleted.`, { label: "Undo", run: () => chats.save(removed) && open(id) });
}

// --- answers ---

async function send() {
  const question = find("prompt").value.trim();
  if (!question || !isReady()) return;
  const before = [...chat.turns];
  const turn = { role: "user", content: question };
  find("prompt").value = "";
  chat.turns.push(turn);
  find("welcome").hidden = true;
  thread.add(turn);
  if (!(await respond(before)) && !find("prompt").value) find("prompt").value = question; // it can be sent again
}

function edit(turn, text = turn.content) {
  if (run) return;
  thread.edit(turn, text, async (content) => {
    if (!isReady()) return;
    const before = [...chat.turns];
    cutTo(chat.turns.indexOf(turn), { role: "user", content });
    if (!(await respond(before))) edit(turn, content);
  });
}

function again(turn) {
  if (!isReady()) return;
  const before = [...chat.turns];
  cutTo(chat.turns.indexOf(turn));
  respond(before, turn.content);
}

function cutTo(length, ...turns) {
  chat.turns.splice(length, Infinity, ...turns);
  thread.show(chat.turns, settings.answers);
}

function isReady() {
  if (run) return false;
  thread.clearNotes();
  if (settings.complaint) thread.note("error", settings.complaint);
  return !settings.complaint;
}

// Answers the chat as it stands. Where not a word comes, the turns are `before` again. Returns whether one came.
async function respond(before, replaced = null) {
  const turn = { role: "assistant", content: "", origins: new Origins(), model: settings.model, foot: "" };
  run = { chat, turn, controller: new AbortController(), isDeleted: false };
  const mine = run;
  chat.turns.push(turn);
  chat.updated = Date.now();
  thread.begin(turn);
  history.replaceState(null, "", `#${chat.id}`);
  save(chat);
  showRunning(true);
  const failure = await converse(mine);
  run = null;
  showRunning(false);
  if (turn.content === "") mine.chat.turns.splice(0, Infinity, ...before);
  finish(mine, failure);
  if (replaced !== null && replaced === turn.content && settings.repeats) {
    thread.note("hint", "The same text again: temperature 0 or a fixed seed gives the same answer each time.");
  }
  return turn.content !== "";
}

function finish({ chat: done, turn, isDeleted }, failure) {
  if (!isDeleted && done.turns.length) save(done);
  else if (!isDeleted) chats.remove(done.id);
  if (done === chat) {
    if (turn.content === "") show(done);
    else thread.end(turn);
    if (failure) thread.note("error", inWords(failure), keyAction(failure));
    find("prompt").focus({ preventScroll: true });
  }
  showList();
}

// Streams the answer of `mine`, and returns what went wrong, if anything did.
async function converse(mine) {
  const { turn, controller } = mine;
  const began = performance.now();
  const state = { savedAt: began, finish: null };
  let failure = null;
  panels.begin(settings.model);
  find("announcement").textContent = "Answering.";
  try {
    await stream(mine, state);
  } catch (error) {
    if (!controller.signal.aborted) failure = error;
  }
  if (failure instanceof ApiError && failure.asksForTemplate && settings.form === "chat" && !turn.content) {
    settings.form = "text";
    thread.note("hint", "This model has no chat template, so it continues your text instead of answering it.");
    return converse(mine);
  }
  const foot = summary(turn.speculation ?? null, (performance.now() - began) / 1000);
  const cut = state.finish === "length" ? " · cut at Max tokens" : "";
  turn.foot = controller.signal.aborted ? `stopped · ${foot}` : `${foot}${cut}`;
  find("announcement").textContent = failure ? "" : controller.signal.aborted ? "Stopped." : `Answer complete: ${foot}`;
  return failure;
}

async function stream({ chat: asked, turn, controller }, state) {
  const turns = asked.turns.slice(0, -1).map(({ role, content }) => ({ role, content }));
  for await (const chunk of answer(settings.form, turns, settings, controller.signal)) {
    for (const { text, origin } of chunk.pieces) {
      turn.content += text;
      turn.origins.push(text.length, origin);
    }
    state.finish = chunk.finish ?? state.finish;
    thread.grow(turn);
    if (chunk.speculation !== null) {
      const { pieces, ...speculation } = chunk.speculation;
      turn.speculation = speculation;
      panels.show(speculation);
    }
    if (performance.now() - state.savedAt < SAVE_EVERY_MS) continue;
    state.savedAt = performance.now();
    chats.save(asked);
  }
}

function keyAction(failure) {
  return failure instanceof ApiError && failure.status === 401 ? { label: "Enter a key", run: askForKey } : null;
}

function showRunning(yes) {
  find("send").hidden = yes;
  find("stop").hidden = !yes;
  document.body.classList.toggle("answering", yes);
}

function stop() {
  run?.controller.abort();
}

// --- settings ---

function onSettings() {
  watch.askModels();
  if (settings.answers === answersShown) return;
  answersShown = settings.answers;
  show(chat);
}

function askForKey() {
  find("settings").showModal();
  find("api-key").focus();
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
  if (event.key !== "Escape" || find("settings").open) return;
  if (!drawers.closeOverlay()) stop();
});
find("stop").addEventListener("click", stop);
find("banner-button").addEventListener("click", askForKey);
find("settings-button").addEventListener("click", () => find("settings").showModal());
find("settings-close").addEventListener("click", () => find("settings").close());
find("settings").addEventListener("click", (event) => {
  if (event.target === find("settings")) find("settings").close(); // the shade around it
});
find("new-chat").addEventListener("click", () => open(""));
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    find("prompt").value = example.textContent;
    send();
  });
}
window.addEventListener("pagehide", () => run && !run.isDeleted && chats.save(run.chat));
window.addEventListener("storage", ({ key }) => {
  if (key === `outrider.chat.${chat.id}` && run?.chat !== chat) show(chats.get(chat.id) ?? chats.create());
  else showList();
});
new Transfer(find, chats, () => show(chats.get(chat.id) ?? chat));
window.addEventListener("hashchange", () => open(location.hash.slice(1)));
new ResizeObserver(() => panels.redraw()).observe(find("speed-chart"));

find("kept").textContent = kept ? "Chats stay in this browser." : "This browser keeps nothing: chats end with the page.";
show(chats.get(location.hash.slice(1)) ?? chat);
find("prompt").focus();
watch.start();
