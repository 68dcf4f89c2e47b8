// Code in colours: highlight.js says which scope each part has, and its HTML is never made.

import hljs from "./vendor/highlight.min.js";
import { marked, UNKNOWN } from "./origins.js";

const MAX_CHARACTERS = 20_000; // beyond, colours are not worth the wait

// The nodes of code given as [text, origin], each text of one origin and one scope.
export function highlighted(parts, language) {
  const text = parts.map(([part]) => part).join("");
  const scopes = scopesOf(text, language);
  if (scopes === null) return parts.map(([part, kind]) => marked(part, kind));
  let at = 0; // the scope that is reached, and the characters of it that are used
  let used = 0;
  return parts.map(([part, kind]) => {
    const node = marked("", kind);
    const into = kind === UNKNOWN ? document.createDocumentFragment() : node;
    for (let done = 0; done < part.length; ) {
      const { text: whole, scope } = scopes[at];
      const length = Math.min(part.length - done, whole.length - used);
      into.append(scoped(part.slice(done, done + length), scope));
      done += length;
      used += length;
      if (used === whole.length) [at, used] = [at + 1, 0];
    }
    return into;
  });
}

// Null: nothing is known of the language, or the library failed at this text.
function scopesOf(text, language) {
  if (!hljs.getLanguage(language) || text.length > MAX_CHARACTERS) return null;
  const { runs } = hljs.highlight(text, { language, ignoreIllegals: true })._emitter;
  return runs.reduce((sum, run) => sum + run.text.length, 0) === text.length ? runs : null;
}

function scoped(text, scope) {
  if (!scope) return document.createTextNode(text);
  const span = document.createElement("span");
  span.className = `scope ${scope.split(".")[0]}`;
  span.textContent = text;
  return span;
}

// What highlight.js tells as it reads: text, and where scopes begin and end. In place of its maker of HTML.
class Runs {
  runs = [];
  #open = [];

  openNode(name) {
    this.#open.push(name);
  }

  closeNode() {
    this.#open.pop();
  }

  startScope(name) {
    this.openNode(name);
  }

  endScope() {
    this.closeNode();
  }

  addText(text) {
    if (text) this.runs.push({ text, scope: this.#open.findLast((name) => name) ?? "" });
  }

  __addSublanguage({ runs }) {
    for (const { text, scope } of runs) this.runs.push({ text, scope: scope || (this.#open.at(-1) ?? "") });
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: Runs });
