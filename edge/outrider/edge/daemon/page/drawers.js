// The two sides of the page, the chats and what happens: columns where there is room, and drawers over it elsewhere.

import { read, write } from "./storage.js";

const SIDES = { chats: "(min-width: 1080px)", happening: "(min-width: 861px)" };

export class Drawers {
  constructor(find) {
    this.find = find;
    this.queries = Object.fromEntries(Object.entries(SIDES).map(([id, query]) => [id, matchMedia(query)]));
    this.wanted = read("sides") ?? {};
    for (const id of Object.keys(SIDES)) {
      find(`${id}-button`).addEventListener("click", () => this.#toggle(id));
      this.queries[id].addEventListener("change", () => this.#arrange());
    }
    find("shade").addEventListener("click", () => this.closeOverlay());
    this.#arrange();
  }

  // Returns whether a drawer lay over the page, which is closed now.
  closeOverlay() {
    const open = Object.keys(SIDES).filter((id) => this.#isOver(id) && !this.find(id).hidden);
    for (const id of open) this.#set(id, false);
    if (open.length) this.find(`${open[0]}-button`).focus();
    return open.length > 0;
  }

  #isOver(id) {
    return !this.queries[id].matches;
  }

  #toggle(id) {
    const opens = this.find(id).hidden;
    if (opens && this.#isOver(id)) this.closeOverlay();
    this.#set(id, opens);
    if (this.#isOver(id)) return;
    this.wanted[id] = opens;
    write("sides", this.wanted);
  }

  #arrange() {
    for (const id of Object.keys(SIDES)) this.#set(id, !this.#isOver(id) && (this.wanted[id] ?? true));
  }

  #set(id, isOpen) {
    this.find(id).hidden = !isOpen;
    this.find(id).classList.toggle("over", this.#isOver(id));
    this.find(`${id}-button`).setAttribute("aria-expanded", isOpen);
    this.find("columns").classList.toggle(`with-${id}`, isOpen && !this.#isOver(id));
    this.find("shade").hidden = !Object.keys(SIDES).some((one) => this.#isOver(one) && !this.find(one).hidden);
  }
}
