// Questions and answers on the page.

import { byId, copyButton, icon, make } from "./dom.js";

const LONG_CHARACTERS = 900;

/** A turn's element. `actions` has `retry()` and `moveToNew(question)`; `last`: it may be answered again. */
export function turnElement(turn, { last, actions }) {
  const element = make("article", { class: "turn", "data-position": turn.position, "data-state": turn.state, "aria-label": `Turn ${turn.position}` });
  element.append(questionElement(turn.question));
  const answer = make("div", { class: "answer prose" });
  element.append(answer);
  if (turn.state === "answering") {
    element.setAttribute("aria-busy", "true");
    if (!turn.answer_html) answer.append(waiting());
  }
  if (turn.answer_html) showAnswer(element, turn.answer_html);
  if (turn.state !== "answering") addFoot(element, turn, last, actions);
  return element;
}

/** Put an answer's HTML, which the server has made safe, into its turn. */
export function showAnswer(element, html) {
  element.querySelector(".answer").innerHTML = html;
}

function questionElement(text) {
  const element = make("div", { class: "question" }, make("span", { class: "visually-hidden", text: "You: " }), make("div", { class: "question-text", text }));
  if (text.length > LONG_CHARACTERS) {
    element.classList.add("long");
    const button = make("button", { type: "button", class: "quiet small", "aria-expanded": "false", text: "Show all" });
    button.addEventListener("click", () => {
      const open = element.classList.toggle("open");
      button.textContent = open ? "Show less" : "Show all";
      button.setAttribute("aria-expanded", String(open));
    });
    element.append(button);
  }
  return element;
}

function waiting() {
  return make("span", { class: "waiting", role: "img", "aria-label": "Waiting for the answer" }, make("i"), make("i"), make("i"));
}

function addFoot(element, turn, last, actions) {
  for (const block of element.querySelectorAll(".answer pre")) {
    const frame = make("div", { class: "code" });
    block.replaceWith(frame);
    frame.append(block, copyButton("Copy this code", "copy-code", () => block.textContent));
  }
  const again = () => make("button", { type: "button", class: "small retry", click: actions.retry }, icon("again"), make("span", { text: "Try again" }));
  if (turn.answer || turn.state === "done" || turn.state === "stopped") {
    const foot = make("div", { class: "turn-foot" });
    if (turn.answer) foot.append(copyButton("Copy this answer", "copy-answer", () => turn.answer));
    if (last && turn.state === "stopped") foot.append(again());
    const note = noteOf(turn);
    if (note) foot.append(make("span", { class: "hint", text: note }));
    element.append(foot);
  }
  if (turn.problem) {
    const notice = make("div", { class: "notice error", role: "alert" }, make("p", { text: turn.problem.message }));
    if (!turn.answer && !last) notice.append(make("p", { class: "hint", text: "This message was not answered; the model does not see it." }));
    if (last) {
      const full = turn.problem.code === "context_full";
      const action = full
        ? make("button", { type: "button", class: "small move", click: () => actions.moveToNew(turn.question) }, icon("plus"), make("span", { text: "Take it to a new conversation" }))
        : again();
      notice.append(make("div", { class: "actions" }, action));
    }
    element.append(notice);
  }
}

function noteOf(turn) {
  if (turn.state === "stopped") return turn.answer ? "Stopped" : "Stopped before the answer began";
  if (turn.state === "interrupted") return "Broken off";
  if (turn.finish_reason === "length") return "Cut: the answer reached its greatest length";
  return turn.answer ? "" : "The model had nothing to say";
}

const number = (value) => value.toLocaleString("en");
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** The line of figures above the message box. */
export function showCounters(counters) {
  const element = byId("counters");
  element.hidden = counters === null || counters.prompt_tokens === 0;
  if (element.hidden) return;
  const saved = counters.context_tokens - counters.held_slots;
  byId("counters-summary").textContent = saved > 0
    ? `${number(counters.context_tokens)} tokens held in ${number(counters.held_slots)} slots · ${percent(counters.cached_tokens, counters.prompt_tokens)} of prefill avoided`
    : `${number(counters.context_tokens)} tokens · ${percent(counters.cached_tokens, counters.prompt_tokens)} of prefill avoided`;
  const rows = [
    ["Slots held / at full size", `${number(counters.held_slots)} / ${number(counters.context_tokens)}`],
    ["Prompt tokens, all turns", number(counters.prompt_tokens)],
    ["Of these from the cache", `${number(counters.cached_tokens)} (${percent(counters.cached_tokens, counters.prompt_tokens)})`],
    ["Of these from compressed history", number(counters.span_tokens)],
    ["Answer tokens", number(counters.completion_tokens)],
    ["History compressed", counters.compressions === 1 ? "once" : `${counters.compressions} times`],
    ["Quality of compressed history", counters.quality === null ? "–" : counters.quality.toFixed(2)],
    ["First token of the last answer", counters.ttft_s === null ? "–" : `${counters.ttft_s.toFixed(2)} s`],
  ];
  byId("counters-list").replaceChildren(...rows.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
}
