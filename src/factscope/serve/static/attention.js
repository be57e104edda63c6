// Attention heads and attention knockout of the trace on the page.

import { $, el, fill, percent, refill } from "./dom.js";
import { Job } from "./job.js";
import { lineChart } from "./linechart.js";
import { drawSettings, readSettings } from "./settings.js";
import { bodyFor, current, currentScale, heatMap, intervention } from "./traced.js";

let about, jobs;
let token = 0; // The token whose heads are shown.
let heads = {}; // By token: head × layer.
let headMap = null; // The map of `token`, once it has values.
let knockout = null;

export function startAttention(info) {
  about = info;
  jobs = { heads: new Job($("heads-status")), knockout: new Job($("knockout-status")) };
  drawSettings($("knockout-settings"), about.table_settings.filter(({ name }) => name === "knockout-window"));
  $("restore-heads").addEventListener("click", restoreHeads);
  $("knock-out").addEventListener("click", knockOut);
}

export const cancelAttention = () => Object.values(jobs).forEach((job) => job.cancel());

// For a new trace.
export function resetAttention() {
  for (const job of Object.values(jobs)) job.reset();
  [heads, knockout, token] = [{}, null, current.baseline.labels.length - 1];
  drawTokens();
  drawAttention();
}

// Tables that the server has already.
export function showAttention(tables) {
  heads = tables.heads;
  knockout = tables.knockout;
  drawAttention();
}

export function drawAttention() {
  drawHeads();
  drawKnockout();
}

// ---- heads

function drawTokens() {
  refill($("heads-tokens"), current.baseline.labels.map((label, i) =>
    el("button", { type: "button", className: "token", "data-key": i, ariaPressed: String(i === token), onclick: () => chooseToken(i) }, label)));
}

function chooseToken(i) {
  token = i;
  drawTokens();
  drawHeads();
  if (!heads[token]) restoreHeads();
}

async function restoreHeads() {
  if (!current.baseline) return;
  const at = token, empty = () => Array.from({ length: about.n_heads }, () => new Array(about.n_layers).fill(null));
  await jobs.heads.run("/api/traces", bodyFor(["heads"], { token: at }), (event) => {
    if (event.event === "cells") {
      heads[at] ??= empty();
      heads[at][Number(event.kind)] = event.values[event.tokens.indexOf(at)];
    }
    if (event.event === "record") heads = event.tables.heads;
    if (at === token && heads[at]) updateHeads();
  });
}

function updateHeads() {
  if (headMap) headMap.updateAll(heads[token]);
  else drawHeads();
}

function drawHeads() {
  headMap = null;
  if (!heads[token]) return fill($("heads"));
  const where = `a single head at “${current.baseline.labels[token]}”`;
  headMap = heatMap(about, `${intervention(current.baseline)}: ${where}`, "heads", {
    labels: Array.from({ length: about.n_heads }, (_, i) => `head ${i}`), rows: "head",
  });
  headMap.updateAll(heads[token]);
  return fill($("heads"), headMap.node);
}

// ---- knockout

async function knockOut() {
  if (!current.baseline) return;
  await jobs.knockout.run("/api/traces", bodyFor(["knockout"], {}, readSettings($("knockout-settings"))), (event) => {
    if (event.event === "record") knockout = event.tables.knockout;
    drawKnockout();
  });
}

// A probability changes by a fraction of its clean value, other metrics by a difference.
function drawKnockout() {
  if (!knockout) return fill($("knockout"));
  const scale = currentScale(), relative = !scale.normalised && current.baseline.metric === "probability";
  const lines = Object.entries(knockout.names).map(([kind, name]) => ({
    name, kind: `to-${kind}`, values: relative ? knockout.changes[kind] : knockout.values[kind].map((x) => scale.value(x) - scale.clean),
  }));
  return fill($("knockout"), lineChart({
    lines, axis: `layer in the middle of ${knockout.window} layers`, unit: `${relative ? "relative " : ""}change of ${scale.unit}`,
    format: relative ? percent : scale.format,
  }));
}
