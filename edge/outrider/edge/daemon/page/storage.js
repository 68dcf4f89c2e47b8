// The browser's storage, under names of ours. Where it is switched off, this page's memory stands in.

const PREFIX = "outrider.";
const memory = new Map();

export const kept = isKept();

function isKept() {
  try {
    localStorage.setItem(`${PREFIX}probe`, "1");
    localStorage.removeItem(`${PREFIX}probe`);
    return true;
  } catch {
    return false;
  }
}

// Null: there is none, or it is damaged.
export function read(name) {
  try {
    return JSON.parse((kept ? localStorage.getItem(PREFIX + name) : memory.get(name)) ?? "null");
  } catch {
    return null;
  }
}

// False: there is no room for it.
export function write(name, value) {
  const text = JSON.stringify(value);
  if (!kept) return Boolean(memory.set(name, text));
  try {
    localStorage.setItem(PREFIX + name, text);
    return true;
  } catch {
    return false;
  }
}

export function remove(name) {
  if (kept) localStorage.removeItem(PREFIX + name);
  else memory.delete(name);
}

export function names(beginning) {
  const all = kept ? Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length)) : [...memory.keys()];
  return all.filter((name) => name.startsWith(beginning));
}
