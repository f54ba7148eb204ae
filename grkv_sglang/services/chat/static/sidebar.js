// The list of conversations; on narrow screens a drawer.

import { byId, make } from "./dom.js";

const narrow = window.matchMedia("(max-width: 48rem)");

export function showList(conversations, currentId) {
  byId("no-conversations").hidden = conversations.length > 0;
  byId("conversations").replaceChildren(...conversations.map((conversation) => {
    const current = conversation.id === currentId;
    const entry = make("a", { class: "button entry", href: `#${conversation.id}`, title: conversation.title, "aria-current": current ? "page" : null }, make("span", { text: conversation.title }));
    entry.addEventListener("click", () => closeDrawer(false));
    return make("li", {}, entry);
  }));
}

export function setUpDrawer() {
  byId("open-sidebar").addEventListener("click", openDrawer);
  byId("backdrop").addEventListener("click", () => closeDrawer(true));
  byId("sidebar").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && drawerIsOpen()) {
      event.stopPropagation();
      closeDrawer(true);
    }
  });
  narrow.addEventListener("change", () => closeDrawer(false));
}

const drawerIsOpen = () => byId("sidebar").classList.contains("open");

function openDrawer() {
  setDrawer(true);
  byId("new").focus();
}

export function closeDrawer(giveFocusBack) {
  if (!drawerIsOpen()) return;
  setDrawer(false);
  if (giveFocusBack) byId("open-sidebar").focus();
}

function setDrawer(open) {
  byId("sidebar").classList.toggle("open", open);
  byId("backdrop").hidden = !open;
  byId("open-sidebar").setAttribute("aria-expanded", String(open));
  // What lies under the drawer cannot be reached until it is closed.
  byId("conversation").inert = open;
}
