// The page: three views, one fact, and an address that restores what is seen.

import { get } from "./api.js";
import { compareState, setCompare, startCompare } from "./compare.js";
import { $, el, fill, visible } from "./dom.js";
import { chooseLayer, drawLayers, editState, setEdit, startEdit } from "./edit.js";
import { located, locate, locateState, setLocate, startLocate } from "./locate.js";
import { prompt, startPrompt } from "./prompt.js";

const VIEWS = ["locate", "edit", "compare"];
let view = "locate";
let ours = null; // The address that we wrote ourselves.

function state() {
  const fact = { prompt: prompt.text, subject: prompt.subject, occurrence: prompt.occurrence };
  if (view === "compare") return compareState();
  if (view === "edit") return { ...fact, ...editState() };
  return { ...fact, ...locateState(), traced: located.body !== null };
}

function remember() {
  ours = `#/${view}/${encodeURIComponent(JSON.stringify(state()))}`;
  history.replaceState(null, "", ours);
}

function readAddress() {
  const [, name, packed] = location.hash.match(/^#\/(\w+)(?:\/(.*))?$/) ?? [];
  let found = null;
  try {
    found = packed ? JSON.parse(decodeURIComponent(packed)) : null;
  } catch { /* A broken address is an empty one. */ }
  return { name: VIEWS.includes(name) ? name : "locate", found: found && typeof found === "object" ? found : null };
}

function show(name) {
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

async function restore() {
  const { name, found } = readAddress();
  show(name);
  if (found && name !== "compare" && typeof found.prompt === "string") prompt.set(found.prompt, String(found.subject ?? ""), found.occurrence);
  if (name === "locate" && found) {
    setLocate(found);
    if (found.traced) await locate();
  }
  if (name === "edit" && found) await setEdit(found);
  if (name === "compare" && found) await setCompare(found);
}

function choose(layer) {
  chooseLayer(layer);
  show("edit");
  remember();
  $("rewrite").elements.target.focus();
}

async function copy() {
  remember();
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy link"; }, 1500);
}

async function crowd() {
  const { waiting } = await get("/api/queue").catch(() => ({ waiting: 0 }));
  $("crowd").hidden = waiting < 2;
  $("crowd").textContent = `${waiting} jobs in the queue`;
}

async function start() {
  const about = await get("/api/about");
  $("model").textContent = about.model;
  $("version").textContent = about.version;
  startPrompt();
  startLocate(about, choose, remember);
  startEdit(about, remember);
  fill($("examples"), "Try ", about.examples.map(({ prompt: text, subject }) =>
    el("button", { type: "button", className: "chip", title: text, onclick: () => { prompt.set(text, subject); remember(); } }, visible(subject))));
  prompt.set(about.examples[0].prompt, about.examples[0].subject);
  $("copy").addEventListener("click", copy);
  window.addEventListener("hashchange", () => { if (location.hash !== ours) restore(); });
  await startCompare(about, remember);
  const { name } = readAddress();
  if (name !== "edit") setEdit();
  await restore();
  document.body.dataset.ready = "yes";
  setInterval(crowd, 5000);
}

start().catch((error) => {
  fill($("main"), el("p", { className: "card", role: "alert" }, `The page could not start: ${error.message}`));
});
