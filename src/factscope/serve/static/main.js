// The page: three views of one fact. The address holds the state, so that a link restores it.

import { get } from "./api.js";
import { compareState, setCompare, startCompare } from "./compare.js";
import { $, el, fill, percent } from "./dom.js";
import { chooseLayer, drawLayers, editIds, editState, setEdit, startEdit, updateEdits } from "./edit.js";
import { prompt, startPrompt } from "./prompt.js";
import { drawStale, setTrace, shownTrace, startTrace, trace, traceForm, traceState } from "./trace.js";

const VIEWS = ["trace", "edit", "compare"];
const SAVE_PAUSE = 300; // Browsers limit how often a page may change its address.
let view = "trace";
let timer;

// `traced` is the request body of the trace that is shown; true if it is that of the form.
function state() {
  if (view === "compare") return compareState();
  if (view === "edit") return editState();
  const form = { ...prompt.body, ...traceState() }, shown = shownTrace();
  return { ...form, traced: JSON.stringify(form) === JSON.stringify(shown) ? true : shown };
}

const addressOf = (values) => `#/${view}/${encodeURIComponent(JSON.stringify(values))}`;

function saveState() {
  clearTimeout(timer);
  history.replaceState(null, "", addressOf(state()));
}

// A new view is a new entry in the history, so that Back returns to the previous one.
function pushView(name) {
  saveState();
  showView(name);
  history.pushState(null, "", addressOf(state()));
}

function onFormChange() {
  drawStale();
  if (view === "edit") drawLayers();
  clearTimeout(timer);
  timer = setTimeout(saveState, SAVE_PAUSE);
}

function readHash() {
  const [, name, encoded] = location.hash.match(/^#\/(\w+)(?:\/(.*))?$/) ?? [];
  let saved = null, readable = true;
  try {
    saved = encoded ? JSON.parse(decodeURIComponent(encoded)) : null;
  } catch {
    readable = false;
  }
  if (saved !== null && (typeof saved !== "object" || Array.isArray(saved))) [saved, readable] = [null, false];
  return { name: VIEWS.includes(name) ? name : "trace", saved, readable };
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

// Show what the address holds. Parts that cannot be read are left out, and the page says so.
async function restoreState() {
  const { name, saved, readable } = readHash();
  $("notice").hidden = readable;
  showView(name);
  if (!saved) return saveState();
  if (typeof saved.prompt === "string") prompt.set(saved.prompt, String(saved.subject ?? ""), saved.occurrence);
  try {
    if (name === "compare") await setCompare(saved);
    if (name === "edit") await setEdit(saved);
    if (name === "trace") {
      setTrace(saved);
      const form = { ...prompt.body, ...traceState() };
      if (saved.traced) await trace(saved.traced === true ? form : saved.traced);
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    $("notice").hidden = false;
  }
  return null;
}

function editLayer(layer) {
  pushView("edit");
  chooseLayer(layer);
  saveState();
  $("edit-form").elements.target.focus();
}

// The link shows the results on the page, whatever is in the form by now. The clipboard exists on
// https and localhost only; elsewhere the link is shown, ready to be copied.
async function copyLink() {
  const shown = view === "trace" ? shownTrace() : null;
  const link = new URL(addressOf(shown ? { ...shown, traced: true } : state()), location.href).href;
  try {
    await navigator.clipboard.writeText(link);
    $("copy").textContent = "Copied";
    setTimeout(() => { $("copy").textContent = "Copy link"; }, 1500);
  } catch {
    $("link").hidden = false;
    $("link").value = link;
    $("link").focus();
    $("link").select();
  }
}

// Also find edits that another tab of the session added or removed.
async function updateQueue() {
  const { jobs, edits } = await get("/api/queue").catch(() => ({ jobs: 0, edits: editIds() }));
  $("queue").hidden = jobs < 2;
  $("queue").textContent = `${jobs} jobs in the queue`;
  if (edits.join() !== editIds().join()) await updateEdits();
}

async function showExamples() {
  const { examples } = await get("/api/examples");
  fill($("examples"), "Examples: ", examples.map(({ prompt: text, subject, answer, p }) =>
    el("button", { type: "button", className: "chip", title: `${text} ${answer} (${percent(p)})`, onclick: () => prompt.set(text, subject) }, subject)));
}

async function start() {
  const about = await get("/api/about");
  $("model").textContent = about.model;
  $("version").textContent = about.version;
  startPrompt(onFormChange);
  startTrace(about, editLayer, saveState);
  startEdit(about, saveState);
  for (const id of ["trace-form", "edit-form", "predict-form"]) $(id).addEventListener("input", onFormChange);
  showExamples().catch(() => {}); // The page works without them.
  prompt.set(about.first.prompt, about.first.subject);
  $("copy").addEventListener("click", copyLink);
  $("link").addEventListener("blur", () => { $("link").hidden = true; });
  window.addEventListener("hashchange", restoreState);
  startCompare(about, saveState);
  await updateEdits();
  if (!location.hash && about.first_is_traced) await traceForm();
  await restoreState();
  document.body.dataset.ready = "yes";
  setInterval(updateQueue, 5000);
  window.addEventListener("focus", updateQueue);
}

start().catch((error) => {
  fill($("main"), el("p", { className: "card", role: "alert" }, `The page could not be started: ${error.message}`));
});
