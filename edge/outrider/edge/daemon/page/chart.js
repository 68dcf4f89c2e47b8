// A line chart of a few series over time, drawn as SVG so that the style sheet colours it.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 26;
const BOTTOM = 16;
const TOP = 6;
const MIN_S = 2;
const MAX_POINTS = 400;

export class LineChart {
  // `series` names the lines; the first two, where `gap` is set, have the area between them filled.
  constructor(svg, series, gap = "") {
    this.svg = svg;
    this.series = series;
    this.gap = gap;
    this.clear();
  }

  clear() {
    this.points = [];
    this.draw();
  }

  // `values` are in the order of the series; null: not known.
  add(seconds, values) {
    this.points.push({ seconds, values });
    if (this.points.length > MAX_POINTS) this.points = this.points.filter((_, i) => i % 2 === 0);
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth || 320;
    const height = this.svg.clientHeight || 120;
    const known = this.points.flatMap((point) => point.values).filter((value) => value !== null);
    const top = niceAbove(Math.max(1, ...known));
    const end = Math.max(MIN_S, this.points.at(-1)?.seconds ?? 0);
    const at = (seconds, value) =>
      `${(LEFT + (seconds / end) * (width - LEFT - 2)).toFixed(1)},${(height - BOTTOM - (value / top) * (height - BOTTOM - TOP)).toFixed(1)}`;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...this.#axes(at, top, end), ...this.#gap(at), ...this.#lines(at));
  }

  #axes(at, top, end) {
    const parts = [];
    for (const value of [0, top / 2, top]) {
      const [x, y] = at(0, value).split(",");
      const [right] = at(end, value).split(",");
      parts.push(make("line", { class: "grid", x1: x, x2: right, y1: y, y2: y }));
      if (this.points.length) {
        parts.push(make("text", { class: "tick", x: LEFT - 5, y: Number(y) + 3.5, "text-anchor": "end" }, shortly(value)));
      }
    }
    if (!this.points.length) return parts;
    const [right, low] = at(end, 0).split(",");
    parts.push(make("text", { class: "tick", x: right, y: Number(low) + 13, "text-anchor": "end" }, `${shortly(end)} s`));
    return parts;
  }

  #gap(at) {
    const both = this.points.filter((point) => point.values[0] !== null && point.values[1] !== null);
    if (!this.gap || both.length < 2) return [];
    const upper = both.map((point) => at(point.seconds, point.values[0]));
    const lower = both.map((point) => at(point.seconds, point.values[1])).reverse();
    return [make("polygon", { class: this.gap, points: [...upper, ...lower].join(" ") })];
  }

  #lines(at) {
    return this.series.flatMap((name, i) => {
      const points = this.points.filter((point) => point.values[i] !== null);
      if (!points.length) return [];
      return [make("polyline", { class: `line ${name}`, points: points.map((p) => at(p.seconds, p.values[i])).join(" ") })];
    });
  }
}

function make(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function niceAbove(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((n) => n * unit).find((nice) => nice >= value);
}

function shortly(value) {
  return value >= 10 ? String(Math.round(value)) : String(Math.round(10 * value) / 10);
}
