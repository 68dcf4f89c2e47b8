// Markdown as DOM nodes whose text keeps its origins. marked's lexer says what is what; its HTML is never made, so a
// text has no way to become markup: the nodes below are all that there can be.

import { Lexer } from "./vendor/marked.esm.js";
import { highlighted } from "./code.js";
import { marked, trimmed } from "./origins.js";

const MAX_DEPTH = 16; // of quotes and lists in each other; what lies deeper is shown as it was written
const MAX_INLINE = 3000; // characters of a paragraph in which emphasis is looked for: marked takes the square of it
const NEAR = 400; // characters of markup between two texts, such as the second line of a table
const LOOK = 64; // characters of markup within a text, such as an indent
const MAX_ABOUT = 80; // characters of what is said about code: its language, or a file's name
const SAFE = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const PLAIN = { strong: "strong", em: "em", del: "del", blockquote: "blockquote", paragraph: "p" };

class BoundedLexer extends Lexer {
  #depth = 0;

  blockTokens(source, tokens = [], clipped = false) {
    if (this.#depth >= MAX_DEPTH) {
      tokens.push({ type: "html", raw: source, text: source });
      return tokens;
    }
    this.#depth += 1;
    try {
      return super.blockTokens(source, tokens, clipped);
    } finally {
      this.#depth -= 1;
    }
  }

  inlineTokens(source, tokens = []) {
    if (source.length <= MAX_INLINE) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: source });
    return tokens;
  }
}

// The blocks of `source` from the character `start` on, as { token, start, end }. Some models think first, in tags.
export function blocksOf(source, start) {
  const thinking = /^<think>.*?(?:<\/think>|$)/s.exec(source.slice(start));
  if (!thinking) return markdownOf(source, start);
  const end = start + thinking[0].length;
  const token = { type: "thinking", raw: thinking[0], text: thinking[0].replace(/^<think>\s*|\s*<\/think>$/g, "") };
  return [{ token, start, end }, ...markdownOf(source, end)];
}

function markdownOf(source, start) {
  const text = source.slice(start).replace(/\r(?=\n)/g, " "); // marked drops it, which would move all that follows
  const blocks = [];
  let at = start;
  for (const token of new BoundedLexer({ gfm: true, breaks: true }).lex(text)) {
    const end = at + token.raw.length;
    if (token.type !== "space") blocks.push({ token, start: at, end });
    at = end;
  }
  return blocks;
}

// The node of one block. `final`: no more of it comes.
export function nodeOf({ token, start, end }, source, origins, final) {
  return new Painter(source, origins, start, end, final).block(token);
}

// Text that is shown as it was written.
export function plainNode(source, origins, start) {
  const node = make("p", [], "plain");
  for (const [from, to, kind] of origins.parts(start, source.length)) {
    node.append(...trimmed(source.slice(from, to), kind).map(([text, origin]) => marked(text, origin)));
  }
  return node;
}

// Walks the tokens of a block, and the source along with them, from which each text has its origins.
class Painter {
  constructor(source, origins, start, end, final) {
    this.source = source;
    this.origins = origins;
    this.at = start;
    this.end = end;
    this.final = final;
  }

  block(token) {
    return this.#within(token, () => {
      if (token.type in PLAIN) return make(PLAIN[token.type], this.#children(token));
      if (token.type === "heading") return make(`h${Math.min(6, token.depth + 2)}`, this.#inline(token.tokens));
      if (token.type === "code") return this.#code(token);
      if (token.type === "list") return this.#list(token);
      if (token.type === "table") return this.#table(token);
      if (token.type === "hr") return make("hr");
      if (token.type === "thinking") return make("details", [make("summary", ["Thinking"]), make("p", this.#leaf(token.text), "plain")]);
      if (token.type === "text") return make("span", this.#inline(token.tokens ?? [token]));
      return make("p", this.#leaf(token.raw.trimEnd()), "plain"); // HTML and definitions of links
    });
  }

  #children(token) {
    return token.type === "blockquote" ? this.#blocks(token.tokens) : this.#inline(token.tokens);
  }

  #blocks(tokens) {
    return tokens.filter((token) => token.type !== "space").map((token) => (isInline(token) ? this.#one(token) : this.block(token)));
  }

  #inline(tokens) {
    return tokens.flatMap((token) => this.#one(token));
  }

  #one(token) {
    return this.#within(token, () => {
      if (token.type in PLAIN) return make(PLAIN[token.type], this.#inline(token.tokens));
      if (token.type === "text" && token.tokens) return this.#inline(token.tokens);
      if (token.type === "codespan") return make("code", this.#leaf(token.text));
      if (token.type === "br") return make("br");
      if (token.type === "link" || token.type === "image") return this.#link(token);
      if (token.type === "checkbox") return checkbox(token.checked);
      if (token.type === "html") return /^<br\s*\/?>$/i.test(token.raw) ? make("br") : this.#leaf(token.raw);
      return this.#leaf(token.escaped ? token.text : decoded(token.text));
    });
  }

  // A link out of the page, once it is clicked. An image is a link as well: to load it would tell its server of the reader.
  #link(token) {
    const href = addressOf(token.href);
    if (href === null) return this.#leaf(token.raw);
    const isImage = token.type === "image";
    const inside = isImage ? this.#leaf(token.text || token.href) : this.#inline(token.tokens);
    const link = make("a", inside, isImage ? "image" : "");
    for (const [name, value] of Object.entries({ href, title: href, target: "_blank", rel: "noopener noreferrer" })) {
      link.setAttribute(name, value);
    }
    return link;
  }

  #code(token) {
    const about = (token.lang ?? "").trim();
    const language = about.split(/\s/)[0];
    const closed = this.final || !/^\s*(`{3,}|~{3,})/.test(token.raw) || /\n\s*(`{3,}|~{3,})\s*$/.test(token.raw);
    if (token.codeBlockStyle !== "indented") this.at += token.raw.indexOf("\n") + 1;
    const parts = this.#parts(token.text);
    const code = make("code", closed ? highlighted(parts, language) : parts.map(([text, kind]) => marked(text, kind)));
    const pre = make("pre", [code]);
    pre.tabIndex = 0; // so that keys scroll a long line
    const copy = make("button", ["Copy"], "copy");
    copy.type = "button";
    copy.dataset.act = "copy-code";
    return make("figure", [make("figcaption", [make("span", [about.slice(0, MAX_ABOUT) || "text"]), copy]), pre], "code");
  }

  #list(token) {
    const list = make(token.ordered ? "ol" : "ul");
    if (token.ordered && token.start !== 1) list.setAttribute("start", token.start);
    for (const item of token.items) {
      const parts = this.#within(item, () => this.#blocks(item.tokens));
      list.append(make("li", parts.flat(), item.task ? "task" : ""));
    }
    return list;
  }

  #table(token) {
    const row = (cells, tag) => make("tr", cells.map((cell) => this.#cell(cell, tag)));
    const head = make("thead", [row(token.header, "th")]);
    const body = make("tbody", token.rows.map((cells) => row(cells, "td")));
    const scroller = make("div", [make("table", [head, body])], "table");
    scroller.tabIndex = 0;
    return scroller;
  }

  #cell(cell, tag) {
    return make(tag, this.#inline(cell.tokens), cell.align ? `to-${cell.align}` : "");
  }

  // Runs `paint` within the place of a token in the source, where that can be told.
  #within({ raw }, paint) {
    const { end } = this;
    const start = this.at + this.source.slice(this.at, Math.min(end, this.at + NEAR + raw.length)).indexOf(raw);
    const found = start >= this.at;
    if (found) [this.at, this.end] = [start, start + raw.length];
    const nodes = paint();
    if (found) this.at = this.end;
    this.end = end;
    return nodes;
  }

  #leaf(text) {
    return this.#parts(text).map(([part, kind]) => marked(part, kind));
  }

  // The text in parts of one origin each, as [text, origin].
  #parts(text) {
    return this.#untrimmed(text).flatMap(([part, kind]) => trimmed(part, kind));
  }

  #untrimmed(text) {
    if (this.source.startsWith(text, this.at) && this.at + text.length <= this.end) {
      const start = this.at;
      this.at += text.length;
      return [...this.origins.parts(start, this.at)].map(([from, to, kind]) => [this.source.slice(from, to), kind]);
    }
    return this.#aligned(text);
  }

  // Markup lies within the text, such as the indent of code in a list: each character has the origin of its next like.
  #aligned(text) {
    const parts = [];
    for (const character of text) {
      const found = this.source.slice(this.at, Math.min(this.end, this.at + LOOK)).indexOf(character);
      if (found >= 0) this.at += found;
      const [[, , kind]] = this.origins.parts(this.at, this.at + 1);
      if (found >= 0) this.at += character.length;
      if (parts.at(-1)?.[1] === kind) parts.at(-1)[0] += character;
      else parts.push([character, kind]);
    }
    return parts;
  }
}

// What a list's item holds without a paragraph around it.
function isInline(token) {
  return token.type === "text" || token.type === "checkbox";
}

function make(tag, children = [], name = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children.flat());
  return element;
}

function checkbox(checked) {
  const box = make("input");
  box.type = "checkbox";
  box.disabled = true;
  box.toggleAttribute("checked", checked);
  return box;
}

// Null: no address of another site, and so none that a text may lead to.
function addressOf(href) {
  try {
    const url = new URL(href);
    return SAFE.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function decoded(text) {
  return text.replace(/&(?:#x([0-9a-f]{1,6})|#(\d{1,7})|([a-z]{2,4}));/gi, (whole, hex, decimal, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = hex ? parseInt(hex, 16) : Number(decimal);
    return code > 0 && code < 0x110000 ? String.fromCodePoint(code) : whole;
  });
}
