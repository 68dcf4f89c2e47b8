// The chat that is shown: its messages, notes between them, and the end that is kept in view.

import { copyFor } from "./clipboard.js";
import { Message } from "./message.js";

const NEAR_END_PX = 24;

export class Thread {
  // `on` has a function for "edit" and "again", which gets the turn.
  constructor(find, on) {
    this.log = find("log");
    this.list = find("thread");
    this.latest = find("latest");
    this.messages = new Map();
    this.following = true;
    this.growing = null;
    this.log.addEventListener("scroll", () => this.#scrolled());
    this.latest.addEventListener("click", () => this.toEnd());
    this.list.addEventListener("click", (event) => this.#act(event, on));
  }

  show(turns, form, running) {
    this.form = form;
    this.growing = null;
    this.messages.clear();
    const made = turns.map((turn) => this.#made(turn));
    this.list.replaceChildren(...made.map(({ node }) => node));
    if (running) this.messages.get(running)?.begin();
    this.toEnd();
  }

  add(turn) {
    this.list.append(this.#made(turn).node);
    this.toEnd();
  }

  begin(turn) {
    this.add(turn);
    this.messages.get(turn).begin();
  }

  // Many tokens may come between two frames of the screen, and a slow one is given time to breathe.
  grow(turn) {
    const message = this.messages.get(turn);
    if (!message || this.growing) return;
    this.growing = message;
    const draw = () => {
      if (this.growing !== message) return;
      this.growing = null;
      const began = performance.now();
      message.grow();
      this.#follow();
      this.pause = 3 * (performance.now() - began);
    };
    if (this.pause > 30) setTimeout(() => requestAnimationFrame(draw), this.pause);
    else requestAnimationFrame(draw);
  }

  end(turn) {
    this.growing = null;
    this.messages.get(turn)?.end();
    this.#follow();
  }

  remove(turn) {
    this.messages.get(turn)?.node.remove();
    this.messages.delete(turn);
  }

  edit(turn, text, send) {
    this.messages.get(turn)?.edit(text, send);
  }

  // `action` may be { label, run }, which becomes a button.
  note(kind, text, action = null) {
    const shown = document.createElement("p");
    shown.className = `note ${kind}`;
    shown.setAttribute("role", kind === "error" ? "alert" : "status");
    shown.textContent = text;
    if (action) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.textContent = action.label;
      button.addEventListener("click", action.run);
      shown.append(" ", button);
    }
    this.list.append(shown);
    this.toEnd();
  }

  // Notes are about what was just done; the next thing that is done takes them away.
  clearNotes() {
    for (const note of this.list.querySelectorAll(":scope > .note")) note.remove();
  }

  toEnd() {
    this.following = true;
    this.latest.hidden = true;
    this.log.scrollTop = this.log.scrollHeight;
  }

  #made(turn) {
    const message = new Message(turn, this.form);
    this.messages.set(turn, message);
    return message;
  }

  #follow() {
    if (this.following) this.log.scrollTop = this.log.scrollHeight;
  }

  #scrolled() {
    this.following = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
    this.latest.hidden = this.following;
  }

  #act(event, on) {
    const button = event.target.closest("button[data-act]");
    const node = button?.closest(".message");
    const turn = [...this.messages.keys()].find((one) => this.messages.get(one).node === node);
    if (!turn) return;
    const { act } = button.dataset;
    if (act === "copy") copyFor(button, turn.content);
    else if (act === "copy-code") copyFor(button, button.closest(".code").querySelector("code").textContent);
    else on[act]?.(turn);
  }
}
