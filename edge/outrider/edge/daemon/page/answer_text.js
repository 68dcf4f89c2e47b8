// The text of one answer as it grows. Blocks that are complete are left alone, so that a token costs the last block only.

import { blocksOf, nodeOf, plainNode } from "./markdown.js";
import { patch } from "./morph.js";

export class AnswerText {
  // `into` gets the blocks; `form` is "markdown" or "plain".
  constructor(into, form) {
    this.into = into;
    this.form = form;
    this.settled = 0; // blocks that stay as they are
    this.from = 0; // where the first other one begins
  }

  show(source, origins, final) {
    if (final) [this.settled, this.from] = [0, 0]; // what comes late may define what came early, such as a link
    const start = Math.max(this.from, source.length - source.trimStart().length); // empty lines before an answer only push it down
    if (start >= source.length) return;
    if (this.form === "plain") return this.#place([plainNode(source, origins, start)]);
    try {
      this.#blocks(source, origins, start, final);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // nested too deeply for the stack
      this.#place([plainNode(source, origins, start)]);
    }
  }

  #blocks(source, origins, start, final) {
    const blocks = blocksOf(source, start);
    this.#place(blocks.map((block) => nodeOf(block, source, origins, final)));
    if (final || blocks.length < 2) return;
    this.settled += blocks.length - 1;
    this.from = blocks.at(-1).start;
  }

  #place(nodes) {
    nodes.forEach((node, i) => {
      const shown = this.into.children[this.settled + i];
      if (shown) patch(shown, node);
      else this.into.append(node);
    });
    while (this.into.children.length > this.settled + nodes.length) this.into.lastElementChild.remove();
  }
}
