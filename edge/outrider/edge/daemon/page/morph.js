// Making shown nodes like fresh ones while keeping those that stay: what was scrolled, selected or focused remains so.

export function morph(parent, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, i) => {
    const shown = parent.childNodes[i];
    if (shown) patch(shown, node);
    else parent.append(node);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

export function patch(shown, fresh) {
  if (shown.isEqualNode(fresh)) return;
  if (!isLike(shown, fresh)) shown.replaceWith(fresh);
  else if (shown.nodeType === Node.TEXT_NODE) retype(shown, fresh.data);
  else morph(shown, fresh);
}

function isLike(shown, fresh) {
  if (shown.nodeName !== fresh.nodeName) return false;
  if (shown.nodeType === Node.TEXT_NODE) return true;
  const names = shown.getAttributeNames().filter((name) => name !== "open"); // the reader's choice
  return (
    names.length === fresh.getAttributeNames().length &&
    names.every((name) => shown.getAttribute(name) === fresh.getAttribute(name))
  );
}

function retype(text, data) {
  if (data.startsWith(text.data)) text.appendData(data.slice(text.length));
  else text.data = data;
}
