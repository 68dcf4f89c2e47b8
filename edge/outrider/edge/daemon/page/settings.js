// The values of the settings. Nothing is stored: the page forgets them all when it is closed.

const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens", seed: "seed" };

export class Settings {
  constructor(find) {
    this.find = find;
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

  // A sentence about the first field whose value its limits refuse; "" without one.
  get complaint() {
    const wrong = Object.keys(NUMBERS).map(this.find).find((field) => !field.checkValidity());
    return wrong ? `${wrong.parentElement.firstChild.textContent}: ${wrong.validationMessage}` : "";
  }

  offer(models) {
    const select = this.find("model");
    const before = select.value;
    select.replaceChildren(...models.map((id) => new Option(id, id)));
    if (models.includes(before)) select.value = before;
  }
}
