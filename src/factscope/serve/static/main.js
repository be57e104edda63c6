// The page: three views of one fact. The address holds the state, so that a link restores it.

import { get } from "./api.js";
import { compareState, setCompare, startCompare } from "./compare.js";
import { $, el, fill, visible } from "./dom.js";
import { chooseLayer, drawLayers, editState, setEdit, startEdit } from "./edit.js";
import { prompt, startPrompt } from "./prompt.js";
import { current, setTrace, startTrace, trace, traceState } from "./trace.js";

const VIEWS = ["trace", "edit", "compare"];
let view = "trace";
let savedHash = null; // To tell our own changes of the address from the user's.

function state() {
  if (view === "compare") return compareState();
  if (view === "edit") return { ...prompt.body, ...editState() };
  return { ...prompt.body, ...traceState(), traced: current.body !== null };
}

function saveState() {
  savedHash = `#/${view}/${encodeURIComponent(JSON.stringify(state()))}`;
  history.replaceState(null, "", savedHash);
}

function readHash() {
  const [, name, encoded] = location.hash.match(/^#\/(\w+)(?:\/(.*))?$/) ?? [];
  let saved = null;
  try {
    saved = encoded ? JSON.parse(decodeURIComponent(encoded)) : null;
  } catch { /* A malformed address is treated as empty. */ }
  return { name: VIEWS.includes(name) ? name : "trace", saved: saved && typeof saved === "object" ? saved : null };
}

function showView(name) {
  view = name;
  for (const other of VIEWS) $(`view-${other}`).hidden = other !== name;
  $("fact").hidden = name === "compare";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · factscope`;
  if (name === "edit") drawLayers();
}

async function restoreState() {
  const { name, saved } = readHash();
  showView(name);
  if (!saved) return;
  if (name === "compare") {
    await setCompare(saved);
    return;
  }
  if (typeof saved.prompt === "string") prompt.set(saved.prompt, String(saved.subject ?? ""), saved.occurrence);
  if (name === "edit") await setEdit(saved);
  if (name === "trace") {
    setTrace(saved);
    if (saved.traced) await trace();
  }
}

function editLayer(layer) {
  chooseLayer(layer);
  showView("edit");
  saveState();
  $("edit-form").elements.target.focus();
}

async function copyLink() {
  saveState();
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy link"; }, 1500);
}

async function updateQueue() {
  const { jobs } = await get("/api/queue").catch(() => ({ jobs: 0 }));
  $("queue").hidden = jobs < 2;
  $("queue").textContent = `${jobs} jobs in the queue`;
}

async function start() {
  const about = await get("/api/about");
  $("model").textContent = about.model;
  $("version").textContent = about.version;
  startPrompt();
  startTrace(about, editLayer, saveState);
  startEdit(about, saveState);
  fill($("examples"), "Examples: ", about.examples.map(({ prompt: text, subject }) =>
    el("button", { type: "button", className: "chip", title: text, onclick: () => { prompt.set(text, subject); saveState(); } }, visible(subject))));
  prompt.set(about.examples[0].prompt, about.examples[0].subject);
  $("copy").addEventListener("click", copyLink);
  window.addEventListener("hashchange", () => { if (location.hash !== savedHash) restoreState(); });
  await startCompare(about, saveState);
  if (readHash().name !== "edit") setEdit(); // Load the session's edits.
  await restoreState();
  document.body.dataset.ready = "yes";
  setInterval(updateQueue, 5000);
}

start().catch((error) => {
  fill($("main"), el("p", { className: "card", role: "alert" }, `The page could not be started: ${error.message}`));
});
