// The list of chats: to open, rename and delete them.

const SVG = "http://www.w3.org/2000/svg";

export class ChatList {
  // `on` has the functions open(id), rename(id, title) and remove(id).
  constructor(list, on) {
    this.list = list;
    this.on = on;
  }

  show(chats, current) {
    if (this.list.querySelector("input")) return; // somebody is typing a name
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset : null;
    this.list.replaceChildren(...chats.map((chat) => this.#item(chat, chat.id === current)));
    if (focused) this.list.querySelector(`[data-id="${focused.id}"][data-act="${focused.act}"]`)?.focus();
  }

  #item({ id, title }, isCurrent) {
    const item = document.createElement("li");
    const open = this.#button(id, "open", title, () => this.on.open(id));
    open.textContent = title;
    open.title = title;
    if (isCurrent) open.setAttribute("aria-current", "true");
    const rename = this.#button(id, "rename", `Rename ${title}`, () => this.#rename(item, id, title));
    const remove = this.#button(id, "delete", `Delete ${title}`, () => this.on.remove(id));
    rename.append(icon("rename"));
    remove.append(icon("delete"));
    item.append(open, rename, remove);
    return item;
  }

  #button(id, act, label, run) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = act;
    Object.assign(button.dataset, { id, act });
    button.setAttribute("aria-label", label);
    button.addEventListener("click", run);
    return button;
  }

  #rename(item, id, title) {
    const field = document.createElement("input");
    field.value = title;
    field.maxLength = 60;
    field.setAttribute("aria-label", "Name of the chat");
    let isOpen = true;
    const close = (name) => {
      if (!isOpen) return; // the field that goes loses its focus, too
      isOpen = false;
      field.remove();
      this.on.rename(id, name);
      this.list.querySelector(`[data-id="${id}"][data-act="open"]`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") close(field.value);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close(title);
    });
    field.addEventListener("blur", () => close(field.value));
    item.replaceChildren(field);
    field.select();
  }
}

function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}
