// The settings, kept in this browser; the key only where its box is ticked.

import { read, write } from "./storage.js";

const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens", seed: "seed" };
const FIELDS = [...Object.keys(NUMBERS), "system", "form", "answers", "theme", "keep-key"];
const root = document.documentElement.dataset;

export class Settings {
  // `changed` is called after each change.
  constructor(find, changed) {
    this.find = find;
    this.#restore(read("settings") ?? {});
    for (const id of [...FIELDS, "api-key", "model"]) find(id).addEventListener("change", () => this.#change(changed));
    for (const choice of this.#marks) choice.addEventListener("change", () => this.#change(changed));
  }

  get apiKey() {
    return this.find("api-key").value.trim();
  }

  get model() {
    return this.find("model").value;
  }

  get form() {
    return this.find("form").value;
  }

  set form(form) {
    this.find("form").value = form;
    this.#keep();
  }

  get answers() {
    return this.find("answers").value;
  }

  // Parameters of the request; an empty field leaves the daemon's default.
  get sampling() {
    const sampling = this.model ? { model: this.model } : {};
    for (const [id, name] of Object.entries(NUMBERS)) {
      const value = this.find(id).value;
      if (value !== "") sampling[name] = Number(value);
    }
    return sampling;
  }

  // Whether the same turns are answered with the same text each time.
  get repeats() {
    const { temperature, seed } = this.sampling;
    return temperature === 0 || seed !== undefined;
  }

  // The turns with the system prompt before them.
  withSystem(turns) {
    const content = this.find("system").value.trim();
    return content ? [{ role: "system", content }, ...turns] : turns;
  }

  // A sentence about the first field whose value its limits refuse; "" without one.
  get complaint() {
    const wrong = Object.keys(NUMBERS).map(this.find).find((field) => !field.checkValidity());
    return wrong ? `${wrong.labels[0].firstChild.textContent}: ${wrong.validationMessage}` : "";
  }

  offer(models) {
    const select = this.find("model");
    const before = select.value || this.chosenModel;
    select.replaceChildren(...models.map((id) => new Option(id, id)));
    if (models.includes(before)) select.value = before;
  }

  get #marks() {
    return document.querySelectorAll("input[name=marks]");
  }

  #change(changed) {
    this.#apply();
    this.#keep();
    changed();
  }

  #apply() {
    root.marks = [...this.#marks].find((choice) => choice.checked).value;
    const theme = this.find("theme").value;
    if (theme) root.theme = theme;
    else delete root.theme;
  }

  #keep() {
    const values = { marks: root.marks, model: this.model };
    for (const id of FIELDS) values[id] = this.find(id).type === "checkbox" ? this.find(id).checked : this.find(id).value;
    if (values["keep-key"]) values["api-key"] = this.apiKey;
    write("settings", values);
  }

  #restore(values) {
    for (const id of [...FIELDS, "api-key"]) {
      const field = this.find(id);
      if (typeof values[id] === "boolean") field.checked = values[id];
      else if (typeof values[id] === "string") field.value = values[id];
      if (field.value === "" && field.tagName === "SELECT") field.selectedIndex = 0; // a choice that there was once
    }
    for (const choice of this.#marks) choice.checked = choice.value === root.marks;
    if (![...this.#marks].some((choice) => choice.checked)) this.#marks[1].checked = true;
    this.chosenModel = values.model ?? "";
    this.#apply();
  }
}
