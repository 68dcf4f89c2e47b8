// The live panels: what speculation gains, how far it runs ahead, and what it costs on the link.

import { LineChart } from "./chart.js";

const BETWEEN_POINTS_S = 0.05;
const MIN_TOKENS = 8; // a rate over fewer says nothing

export class Panels {
  constructor(find) {
    this.find = find;
    this.speed = new LineChart(find("speed-chart"), ["here", "cloud"], "gain");
    this.window = new LineChart(find("window-chart"), ["here"]);
    this.latest = null;
  }

  begin() {
    this.beganAt = performance.now();
    this.lastPointS = -Infinity;
    this.latest = null;
    this.widest = 0;
    this.speed.clear();
    this.window.clear();
  }

  // Many chunks may come between two frames of the screen: only the newest is drawn.
  show(speculation) {
    const first = this.latest === null;
    this.latest = speculation;
    this.latestAtS = (performance.now() - this.beganAt) / 1000;
    if (first || !this.drawing) this.drawing = requestAnimationFrame(() => this.#draw());
  }

  redraw() {
    this.speed.draw();
    this.window.draw();
  }

  #draw() {
    this.drawing = 0;
    const s = this.latest;
    if (s === null) return;
    const rate = s.tokens_per_second || null;
    const cloud = s.cloud_tokens_per_second ?? null;
    const tokens = Math.max(1, s.tokens);
    this.#speed(rate, cloud);
    this.#set("acceptance", s.acceptance == null ? "–" : `${Math.round(100 * s.acceptance)} %`);
    this.#fill("acceptance-bar", s.acceptance ?? 0);
    this.#set("steps", (s.steps / tokens).toFixed(2));
    this.#fill("steps-bar", s.steps / tokens);
    this.widest = Math.max(this.widest, s.window);
    this.#set("window", `${s.window} now, ${this.widest} at most`);
    this.#set("drafter", s.drafter || "none");
    this.#set("round-trip", s.round_trip_ms == null ? "–" : `${s.round_trip_ms.toFixed(1)} ms`);
    this.#set("uplink", `${Math.round(s.uplink_bytes / tokens)} B`);
    this.#set("downlink", `${Math.round(s.downlink_bytes / tokens)} B`);
    if (this.latestAtS - this.lastPointS < BETWEEN_POINTS_S) return;
    this.lastPointS = this.latestAtS;
    if (rate !== null && s.tokens >= MIN_TOKENS) this.speed.add(this.latestAtS, [rate, cloud]);
    this.window.add(this.latestAtS, [s.window]);
  }

  #speed(rate, cloud) {
    const fastest = Math.max(rate ?? 0, cloud ?? 0) || 1;
    this.#set("rate", rate === null ? "–" : `${rate.toFixed(1)} tok/s`);
    this.#set("cloud-rate", cloud === null ? "not known yet" : `${cloud.toFixed(1)} tok/s`);
    this.#fill("race-here", (rate ?? 0) / fastest);
    this.#fill("race-cloud", (cloud ?? 0) / fastest);
    if (rate === null || cloud === null) return;
    this.#set("ratio", `${(rate / cloud).toFixed(2)}×`);
    this.#set("ratio-text", "as fast as the cloud alone");
  }

  #set(id, text) {
    this.find(id).textContent = text;
  }

  #fill(id, share) {
    this.find(id).style.width = `${100 * Math.min(1, share)}%`;
  }
}

function count(n, word) {
  return `${n} ${word}${n === 1 ? "" : "s"}`;
}

// One line on how an answer came about.
export function summary(speculation, seconds) {
  if (speculation === null) return `${seconds.toFixed(1)} s`;
  const { tokens, steps, tokens_per_second: rate, cloud_tokens_per_second: cloud } = speculation;
  const parts = [`${count(tokens, "token")} in ${count(steps, "target step")}`, `${rate.toFixed(1)} tok/s`];
  if (cloud && rate) parts.push(`${(rate / cloud).toFixed(2)}× cloud alone`);
  return parts.join(" · ");
}
