// Which parts of an answer were drafted here and which are the target's own: runs of characters, in order.

export const UNKNOWN = 0;
export const DRAFT = 1;
export const OWN = 2;
const NAMES = ["unknown", "draft", "own"];

export class Origins {
  // `runs` is a list of [length, origin], as `toJSON` returns it.
  constructor(runs = []) {
    this.ends = [];
    this.kinds = [];
    for (const [length, kind] of runs) this.push(length, kind);
  }

  get length() {
    return this.ends.at(-1) ?? 0;
  }

  // What is kept of it, as the constructor takes it.
  toJSON() {
    return this.ends.map((end, i) => [end - (this.ends[i - 1] ?? 0), this.kinds[i]]);
  }

  push(length, kind) {
    if (length === 0) return;
    const end = this.length + length;
    if (this.kinds.at(-1) === kind) {
      this.ends[this.ends.length - 1] = end;
    } else {
      this.ends.push(end);
      this.kinds.push(kind);
    }
  }

  // The parts of the characters from `start` to `end` that have one origin each, as [start, end, origin].
  *parts(start, end) {
    let i = this.#runAt(start);
    for (let at = start; at < end; i++) {
      const to = i < this.ends.length ? Math.min(end, this.ends[i]) : end;
      yield [at, to, this.kinds[i] ?? UNKNOWN];
      at = to;
    }
  }

  #runAt(position) {
    let [low, high] = [0, this.ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] <= position) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

// A part of a text in up to three, so that no mark begins or ends with white space: indents and ends of lines stay clean.
export function trimmed(text, kind) {
  if (kind === UNKNOWN) return [[text, kind]];
  const [, before, inside, after] = /^(\s*)(.*?)(\s*)$/s.exec(text);
  return [[before, UNKNOWN], [inside, kind], [after, UNKNOWN]].filter(([part]) => part);
}

// Text of one origin, as a node.
export function marked(text, kind) {
  if (kind === UNKNOWN) return document.createTextNode(text);
  const span = document.createElement("span");
  span.className = `token ${NAMES[kind]}`;
  span.textContent = text;
  return span;
}
