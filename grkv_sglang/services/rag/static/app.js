// Signing in, and the controls of the page.

import * as api from "./api.js";
import * as documents from "./documents.js";
import { megabytes } from "./format.js";
import * as questions from "./questions.js";

const $ = (id) => document.getElementById(id);

function showSignIn(problem = "") {
  documents.stop();
  questions.stop();
  $("signed-in").hidden = true;
  $("sign-in").hidden = false;
  $("sign-in-problem").textContent = problem;
  $("sign-in-problem").hidden = !problem;
  $("key").value = "";
  $("key").focus();
}

function signOut(problem) {
  api.key.forget();
  showSignIn(problem);
}

async function signIn(key) {
  api.key.set(key);
  let me;
  try {
    me = await api.me();
  } catch (error) {
    if (error.status === 401) api.key.forget();
    return showSignIn(error.message);
  }
  $("tenant").textContent = me.tenant;
  $("accepted").textContent = `txt, md, html, pdf up to ${megabytes(me.max_upload_bytes)}`;
  $("question").maxLength = me.max_question_characters;
  $("sign-in").hidden = true;
  $("signed-in").hidden = false;
  documents.start(me, signOut);
  $("question").focus();
}

$("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn($("key").value.trim());
});
$("sign-out").addEventListener("click", () => signOut());

// The box grows with the question.
const question = $("question");
function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}
question.addEventListener("input", grow);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = question.value.trim();
  if (!words || $("send").disabled) return;
  $("send").disabled = true;
  question.value = "";
  grow();
  const answered = await questions.ask(words, documents.chosenIds());
  // What was not answered can be asked again without typing it again.
  if (!answered && !question.value) question.value = words;
  grow();
  $("send").disabled = false;
  documents.refresh();
});

$("files").addEventListener("change", () => {
  documents.uploadFiles([...$("files").files]);
  $("files").value = "";
});
$("choose").addEventListener("click", () => $("files").click());

// Files may be dropped anywhere.
const drop = $("drop");
let depth = 0;
const hasFiles = (event) => !$("signed-in").hidden && event.dataTransfer?.types.includes("Files");
addEventListener("dragenter", (event) => {
  if (hasFiles(event)) drop.classList.toggle("over", ++depth > 0);
});
addEventListener("dragleave", (event) => {
  if (hasFiles(event)) drop.classList.toggle("over", --depth > 0);
});
addEventListener("dragover", (event) => {
  if (hasFiles(event)) event.preventDefault();
});
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  depth = 0;
  drop.classList.remove("over");
  documents.uploadFiles([...event.dataTransfer.files]);
});

// A link may carry the key behind #, where no server sees it. It is taken out of the address at once.
const given = new URLSearchParams(location.hash.slice(1)).get("key");
if (given) history.replaceState(null, "", location.pathname);
const known = given || api.key.get();
if (known) signIn(known);
else showSignIn();
