// The live panels: what speculation gains, how far it runs ahead, and what it costs on the link.

import { LineChart } from "./chart.js";

const BETWEEN_POINTS_S = 0.05;
const MIN_TOKENS = 8; // a rate over fewer says nothing
const LITTLE = 1.15; // times as fast, below which the reader is owed the reason
const PLAIN =
  "One step checks all the guesses that wait and adds a token. Each guess that the cloud’s model would have written " +
  "itself saves a step; the others are thrown away.";

export class Panels {
  constructor(find) {
    this.find = find;
    this.speed = new LineChart(find("speed-chart"), ["here", "cloud"], "gain");
    this.window = new LineChart(find("window-chart"), ["here"]);
    this.latest = null;
  }

  // Whose drafter and target these are, before the first answer says so.
  name({ drafter, target }) {
    if (drafter) this.#set("drafter", drafter);
    if (target) this.#set("target", target);
  }

  // An answer of before, or null for none; its course is not kept.
  recall(speculation) {
    this.begin();
    this.find("details").classList.toggle("recalled", true);
    if (speculation === null) this.#empty();
    else this.show(speculation);
  }

  begin(target = "") {
    this.name({ target });
    this.find("details").classList.toggle("recalled", false);
    this.beganAt = performance.now();
    this.lastPointS = -Infinity;
    this.latest = null;
    this.widest = null;
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
    this.#steps(s, rate, cloud);
    this.#set("acceptance", s.acceptance == null ? "–" : `${Math.round(100 * s.acceptance)} %`);
    this.#set("steps", (s.steps / tokens).toFixed(2));
    this.widest = Math.max(this.widest ?? 0, s.window);
    this.#set("window", `${s.window} now, ${this.widest} at most`);
    this.#set("drafter", s.drafter || "none");
    this.#set("round-trip", s.round_trip_ms == null ? "–" : `${s.round_trip_ms.toFixed(1)} ms`);
    this.#set("uplink", `${Math.round(s.uplink_bytes / tokens)} B`);
    this.#set("downlink", `${Math.round(s.downlink_bytes / tokens)} B`);
    if (this.find("details").classList.contains("recalled")) return;
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

  #steps({ tokens, steps, accepted, accepted_cloud: inCloud }, rate, cloud) {
    const most = Math.max(tokens, steps, 1);
    this.#set("steps-count", String(steps));
    this.#set("tokens-count", String(tokens));
    this.#fill("steps-here", steps / most);
    this.#fill("steps-cloud", tokens / most);
    const saved = accepted + inCloud;
    const who = inCloud ? `${accepted} were guessed on this machine, ${inCloud} by a drafter in the cloud` : "they were guessed on this machine";
    const why = rate && cloud && tokens >= MIN_TOKENS && rate < LITTLE * cloud ? littleWords(saved / most, cloud) : "";
    this.#set("plain", saved ? `${count(tokens, "token")}, of which ${saved} cost no step of their own: ${who}, and the model agreed.${why}` : PLAIN);
  }

  #empty() {
    for (const id of ["rate", "cloud-rate", "acceptance", "steps", "window", "round-trip", "uplink", "downlink", "steps-count", "tokens-count"]) this.#set(id, "–");
    for (const id of ["race-here", "race-cloud", "steps-here", "steps-cloud"]) this.#fill(id, 0);
    this.#set("ratio", "");
    this.#set("ratio-text", "send a message to see what drafting gains");
    this.#set("plain", PLAIN);
  }

  #set(id, text) {
    this.find(id).textContent = text;
  }

  #fill(id, share) {
    this.find(id).style.width = `${100 * Math.min(1, share)}%`;
  }
}

// Why drafting gains little: few guesses are right, or a step is too cheap to be worth saving.
function littleWords(share, cloud) {
  if (share < 0.2) return " Few guesses were right, so little time was saved.";
  return ` A step takes only about ${(1000 / cloud).toFixed(0)} ms here, so there is little time to save; a larger model gains more.`;
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
