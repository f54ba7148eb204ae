// The list of documents, uploads, and what is chosen to ask about.

import * as api from "./api.js";
import { count, number } from "./format.js";

const SOON_MS = 1500;
const LATER_MS = 15000;
const $ = (id) => document.getElementById(id);

const chosen = new Set();
let listed = [];
let timer = 0;
let limits = { max_upload_bytes: Infinity };
let onSignedOut = () => {};

// Documents to answer from; none: all.
export const chosenIds = () => [...chosen];

export function start(me, signedOut) {
  limits = me;
  onSignedOut = signedOut;
  refresh();
}

export function stop() {
  clearTimeout(timer);
  chosen.clear();
  listed = [];
  $("documents").replaceChildren();
  $("uploads").replaceChildren();
  showScope();
}

export async function refresh() {
  clearTimeout(timer);
  try {
    listed = await api.listDocuments();
    showProblem("");
  } catch (error) {
    if (error.status === 401) return onSignedOut(error.message);
    showProblem(error.message);
  }
  show();
  const busy = listed.some((item) => !["ready", "failed"].includes(item.status));
  timer = setTimeout(refresh, busy ? SOON_MS : LATER_MS);
}

function showProblem(words) {
  $("documents-problem").textContent = words;
  $("documents-problem").hidden = !words;
}

function show() {
  const ids = new Set(listed.map((item) => item.id));
  for (const id of chosen) if (!ids.has(id)) chosen.delete(id);
  const list = $("documents");
  const rows = new Map([...list.children].map((row) => [row.dataset.id, row]));
  for (const [id, row] of rows) if (!ids.has(id)) row.remove();
  // Rows are kept, so that a focused control stays focused.
  listed.forEach((item, index) => {
    const row = rows.get(item.id) ?? newRow(item);
    fill(row, item);
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
  });
  $("no-documents").hidden = listed.length > 0;
  $("documents-count").textContent = listed.length ? number(listed.length) : "";
  showScope();
}

function newRow(item) {
  const row = $("document-template").content.firstElementChild.cloneNode(true);
  row.dataset.id = item.id;
  const box = row.querySelector(".choose-document");
  box.setAttribute("aria-label", `Answer from ${item.name}`);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(item.id);
    else chosen.delete(item.id);
    showScope();
  });
  const remove = row.querySelector(".delete");
  remove.setAttribute("aria-label", `Delete ${item.name}`);
  remove.addEventListener("click", () => askToDelete(item));
  row.querySelector(".again").addEventListener("click", () => act(() => api.warmDocument(item.id)));
  return row;
}

function fill(row, item) {
  row.className = `document ${item.status}`;
  row.querySelector(".document-name").textContent = item.name;
  const facts = [item.kind.toUpperCase()];
  if (item.num_pages) facts.push(count(item.num_pages, "page"));
  if (item.num_sections) facts.push(count(item.num_sections, "section"), count(item.tokens, "token"));
  row.querySelector(".document-facts").textContent = facts.join(" · ");
  row.querySelector(".state-words").textContent = stateWords(item);
  const progress = row.querySelector(".document-progress");
  progress.hidden = !["indexing", "compressing"].includes(item.status);
  if (item.status === "compressing" && item.num_sections > 1) {
    progress.max = item.num_sections;
    progress.value = item.num_finished;
  } else {
    progress.removeAttribute("value");
  }
  progress.setAttribute("aria-label", `Progress of ${item.name}`);
  const problem = row.querySelector(".document-problem");
  problem.textContent = item.problem ?? "";
  problem.hidden = !item.problem;
  row.querySelector(".again").hidden = item.status !== "failed";
}

function stateWords(item) {
  switch (item.status) {
    case "waiting":
      return "Waiting";
    case "indexing":
      return "Indexing";
    case "compressing":
      return item.num_sections > 1
        ? `Compressing: ${item.num_finished} of ${item.num_sections} sections`
        : "Compressing";
    case "failed":
      return "Not compressed";
    default: {
      if (item.quality === null) return "Ready, too short to compress";
      return `Ready: ${number(item.prefix_tokens)} tokens in ${number(item.prefix_slots)} slots, quality ${item.quality.toFixed(2)}`;
    }
  }
}

function showScope() {
  const names = listed.filter((item) => chosen.has(item.id)).map((item) => item.name);
  const words = { 0: "From all documents", 1: `From ${names[0]}` };
  $("scope").textContent = words[names.length] ?? `From ${names.length} documents`;
}

async function act(action) {
  try {
    await action();
  } catch (error) {
    showProblem(error.message);
    return;
  }
  refresh();
}

function askToDelete(item) {
  const dialog = $("confirm-delete");
  $("confirm-name").textContent = item.name;
  dialog.returnValue = "cancel";
  dialog.onclose = () => dialog.returnValue === "delete" && act(() => api.deleteDocument(item.id));
  dialog.showModal();
}

// Uploads, one after the other.

let queue = Promise.resolve();

export function uploadFiles(files) {
  for (const file of files) {
    const line = document.createElement("li");
    line.textContent = `${file.name}: waiting`;
    $("uploads").append(line);
    queue = queue.then(() => uploadOne(file, line));
  }
}

async function uploadOne(file, line) {
  const progress = document.createElement("progress");
  progress.setAttribute("aria-label", `Upload of ${file.name}`);
  progress.value = 0;
  line.replaceChildren(`${file.name}: uploading`, progress);
  try {
    if (file.size > limits.max_upload_bytes) {
      throw new Error(`It is larger than ${Math.round(limits.max_upload_bytes / 1e6)} MB.`);
    }
    const { isNew, document: added } = await api.upload(file, (share) => {
      progress.value = share;
      if (share === 1) line.firstChild.textContent = `${file.name}: reading`;
    });
    if (isNew) line.remove();
    else failed(line, `${file.name} is there already, as ${added.name}.`, "");
  } catch (error) {
    failed(line, `${file.name}: ${error.message}`, "error");
  }
  await refresh();
}

function failed(line, words, kind) {
  line.className = "failed";
  const text = document.createElement("p");
  text.className = `notice ${kind}`;
  text.setAttribute("role", "alert");
  text.textContent = words;
  const close = document.createElement("button");
  close.className = "quiet icon";
  close.setAttribute("aria-label", "Dismiss");
  close.textContent = "×";
  close.addEventListener("click", () => line.remove());
  line.replaceChildren(text, close);
}
