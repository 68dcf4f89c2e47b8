// The versions of the drafters: what is current, what it is compared with, and what was retired and why.

const SHORT = 12; // characters of a version, which is a hash

export class Versions {
  constructor(find) {
    this.card = find("versions-card");
    this.rows = find("versions");
    this.shown = "";
  }

  // Drafters with one version alone say nothing new, and are left out.
  show(versions) {
    const several = new Set(versions.filter((one) => one.state !== "current").map((one) => one.drafter));
    const listed = versions.filter((one) => several.has(one.drafter));
    const now = JSON.stringify(listed);
    if (now === this.shown) return; // nothing flickers, and a screen reader says a change alone
    this.shown = now;
    this.card.hidden = listed.length === 0;
    this.rows.replaceChildren(...listed.flatMap((one) => this.#rowsOf(one)));
  }

  #rowsOf(one) {
    const row = document.createElement("tr");
    row.dataset.state = one.state;
    const hits = one.trials ? `${Math.round(100 * one.acceptance)} %` : "–";
    row.append(...[`${one.drafter} ${one.version.slice(0, SHORT)}`, this.#state(one), hits].map(cell));
    const why = one.texts ? compared(one) : one.why;
    if (!why) return [row];
    const reason = document.createElement("tr");
    reason.className = "why";
    const text = cell(why);
    text.colSpan = 3;
    reason.append(text);
    return [row, reason];
  }

  #state(one) {
    return one.state === "previous" && one.share ? `previous, ${Math.round(100 * one.share)} % of edges` : one.state;
  }
}

function compared(one) {
  const sign = one.difference < 0 ? "−" : "+";
  return `hits ${sign}${Math.abs(one.difference).toFixed(3)} against ${one.against.slice(0, SHORT)} in ${one.texts} texts so far`;
}

function cell(text) {
  const made = document.createElement("td");
  made.textContent = text;
  return made;
}
