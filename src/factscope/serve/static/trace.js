// The trace view: three heat maps that fill in, severed modules and integrated gradients.

import { $, downloadLinks, el, fill, percent, showNumbers } from "./dom.js";
import { HeatMap, formatNumber, formatProbability } from "./heatmap.js";
import { Job } from "./job.js";
import { lineChart } from "./linechart.js";
import { prompt } from "./prompt.js";
import { drawSettings, readSettings, writeSettings } from "./settings.js";

const KINDS = ["states", "mlp", "attn"];
const FILES = [["PNG", "figure.png"], ["SVG", "figure.svg"], ["PDF", "figure.pdf"], ["page", "page.html"], ["record", "record.json"]];

// The current trace: its request body, the clean and corrupted runs, and, once finished, its tables.
export const current = { body: null, baseline: null, tables: null, name: null };

let about, onLayer, saveState, jobs;
let maps = {};
let severed = { mlp: null, attn: null };

export function startTrace(info, chooseLayer, save) {
  [about, onLayer, saveState] = [info, chooseLayer, save];
  jobs = { restored: new Job($("trace-status")), severed: new Job($("severed-status")), gradients: new Job($("gradients-status")) };
  drawSettings($("trace-settings"), about.trace_settings);
  $("trace-form").addEventListener("submit", (event) => { event.preventDefault(); trace(); });
  $("sever").addEventListener("click", sever);
  $("severed-token").addEventListener("change", drawSevered);
  $("integrate").addEventListener("click", integrate);
}

export const traceState = () => ({ settings: readSettings($("trace-settings")) });

export const setTrace = ({ settings }) => writeSettings($("trace-settings"), settings);

export async function trace() {
  if (!prompt.ready) {
    jobs.restored.showMessage(prompt.text.trim() ? "select the subject in the prompt" : "enter a prompt first");
    return;
  }
  for (const job of Object.values(jobs)) job.cancel();
  const body = { ...prompt.body, ...traceState() };
  Object.assign(current, { body, baseline: null, tables: null, name: null });
  severed = { mlp: null, attn: null };
  fill($("severed"));
  fill($("gradients"));
  fill($("trace-files"));
  for (const job of [jobs.severed, jobs.gradients]) job.node.hidden = true;
  saveState();
  await jobs.restored.run("/api/traces", body, (event) => {
    if (event.event === "baseline") begin(event);
    if (event.event === "cells") {
      maps[event.kind]?.update(event.tokens, event.layers, event.values);
      showBaseline(event.samples);
    }
    if (event.event === "record") finish(event);
  });
}

function begin(baseline) {
  current.baseline = baseline;
  $("trace-result").hidden = false;
  $("trace-intro").hidden = true;
  maps = Object.fromEntries(KINDS.map((kind) => [kind, heatMap(`Restored: ${restored(kind)}`, kind, baseline.corrupted, formatProbability)]));
  fill($("heatmaps"), KINDS.map((kind) => maps[kind].node));
  fill($("severed-token"), baseline.labels.map((label, token) => el("option", { value: token }, label)));
  showBaseline(0);
}

function restored(kind) {
  const window = current.body.settings.window ?? about.trace_settings.find(({ name }) => name === "window").default;
  return { states: "a single state", mlp: `${window} MLP layers`, attn: `${window} attention layers` }[kind];
}

function heatMap(title, kind, low, format) {
  return new HeatMap({ title, colors: about.kinds[kind].colors, labels: current.baseline.labels, layers: about.n_layers, low, format, onLayer });
}

function showBaseline(samples) {
  const { answer, clean, corrupted, samples: all } = current.baseline;
  showNumbers($("baseline"), {
    "answer": answer, "P, clean run": percent(clean), "P, corrupted run": percent(corrupted),
    "total effect": percent(clean - corrupted), "noise samples": samples ? `${samples} of ${all}` : `of ${all}`,
  });
}

function finish(event) {
  if (!current.baseline) begin(event);
  current.tables = event.tables;
  current.name = event.name;
  for (const kind of KINDS) maps[kind].updateAll(event.tables.restored[kind]);
  showBaseline(event.samples);
  downloadLinks($("trace-files"), "Download:", `/api/traces/${current.name}`, FILES);
  $("severed-token").value = decisiveToken();
  if (event.tables.severed.mlp && event.tables.severed.attn) {
    severed = event.tables.severed;
    drawSevered();
  }
}

// The effect of restored MLP windows at the last subject token, by layer: candidates for an edit.
export function layerEffects() {
  const rows = current.tables?.restored.mlp;
  if (!rows) return null;
  return rows[current.baseline.subject[1] - 1].map((p) => Math.max(0, (p ?? 0) - current.baseline.corrupted));
}

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

// The subject token with the highest restored probability.
function decisiveToken() {
  const [start, stop] = current.baseline.subject;
  const highest = (token) => Math.max(...maps.states.values[token]);
  return [...Array(stop - start).keys()].map((i) => start + i).reduce((a, b) => (highest(b) > highest(a) ? b : a));
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
  const map = heatMap(`Integrated gradients: ${about.kinds[kind].name}`, kind, 0, formatNumber);
  fill($("gradients"), map.node);
  await jobs.gradients.run("/api/traces", { ...current.body, tables: [`gradients ${kind}`] }, (event) => {
    if (event.event === "cells") map.update(event.tokens, event.layers, event.values);
    if (event.event === "record") map.updateAll(event.tables.gradients[kind]);
  });
}
