// Chats as a file: all of them out, and in again, here or in another browser.

export class Transfer {
  // `taken` is called after chats came in.
  constructor(find, chats, taken) {
    find("export").addEventListener("click", () => save(chats.exported(), "outrider-chats.json"));
    find("import").addEventListener("click", () => find("import-file").click());
    find("import-file").addEventListener("change", async ({ target }) => {
      const [file] = target.files;
      target.value = ""; // the same file may be chosen again
      if (!file) return;
      try {
        const count = chats.import(await file.text());
        find("import-note").textContent = `${count} ${count === 1 ? "chat" : "chats"} imported.`;
        taken();
      } catch {
        find("import-note").textContent = "This is no file of chats that this page exported.";
      }
    });
  }
}

function save(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
