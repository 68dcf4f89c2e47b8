// The daemon's health, models and versions of drafters, looked at every few seconds while the page is in view.

import { health, models, versions } from "./api.js";
import { ApiError, inWords } from "./errors.js";
import { Versions } from "./versions.js";

const EVERY_MS = 3000;
const WORDS = { ok: "ready", degraded: "degraded", unavailable: "unavailable" };

export class Watch {
  constructor(find, settings, panels) {
    this.find = find;
    this.settings = settings;
    this.panels = panels;
    this.ofDrafters = new Versions(find);
    this.away = "";
    this.refusal = null; // of the list of models
    this.modelsKnown = false;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.#look()); // news may have come meanwhile
    this.#watch();
  }

  async askModels() {
    try {
      this.settings.offer(await models(this.settings.apiKey));
      this.modelsKnown = true;
      this.refusal = null;
    } catch (error) {
      this.refusal = error;
    }
    this.panels.name({ target: this.settings.model });
    this.#showBanner();
  }

  async #watch() {
    await this.#look();
    setTimeout(() => this.#watch(), EVERY_MS);
  }

  async #look() {
    if (document.hidden) return;
    const { state, reason, drafter } = await health(this.settings.apiKey);
    this.find("health").dataset.state = state;
    const text = reason && state !== "ok" ? `${WORDS[state]}: ${reason}` : WORDS[state];
    set(this.find("health-text"), text);
    this.find("health").title = text;
    this.away = state === "unavailable" ? reason : "";
    if (drafter) this.panels.name({ drafter });
    if (state !== "unavailable" && !this.modelsKnown) await this.askModels();
    this.#showBanner();
    const known = state === "unavailable" ? null : await versions(this.settings.apiKey);
    if (known) this.ofDrafters.show(known);
  }

  #showBanner() {
    const wantsKey = !this.away && this.refusal instanceof ApiError && this.refusal.status === 401;
    const text = this.away ? awayWords(this.away) : this.refusal ? inWords(this.refusal) : "";
    set(this.find("banner-text"), text);
    this.find("banner-button").hidden = !wantsKey;
    this.find("banner").hidden = text === "";
  }
}

function awayWords(reason) {
  if (reason === "the daemon does not answer") return "The daemon does not answer. Is `outrider edge` still running?";
  return `The cloud is away: ${reason}. The page notices when it is back.`;
}

// Screen readers say a change, not each look.
function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
