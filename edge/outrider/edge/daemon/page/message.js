// One turn as it is shown: who, the text, and what can be done with it.

import { AnswerText } from "./answer_text.js";
import { Origins } from "./origins.js";

const ACTIONS = { user: { edit: "Edit", copy: "Copy" }, assistant: { copy: "Copy", again: "Regenerate" } };

export class Message {
  // `form` is "markdown" or "plain", for answers.
  constructor(turn, form) {
    this.turn = turn;
    this.form = form;
    this.node = element("article", `message ${turn.role === "user" ? "user" : "answer"}`);
    this.node.append(element("h2", "who", turn.role === "user" ? "You" : turn.model || "Answer"));
    this.text = element("div", "text");
    this.summary = element("p", "foot", turn.foot ?? "");
    this.tools = element("div", "tools");
    for (const [act, label] of Object.entries(ACTIONS[turn.role])) this.tools.append(button(act, label));
    const under = element("div", "under");
    under.append(...(turn.role === "user" ? [this.tools] : [this.summary, this.tools]));
    this.node.append(this.text, under);
    this.showText();
  }

  showText() {
    if (this.turn.role === "user") return this.text.replaceChildren(this.turn.content);
    this.text.replaceChildren();
    this.shown = new AnswerText(this.text, this.form);
    this.#draw(true);
  }

  begin() {
    this.node.setAttribute("aria-busy", "true");
  }

  grow() {
    this.#draw(false);
  }

  end() {
    this.#draw(true);
    this.node.setAttribute("aria-busy", "false");
    this.summary.textContent = this.turn.foot ?? "";
  }

  // Puts a field with `text` in place of the turn's; `send` gets what it has in the end.
  edit(text, send) {
    const form = element("form", "edit");
    const field = element("textarea");
    field.setAttribute("aria-label", "Your turn");
    field.value = text;
    const submit = button("", "Send");
    submit.type = "submit";
    submit.className = "primary";
    const cancel = button("", "Cancel");
    const row = element("div", "row");
    row.append(element("p", "note", "What follows is cut."), cancel, submit);
    form.append(field, row);
    cancel.addEventListener("click", () => this.showText());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) send(field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.showText();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.text.replaceChildren(form);
    field.focus();
  }

  #draw(final) {
    const { content, origins } = this.turn;
    this.shown.show(content, origins instanceof Origins ? origins : new Origins(origins), final);
  }
}

function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}

function button(act, label) {
  const made = element("button", "tool", label);
  made.type = "button";
  made.dataset.act = act;
  return made;
}
