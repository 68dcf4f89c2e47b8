// Copying. Browsers have a clipboard only on this machine's own addresses and over TLS; elsewhere a selection does.

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "hidden";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// Copies, and says so on the button for a moment.
export async function copyFor(button, text) {
  const before = button.textContent;
  try {
    await copy(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
