// The trace view: three heat maps that fill in, severed modules, integrated gradients, logit lens.

import { $, downloadLinks, el, fill, percent, promptNodes, showNumbers, tokenList } from "./dom.js";
import { HeatMap, formatNumber, formatProbability, quantile } from "./heatmap.js";
import { Job } from "./job.js";
import { lineChart } from "./linechart.js";
import { findSubject, prompt } from "./prompt.js";
import { drawSettings, readSettings, writeSettings } from "./settings.js";

const KINDS = ["states", "mlp", "attn"];
const FILES = [["PNG", "figure.png"], ["SVG", "figure.svg"], ["PDF", "figure.pdf"], ["page", "page.html"], ["record", "record.json"]];
const GRADIENT_QUANTILE = 0.9;

// The trace on the page: its request body, the clean and corrupted runs, and, once finished, its
// tables. The form may hold another prompt by now.
const current = { body: null, baseline: null, tables: null, strongest: null, name: null, lens: null };

let about, onLayer, saveState, jobs;
let maps = {};
let severed = { mlp: null, attn: null };

export function startTrace(info, chooseLayer, save) {
  [about, onLayer, saveState] = [info, chooseLayer, save];
  jobs = Object.fromEntries(["trace", "lens", "severed", "gradients"].map((name) => [name, new Job($(`${name}-status`))]));
  drawSettings($("trace-settings"), about.trace_settings);
  drawReplacement();
  $("trace-form").addEventListener("submit", (event) => { event.preventDefault(); traceForm(); });
  $("trace-form").addEventListener("change", drawReplacement);
  $("shared-scale").addEventListener("change", drawMaps);
  $("lens-run").addEventListener("change", drawLens);
  $("sever").addEventListener("click", sever);
  $("severed-token").addEventListener("change", drawSevered);
  $("integrate").addEventListener("click", integrate);
}

// Answer and replacement are part of the request only if they are given and used.
export function traceState() {
  const settings = readSettings($("trace-settings"));
  const answer = $("answer").value.trim(), replacement = settings.distribution === "tokens" && $("replacement").value.trim();
  return { settings, ...(answer && { answer }), ...(replacement && { replacement }) };
}

export function setTrace({ settings, ...saved }) {
  writeSettings($("trace-settings"), about.trace_settings, settings);
  for (const name of ["answer", "replacement"]) $(name).value = typeof saved[name] === "string" ? saved[name] : "";
  drawReplacement();
}

function drawReplacement() {
  $("replacement-field").hidden = readSettings($("trace-settings")).distribution !== "tokens";
}

export const shownTrace = () => current.body;

const formBody = () => ({ ...prompt.body, ...traceState() });

// Whether the form asks for another trace than the one on the page.
const isStale = () => current.body !== null && JSON.stringify(current.body) !== JSON.stringify(formBody());

export function drawStale() {
  $("trace-result").classList.toggle("stale", isStale());
  $("stale").hidden = !isStale();
}

export async function traceForm() {
  if (prompt.ready) await trace(formBody());
  else jobs.trace.showMessage(prompt.text.trim() ? "click the subject's tokens under the prompt" : "enter a prompt first");
}

// Results of the previous trace stay on the page, under their own prompt, until the first ones of
// this trace arrive.
export async function trace(body) {
  if (current.tables && JSON.stringify(body) === JSON.stringify(current.body)) return;
  for (const job of Object.values(jobs)) job.cancel();
  let begun = false;
  const begin = (event) => {
    if (!begun) showTrace(body, event);
    begun = true;
  };
  const finished = await jobs.trace.run("/api/traces", body, (event) => {
    begin(event);
    if (event.event === "cells") {
      maps[event.kind]?.update(event.tokens, event.layers, event.values);
      showBaseline(event.samples);
    }
    if (event.event === "record") finish(event);
  });
  if (finished) decodeStates();
}

function showTrace(body, baseline) {
  for (const job of [jobs.lens, jobs.severed, jobs.gradients]) {
    job.cancel();
    job.node.hidden = true;
  }
  Object.assign(current, { body, baseline, tables: null, strongest: null, name: null, lens: null });
  severed = { mlp: null, attn: null };
  for (const id of ["severed", "gradients", "trace-files", "lens"]) fill($(id));
  $("trace-result").hidden = false;
  $("trace-intro").hidden = true;
  const { answer, labels } = baseline;
  fill($("caption"), promptNodes(body.prompt, ...findSubject(body.prompt, body.subject, body.occurrence)), " ", el("span", { className: "answer" }, answer));
  fill($("corruption"), describeCorruption(body, baseline));
  fill($("warnings"), (baseline.warnings ?? []).map((warning) => el("p", {}, warning)));
  maps = {};
  for (const kind of KINDS) maps[kind] = restoredMap(kind, baseline, body.settings?.window, scaleTop);
  fill($("heatmaps"), KINDS.map((kind) => maps[kind].node));
  fill($("severed-token"), labels.map((label, token) => el("option", { value: token }, label)));
  showBaseline(0);
  drawStale();
  saveState();
}

// How the subject was corrupted, as the first sentence on how to read the maps.
function describeCorruption({ settings }, baseline) {
  if (settings?.distribution === "tokens") {
    return `In the corrupted run, “${baseline.replacement}” takes the place of the subject (*).`;
  }
  return `In the corrupted run, noise ${settings?.replace === true ? "in place of" : "on"} the embeddings hides the subject (*).`;
}

function heatMap(title, kind, { labels, answer }, options = {}) {
  return new HeatMap({
    title, colors: about.kinds[kind].colors, labels, layers: about.n_layers, onLayer,
    unit: `p(${answer})`, format: formatProbability, ...options,
  });
}

function restoredMap(kind, baseline, window, high) {
  const layers = window ?? about.trace_settings.find(({ name }) => name === "window").default;
  const what = { states: "a single state", mlp: `${layers} MLP layers`, attn: `${layers} attention layers` }[kind];
  const axis = kind === "states" ? "layer" : "layer in the middle of the window";
  return heatMap(`Restored: ${what}`, kind, baseline, { low: baseline.corrupted, high, axis });
}

// The heat maps of a finished trace with the default settings, on a shared scale.
export function recordMaps(event) {
  return KINDS.map((kind) => {
    const map = restoredMap(kind, event, undefined, () => Math.max(event.clean, ...Object.values(event.tables.restored).flat(2)));
    map.updateAll(event.tables.restored[kind]);
    return map.node;
  });
}

// On the shared scale, the strongest color is the probability of the clean run in every map. The
// scale of a single map ends at its highest value, once all its cells are there.
function scaleTop(map) {
  if (current.tables && !$("shared-scale").checked) return map.highest?.value;
  return Math.max(current.baseline.clean, ...Object.values(maps).map((other) => other.highest?.value ?? 0));
}

const drawMaps = () => Object.values(maps).forEach((map) => map.draw());

function showBaseline(samples) {
  const { answer, clean, corrupted, samples: all } = current.baseline;
  showNumbers($("baseline"), {
    "answer": answer, "p(answer), clean run": percent(clean), "p(answer), corrupted run": percent(corrupted),
    "total effect": percent(clean - corrupted), "noise samples": samples ? `${samples} of ${all}` : `of ${all}`,
  });
}

function finish(event) {
  const { tables, strongest, name } = event;
  Object.assign(current, { tables, strongest, name });
  for (const kind of KINDS) maps[kind].updateAll(tables.restored[kind]);
  drawMaps();
  showBaseline(event.samples);
  downloadLinks($("trace-files"), "Download:", `/api/traces/${current.name}`, FILES);
  $("severed-token").value = strongest.states.token;
  severed = { ...severed, ...tables.severed };
  drawSevered();
}

// The effect of restored MLP windows by layer, at the subject token where it is strongest, and the
// trace's total effect; null if the page has no trace of the prompt in the form.
export function layerEffects() {
  const sameFact = ["prompt", "subject", "occurrence"].every((name) => current.body?.[name] === prompt.body[name]);
  if (!current.tables || !sameFact) return null;
  const { token } = current.strongest.mlp;
  const { labels, clean, corrupted } = current.baseline;
  return {
    token: labels[token], total: clean - corrupted,
    effects: maps.mlp.values[token].map((p) => Math.max(0, (p ?? 0) - corrupted)),
  };
}

// ---- logit lens

// The server may have the lens already; then it comes with the trace.
async function decodeStates() {
  const tables = ["lens clean", "lens corrupted"];
  const show = ({ lens }) => { current.lens = lens; drawLens(); };
  if (current.tables.lens.corrupted) show(current.tables);
  else await jobs.lens.run("/api/traces", { ...current.body, tables }, (event) => { if (event.event === "record") show(event.tables); });
}

function drawLens() {
  const lens = current.lens?.[$("lens-run").value];
  if (!lens) return;
  const map = heatMap("", "states", current.baseline, {
    high: () => 1, words: lens.top.map((row) => row.map(([best]) => best.token)),
    detail: (token, layer) => tokenList(lens.top[token][layer]),
  });
  map.updateAll(lens.answer);
  fill($("lens"), map.node);
}

// ---- severed modules and gradients

async function sever() {
  if (!current.baseline) return;
  const body = { ...current.body, tables: ["states severed mlp", "states severed attn"] };
  await jobs.severed.run("/api/traces", body, (event) => {
    if (event.event === "cells") {
      severed[event.kind] ??= current.baseline.labels.map(() => new Array(about.n_layers).fill(null));
      event.tokens.forEach((token, i) => { severed[event.kind][token] = event.values[i]; });
    }
    if (event.event === "record") severed = event.tables.severed;
    drawSevered();
  });
}

function drawSevered() {
  if (!severed.mlp || !severed.attn) return;
  const token = Number($("severed-token").value);
  const { labels, clean, corrupted } = current.baseline;
  const lines = [
    { name: "not severed", kind: "states", values: maps.states.values[token] },
    { name: "MLP severed", kind: "mlp", values: severed.mlp[token] },
    { name: "attention severed", kind: "attn", values: severed.attn[token] },
  ];
  const levels = [{ name: "clean run", value: clean }, { name: "corrupted run", value: corrupted }];
  fill($("severed"), lineChart(lines, levels, `layer of the restored state at “${labels[token]}”`));
}

async function integrate() {
  if (!current.baseline) return;
  const kind = $("gradient-kind").value;
  const map = heatMap(`Integrated gradients: ${about.kinds[kind].name}`, kind, current.baseline, {
    high: ({ values }) => quantile(values, GRADIENT_QUANTILE), unit: "norm", format: formatNumber,
  });
  fill($("gradients"), map.node);
  await jobs.gradients.run("/api/traces", { ...current.body, tables: [`gradients ${kind}`] }, (event) => {
    if (event.event === "cells") map.update(event.tokens, event.layers, event.values);
    if (event.event === "record") map.updateAll(event.tables.gradients[kind]);
  });
}
