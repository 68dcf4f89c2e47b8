// The conversation: its turns, which each request sends whole, and how it is shown. Text is only ever text here.

export class Conversation {
  constructor(log) {
    this.log = log;
    this.turns = [];
  }

  ask(content) {
    this.turns.push({ role: "user", content });
    const shown = this.#append("user", "You");
    shown.querySelector(".text").textContent = content;
  }

  answer(model) {
    const shown = this.#append("answer", model || "Answer");
    shown.setAttribute("aria-busy", "true");
    return new Answer(shown, () => this.#followed());
  }

  // A whole answer, or as much as came: what the next request builds on.
  keep(text) {
    this.turns.push({ role: "assistant", content: text });
  }

  // The last question was not answered at all; it is no part of the conversation.
  takeBack() {
    return this.turns.pop().content;
  }

  note(kind, text) {
    const shown = document.createElement("p");
    shown.className = `note ${kind}`;
    shown.setAttribute("role", kind === "error" ? "alert" : "status");
    shown.textContent = text;
    this.log.append(shown);
    this.log.scrollTop = this.log.scrollHeight;
  }

  clear() {
    this.turns = [];
    for (const shown of [...this.log.children]) if (shown.id !== "welcome") shown.remove();
  }

  #append(kind, who) {
    const shown = document.createElement("article");
    shown.className = `message ${kind}`;
    for (const [tag, name] of [["p", "who"], ["div", "text"], ["p", "foot"]]) {
      const part = document.createElement(tag);
      part.className = name;
      shown.append(part);
    }
    shown.querySelector(".who").textContent = who;
    this.log.append(shown);
    this.log.scrollTop = this.log.scrollHeight;
    return shown;
  }

  // Runs a change and keeps the end in view, unless the reader has scrolled away from it.
  #followed() {
    const log = this.log;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    return () => {
      if (atEnd) log.scrollTop = log.scrollHeight;
    };
  }
}

class Answer {
  constructor(shown, followed) {
    this.text = "";
    this.shown = shown;
    this.followed = followed;
  }

  append(pieces) {
    const follow = this.followed();
    const into = this.shown.querySelector(".text");
    for (const { text, origin } of pieces) {
      const visible = into.firstChild ? text : text.trimStart(); // empty lines before an answer only push it down
      this.text += text;
      if (!visible) continue;
      const token = document.createElement("span");
      token.className = `token ${origin}`;
      token.textContent = visible;
      into.append(token);
    }
    follow();
  }

  end(foot) {
    const follow = this.followed();
    this.shown.setAttribute("aria-busy", "false");
    this.shown.querySelector(".foot").textContent = foot;
    follow();
  }

  remove() {
    this.shown.remove();
  }
}
