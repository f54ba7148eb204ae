// Questions, streamed answers and their sources.

import * as api from "./api.js";
import { count, pages, served } from "./format.js";

const $ = (id) => document.getElementById(id);
const MARKER = /\[(\d{1,3}(?:\s*,\s*\d{1,3})*)\]/g;

let asked = 0;
const running = new Set();

export async function ask(question, documentIds) {
  const item = $("answer-template").content.firstElementChild.cloneNode(true);
  const part = (name) => item.querySelector(name);
  part(".asked").textContent = question;
  const words = part(".words");
  words.classList.add("streaming");
  $("answers").prepend(item);
  $("no-answers").hidden = true;
  const abort = new AbortController();
  running.add(abort);
  part(".stop").addEventListener("click", () => abort.abort());
  const id = ++asked;
  let sources = [];
  let ended = false;
  tell("Searching and answering.");
  try {
    for await (const [name, data] of api.ask({ question, document_ids: documentIds }, abort.signal)) {
      if (name === "sources") {
        sources = data.sources;
        showSources(part(".sources"), sources, id);
      } else if (name === "text") {
        words.append(data.text);
      } else if (name === "done") {
        ended = true;
        show(item, data, sources, id);
      } else if (name === "error") {
        throw new api.ApiError(0, data.code, data.message);
      }
    }
    if (!ended) throw new api.ApiError(0, "broke_off", "The answer broke off.");
    tell("The answer is complete.");
    return true;
  } catch (error) {
    const stopped = error.name === "AbortError";
    part(".problem").textContent = stopped ? "Stopped." : error.message;
    part(".problem").classList.toggle("error", !stopped);
    part(".problem").hidden = false;
    return stopped;
  } finally {
    running.delete(abort);
    words.classList.remove("streaming");
    part(".stop").remove();
  }
}

export function stop() {
  for (const abort of running) abort.abort();
  $("answers").replaceChildren();
  $("no-answers").hidden = false;
}

function tell(words) {
  $("status").textContent = words;
}

function show(item, answer, sources, id) {
  const words = item.querySelector(".words");
  words.classList.remove("streaming");
  words.innerHTML = answer.html || "<p>(The model said nothing.)</p>"; // sanitised by the service
  linkMarkers(words, sources, id);
  const line = item.querySelector(".served");
  line.textContent = served(answer);
  line.hidden = false;
  for (const number of answer.cited) {
    item.querySelector(`#source-${id}-${number} .cited-tag`).hidden = false;
  }
}

// [1] in the text becomes a link to its source, where there is such a source.
function linkMarkers(root, sources, id) {
  const known = new Set(sources.map((source) => source.number));
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest("a, code, pre")) nodes.push(walker.currentNode);
  for (const node of nodes) {
    const pieces = [];
    let end = 0;
    for (const match of node.data.matchAll(MARKER)) {
      const numbers = match[1].split(",").map(Number);
      if (!numbers.every((number) => known.has(number))) continue;
      pieces.push(node.data.slice(end, match.index), ...numbers.map((number) => link(number, id)));
      end = match.index + match[0].length;
    }
    if (pieces.length) node.replaceWith(...pieces, node.data.slice(end));
  }
}

function link(number, id) {
  const anchor = document.createElement("a");
  anchor.className = "citation";
  anchor.href = `#source-${id}-${number}`;
  anchor.textContent = `[${number}]`;
  anchor.addEventListener("click", (event) => {
    event.preventDefault(); // the address holds no place of an answer that is gone after a reload
    document.getElementById(`source-${id}-${number}`).focus();
  });
  return anchor;
}

function showSources(section, sources, id) {
  section.querySelector("ol").replaceChildren(...sources.map((source) => sourceItem(source, id)));
  section.hidden = sources.length === 0;
}

function sourceItem(source, id) {
  const item = $("source-template").content.firstElementChild.cloneNode(true);
  item.id = `source-${id}-${source.number}`;
  item.querySelector(".marker").textContent = `[${source.number}]`;
  item.querySelector(".source-name").textContent = source.document;
  const [best, ...others] = source.passages;
  const place = [];
  if (source.heading) place.push(source.heading);
  if (best.first_page !== null) place.push(pages(best.first_page, best.last_page));
  if (source.num_sections > 1) {
    const range = pages(source.first_page, source.last_page);
    place.push(`section ${source.section} of ${source.num_sections}${range && ` (${range})`}`);
  }
  place.push(`similarity ${best.score.toFixed(2)}`);
  item.querySelector(".source-place").textContent = place.join(" · ");
  item.querySelector(".best").textContent = flat(best.text);
  const details = item.querySelector("details");
  details.hidden = false;
  details.querySelector("summary").textContent = others.length
    ? `Whole passage and ${count(others.length, "more passage", "more passages")}`
    : "Whole passage";
  details.append(...others.map(quote));
  details.addEventListener("toggle", () => item.classList.toggle("open", details.open));
  return item;
}

function quote(passage) {
  const block = document.createElement("blockquote");
  const place = pages(passage.first_page, passage.last_page);
  block.textContent = (place && `On ${place}: `) + flat(passage.text);
  return block;
}

// Lines of a text file or a page are not the page's.
const flat = (text) => text.replace(/^#{1,6}\s+/gm, "").replace(/\s*\n\s*/g, " ");
