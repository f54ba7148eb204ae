// Small helpers for making elements and for what the page says without showing it.

export const byId = (id) => document.getElementById(id);

/** An element: `make("p", { class: "hint", text: "..." }, child, ...)`; functions become listeners. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") element.textContent = value;
    else if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** One of the page's icons. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** Said by screen readers. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Show `error` in the notice with this id; null hides it. */
export function showError(id, error) {
  const notice = byId(id);
  notice.hidden = error === null;
  notice.textContent = error === null ? "" : error.message;
}

/** Open a dialog; true once it is confirmed, false once it is left. */
export function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    // A dialog that is opened again at once still hears of its last closing.
    dialog.onclose = () => dialog.open || resolve(dialog.returnValue === "yes");
  });
}

export async function copyText(text) {
  // Browsers give the clipboard only to https and localhost; elsewhere the old way still works.
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea", { class: "visually-hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("The browser does not allow copying here.");
}

/** A button that copies what `text` gives and says so. */
export function copyButton(label, className, text) {
  const word = make("span", { text: "Copy" });
  const button = make("button", { type: "button", class: `quiet small ${className}`, "aria-label": label }, icon("copy"), word);
  button.addEventListener("click", async () => {
    try {
      await copyText(text());
      word.textContent = "Copied";
      announce("Copied");
    } catch (error) {
      word.textContent = "Not copied";
      announce(error.message);
    }
    setTimeout(() => { word.textContent = "Copy"; }, 2000);
  });
  return button;
}
