// Before the first paint, so that nothing flashes: the theme, and how drafts are marked. Settings change them later.

(() => {
  const root = document.documentElement.dataset;
  root.marks = "subtle";
  try {
    const { theme = "", marks = "" } = JSON.parse(localStorage.getItem("outrider.settings") ?? "{}");
    if (theme) root.theme = theme;
    if (marks) root.marks = marks;
  } catch {
    // a browser that keeps nothing, or what it kept is damaged: the defaults do
  }
})();
