// The chats that this browser keeps, each under a key of its own, so that two tabs disturb each other little.
//
// A chat is { id, title, named, updated, turns }; a turn is { role, content }, and of an answer also
// { model, origins, foot, speculation }. `named`: the reader chose the title.

import { names, read, remove, write } from "./storage.js";

export const MAX_CHATS = 200;
const MAX_TITLE = 60;
const FORMAT = "outrider-chats-1";

export class Chats {
  // Newest first, without their turns.
  list() {
    const chats = names("chat.").map(read).filter(isChat);
    return chats.sort((one, other) => other.updated - one.updated).map(({ id, title }) => ({ id, title }));
  }

  create() {
    return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "New chat", named: false, updated: 0, turns: [] };
  }

  get(id) {
    const chat = read(`chat.${id}`);
    return isChat(chat) ? chat : null;
  }

  // Returns the titles of the old chats that had to go for it, or null where there is no room even so.
  save(chat) {
    if (!chat.named) chat.title = titleOf(chat.turns);
    const gone = [];
    let others = null; // to read them all takes time, which a chat that fits is spared
    const oldest = () => (others ??= this.list().filter(({ id }) => id !== chat.id));
    while (names("chat.").length >= MAX_CHATS && oldest().length >= MAX_CHATS) gone.push(this.#drop(others));
    while (!write(`chat.${chat.id}`, chat)) {
      if (!oldest().length) return null;
      gone.push(this.#drop(others));
    }
    return gone;
  }

  rename(chat, title) {
    const chosen = title.replace(/\s+/g, " ").trim().slice(0, MAX_TITLE);
    chat.named = chosen !== "";
    chat.title = chosen || titleOf(chat.turns);
    return this.save(chat);
  }

  remove(id) {
    remove(`chat.${id}`);
  }

  exported() {
    return JSON.stringify({ format: FORMAT, chats: this.list().map(({ id }) => this.get(id)) }, null, 1);
  }

  // Returns the number of chats that were taken; a chat that is here already is replaced.
  import(text) {
    const { format, chats } = JSON.parse(text);
    if (format !== FORMAT || !Array.isArray(chats) || !chats.every(isChat)) throw new TypeError("no chats in it");
    return chats.slice(0, MAX_CHATS).filter((chat) => this.save(chat) !== null).length;
  }

  #drop(others) {
    const { id, title } = others.pop();
    this.remove(id);
    return title;
  }
}

function titleOf(turns) {
  const first = turns.find(({ role }) => role === "user")?.content.replace(/\s+/g, " ").trim() ?? "";
  return first.length > MAX_TITLE ? `${first.slice(0, MAX_TITLE - 1)}…` : first || "New chat";
}

// What was kept may be from another release, or from a file that somebody sent.
function isChat(chat) {
  return (
    typeof chat?.id === "string" && /^[\w-]{1,64}$/.test(chat.id) && typeof chat.title === "string" &&
    Number.isFinite(chat.updated) && Array.isArray(chat.turns) && chat.turns.every(isTurn)
  );
}

function isTurn(turn) {
  return (
    ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string" &&
    (turn.origins === undefined || (Array.isArray(turn.origins) && turn.origins.every(isRun)))
  );
}

function isRun(run) {
  return Array.isArray(run) && run.length === 2 && run.every((n) => Number.isInteger(n) && n >= 0) && run[1] <= 2;
}
