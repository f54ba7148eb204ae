// The page: which conversation is open, sending and stopping.

import { ApiError, call, follow } from "./api.js";
import { announce, ask, byId, showError } from "./dom.js";
import { closeDrawer, setUpDrawer, showList } from "./sidebar.js";
import { showSignIn } from "./signin.js";
import { showAnswer, showCounters, turnElement } from "./turns.js";

const RECONNECT_AFTER_MS = [500, 1000, 2000, 4000, 8000, 8000, 8000];
const AT_END_PX = 80;

const coarse = window.matchMedia("(pointer: coarse)");
const message = byId("message");

const state = {
  session: null,
  /** All of the user's, the latest first. */
  conversations: [],
  /** The open one with its turns; null: a new one, which is made with its first message. */
  current: null,
  answering: false,
};

/** Stop listening to the answer that is shown; the server goes on making it. */
let leaveAnswer = () => {};

const actions = { retry: () => answer("POST", "/retry"), moveToNew };

// -- which conversation ---------------------------------------------------------------------------

async function start() {
  state.session = await call("GET", "/session");
  if (state.session.user === null) {
    showSignIn(state.session, start);
    return;
  }
  byId("user").textContent = state.session.user;
  byId("app").hidden = false;
  await refreshList();
  await openFromAddress();
  if (!coarse.matches) message.focus();
}

async function refreshList() {
  state.conversations = await call("GET", "/conversations");
  showList(state.conversations, state.current?.id);
}

async function openFromAddress() {
  const id = location.hash.slice(1);
  if (id && state.current?.id === id) return;
  leaveAnswer();
  showError("problem", null);
  if (!id) {
    show(null);
    return;
  }
  try {
    show(await call("GET", `/conversations/${encodeURIComponent(id)}`));
  } catch (error) {
    if (error.status === 404) {
      history.replaceState(null, "", location.pathname);
      show(null);
    }
    report(error);
    return;
  }
  if (isAnswering(state.current)) await answer("GET", "/stream");
}

const isAnswering = (conversation) => conversation?.turns.at(-1)?.state === "answering";

/** Show a conversation as the server told it; null: an empty new one. */
function show(conversation) {
  state.current = conversation;
  const turns = conversation?.turns ?? [];
  const title = conversation?.title ?? "New conversation";
  byId("title").textContent = title;
  document.title = conversation ? `${title} – Chat` : "Chat";
  byId("rename").hidden = byId("delete").hidden = conversation === null;
  byId("empty").hidden = turns.length > 0;
  byId("turns").replaceChildren(...turns.map((turn, at) => turnElement(turn, { last: at === turns.length - 1, actions })));
  showCounters(conversation?.counters ?? null);
  showList(state.conversations, conversation?.id);
  setAnswering(isAnswering(conversation));
  scrollToEnd();
}

function newConversation() {
  closeDrawer(false);
  leaveAnswer();
  if (location.hash) history.pushState(null, "", location.pathname);
  showError("problem", null);
  show(null);
  message.focus();
}

// -- sending --------------------------------------------------------------------------------------

async function send() {
  const text = message.value;
  if (!text.trim() || state.answering) return;
  showError("problem", null);
  const most = state.session.max_message_characters;
  if ([...text].length > most) {
    report(new ApiError(413, "too_large", `This message has ${[...text].length.toLocaleString("en")} characters; at most ${most.toLocaleString("en")} are taken.`));
    return;
  }
  try {
    if (state.current === null) {
      setAnswering(true);
      const made = await call("POST", "/conversations");
      history.pushState(null, "", `#${made.id}`);
      state.current = made;
    }
  } catch (error) {
    setAnswering(false);
    report(error);
    return;
  }
  setMessage("");
  await answer("POST", "/messages", { text });
}

/** Ask for an answer, or follow one, and show it as it grows. A message that was not kept goes back to its box. */
async function answer(method, path, body) {
  const { id } = state.current;
  const isOpen = () => state.current?.id === id;
  showError("problem", null);
  setAnswering(true);
  let begun = false;
  let ended = false;
  const listening = new AbortController();
  leaveAnswer = () => {
    // Not before the server has the message.
    if (begun) listening.abort();
  };

  const onEvent = (name, data) => {
    if (name === "turn") {
      begun = true;
      if (isOpen()) beginTurn(data);
    } else if (name === "answer" && isOpen()) {
      const atEnd = isAtEnd();
      showAnswer(byId("turns").lastElementChild, data.html);
      if (atEnd) scrollToEnd();
    } else if (name === "end") {
      ended = true;
      if (isOpen()) endTurn(data);
    }
  };

  try {
    await follow(method, `/conversations/${id}${path}`, body, onEvent, listening.signal);
  } catch (error) {
    if (listening.signal.aborted) return;
    if (!begun) {
      if (body && isOpen()) setMessage(body.text);
      if (isOpen()) setAnswering(false);
      // Busy in another tab: show what that tab sees.
      if (error.code === "busy" && isOpen()) await reopen();
      report(error);
      return;
    }
  }
  if (!ended) await reconnect(id, onEvent, () => ended);
  await refreshList().catch(report);
}

/** The stream broke off, not the answer: look for it until the server is there again. */
async function reconnect(id, onEvent, ended) {
  for (const delay of RECONNECT_AFTER_MS) {
    if (ended() || state.current?.id !== id) return;
    try {
      const conversation = await call("GET", `/conversations/${id}`);
      if (isAnswering(conversation)) {
        await follow("GET", `/conversations/${id}/stream`, undefined, onEvent);
      } else {
        showError("problem", null);
        onEvent("end", conversation);
      }
    } catch (error) {
      if (error.status === 401 || error.status === 404) {
        report(error);
        return;
      }
      showError("problem", new Error("The connection is lost; trying to reach the server again …"));
    }
    if (!ended()) await new Promise((resolve) => { setTimeout(resolve, delay); });
  }
  if (!ended() && state.current?.id === id) {
    setAnswering(false);
    showError("problem", new Error("The chat server does not answer. Your message is kept: reload the page later."));
  }
}

function beginTurn({ position, question }) {
  const turn = { position, question, answer: "", answer_html: "", state: "answering", problem: null, finish_reason: null };
  const element = turnElement(turn, { last: true, actions });
  const shown = byId("turns").querySelector(`[data-position="${position}"]`);
  // Only the last turn can be tried again.
  for (const button of byId("turns").querySelectorAll(".retry, .move")) button.remove();
  if (shown) shown.replaceWith(element);
  else byId("turns").append(element);
  byId("empty").hidden = true;
  announce("Answering");
  scrollToEnd();
}

function endTurn(conversation) {
  const atEnd = isAtEnd();
  const turn = conversation.turns.at(-1);
  const byTitle = state.current.title;
  state.current = conversation;
  byId("turns").querySelector(`[data-position="${turn.position}"]`)?.replaceWith(turnElement(turn, { last: true, actions }));
  if (conversation.title !== byTitle) byId("title").textContent = conversation.title;
  document.title = `${conversation.title} – Chat`;
  byId("rename").hidden = byId("delete").hidden = false;
  showCounters(conversation.counters);
  setAnswering(false);
  announce({ done: "Answer complete", stopped: "Stopped" }[turn.state] ?? "The answer failed");
  if (atEnd) scrollToEnd();
}

async function stop() {
  if (!state.answering || state.current === null) return;
  await call("POST", `/conversations/${state.current.id}/stop`).catch(report);
}

async function moveToNew(question) {
  newConversation();
  setMessage(question);
}

/** Load the open conversation again and follow its answer. */
async function reopen() {
  const conversation = await call("GET", `/conversations/${state.current.id}`);
  show(conversation);
  if (isAnswering(conversation)) answer("GET", "/stream");
}

// -- the rest of the page -------------------------------------------------------------------------

function report(error) {
  if (error.status === 401) {
    // What is being written stays in its box.
    call("GET", "/session").then((session) => showSignIn(session, start), (other) => showError("problem", other));
    return;
  }
  showError("problem", error);
}

function setAnswering(value) {
  const hadFocus = document.activeElement === byId("stop");
  state.answering = value;
  byId("send").hidden = value;
  byId("stop").hidden = !value;
  if (hadFocus && !value) message.focus();
}

function setMessage(text) {
  message.value = text;
  fitMessage();
}

function fitMessage() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

const scrolled = byId("scroll");
const isAtEnd = () => scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < AT_END_PX;
const scrollToEnd = () => { scrolled.scrollTop = scrolled.scrollHeight; };

async function rename() {
  byId("rename-text").value = state.current.title;
  if (!(await ask(byId("rename-dialog")))) return;
  const renamed = await call("PATCH", `/conversations/${state.current.id}`, { title: byId("rename-text").value });
  state.current.title = renamed.title;
  byId("title").textContent = renamed.title;
  document.title = `${renamed.title} – Chat`;
  await refreshList();
}

async function remove() {
  byId("delete-name").textContent = state.current.title;
  if (!(await ask(byId("delete-dialog")))) return;
  await call("DELETE", `/conversations/${state.current.id}`);
  announce("Deleted");
  newConversation();
  await refreshList();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("input", fitMessage);
message.addEventListener("keydown", (event) => {
  // On phones Enter starts a new line, as in their other programs; a candidate of an input method is not sent.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !coarse.matches) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", newConversation);
byId("rename").addEventListener("click", () => rename().catch(report));
byId("delete").addEventListener("click", () => remove().catch(report));
byId("sign-out").addEventListener("click", async () => {
  await call("POST", "/sign-out").catch(report);
  // A fresh page: nothing of this user stays in it.
  location.href = location.pathname;
});
byId("skip").addEventListener("click", (event) => {
  // The address names the conversation.
  event.preventDefault();
  message.focus();
});
for (const button of document.querySelectorAll("[data-cancel]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
window.addEventListener("popstate", () => openFromAddress().catch(report));
setUpDrawer();
start().catch((error) => {
  byId("app").hidden = false;
  report(error);
});
