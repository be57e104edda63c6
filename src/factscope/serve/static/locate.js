// Locate: three heat maps that fill in, and the severed graphs and gradients beside them.

import { $, el, fill, links, numbers, percent } from "./dom.js";
import { HeatMap, asNumber, asProbability } from "./heat.js";
import { Job } from "./job.js";
import { linesChart } from "./lines.js";
import { prompt } from "./prompt.js";

const KINDS = ["states", "mlp", "attn"];
const FILES = [["PNG", "figure.png"], ["SVG", "figure.svg"], ["PDF", "figure.pdf"], ["page", "page.html"], ["record", "record.json"]];

export const located = { runs: null, tables: null, body: null, name: null };

let about, onLayer, remember, jobs;
let maps = {};
let severed = { mlp: null, attn: null };

export function startLocate(known, chooseLayer, keep) {
  [about, onLayer, remember] = [known, chooseLayer, keep];
  jobs = { restored: new Job($("locate-status")), severed: new Job($("severed-status")), gradients: new Job($("gradients-status")) };
  form().samples.max = about.limits.samples;
  form().samples.value = Math.min(5, about.limits.samples);
  $("locate").addEventListener("submit", (event) => { event.preventDefault(); locate(); });
  $("sever").addEventListener("click", sever);
  $("severed-token").addEventListener("change", drawSevered);
  $("integrate").addEventListener("click", integrate);
}

const form = () => $("locate").elements;

export function locateState() {
  const f = form();
  return {
    corruption: {
      distribution: f.distribution.value, level: Number(f.level.value), in_sigmas: f.in_sigmas.value === "yes",
      replace: f.replace.value === "yes", samples: Number(f.samples.value), seed: Number(f.seed.value),
    },
    window: Number(f.window.value),
  };
}

export function setLocate({ corruption = {}, window } = {}) {
  const f = form();
  for (const name of ["distribution", "level", "samples", "seed"]) if (corruption[name] !== undefined) f[name].value = corruption[name];
  for (const name of ["in_sigmas", "replace"]) if (corruption[name] !== undefined) f[name].value = corruption[name] ? "yes" : "no";
  if (window !== undefined) f.window.value = window;
}

export async function locate() {
  if (!prompt.ready) {
    jobs.restored.fail(prompt.text.trim() ? "select the words of the prompt that name its subject" : "type a prompt first");
    return;
  }
  for (const job of Object.values(jobs)) job.cancel();
  const body = { ...prompt.body, ...locateState() };
  Object.assign(located, { runs: null, tables: null, body, name: null });
  severed = { mlp: null, attn: null };
  fill($("severed"));
  fill($("gradients"));
  fill($("trace-files"));
  for (const job of [jobs.severed, jobs.gradients]) job.node.hidden = true;
  remember();
  await jobs.restored.run("/api/locate", body, hear);
}

function hear(event) {
  if (event.event === "runs") begin(event);
  if (event.event === "cells") maps[event.kind]?.put(event.tokens, event.layers, event.values);
  if (event.event === "cells") showRuns(event.samples);
  if (event.event === "record") finish(event);
}

function begin(runs) {
  located.runs = runs;
  $("located").hidden = false;
  $("locate-lead").hidden = true;
  maps = Object.fromEntries(KINDS.map((kind) => [kind, heat(`Restoring ${words(kind)}`, kind, runs.corrupted, asProbability)]));
  fill($("heats"), KINDS.map((kind) => maps[kind].node));
  fill($("severed-token"), runs.labels.map((label, token) => el("option", { value: token }, label)));
  showRuns(0);
}

const words = (kind) => ({ states: "a state", mlp: `${located.body.window} MLP layers`, attn: `${located.body.window} attention layers` })[kind];

function heat(title, kind, low, tell) {
  return new HeatMap({ title, shades: about.looks[kind].shades, labels: located.runs.labels, layers: about.layers, low, tell, choose: onLayer });
}

function showRuns(samples) {
  const { answer, clean, corrupted } = located.runs;
  numbers($("runs"), {
    "the model answers": answer, "clean run": percent(clean), "subject hidden": percent(corrupted),
    "total effect": percent(clean - corrupted), "samples": samples ? `${samples} of ${located.runs.samples}` : `of ${located.runs.samples}`,
  });
}

function finish(event) {
  if (!located.runs) begin(event);
  located.tables = event.tables;
  located.name = event.name;
  const rows = [...located.runs.labels.keys()], columns = [...Array(about.layers).keys()];
  for (const kind of KINDS) maps[kind].put(rows, columns, event.tables.restored[kind]);
  showRuns(event.samples);
  showFiles();
  $("severed-token").value = decisiveToken();
  if (event.tables.severed.mlp && event.tables.severed.attn) {
    severed = event.tables.severed;
    drawSevered();
  }
}

function showFiles() {
  links($("trace-files"), "Take it away:", `/api/traces/${located.name}`, FILES);
}

// The MLP effect of each layer at the subject's last token: where an edit may go.
export function layerEffects() {
  const rows = located.tables?.restored.mlp;
  if (!rows) return null;
  return rows[located.runs.subject[1] - 1].map((p) => Math.max(0, (p ?? 0) - located.runs.corrupted));
}

async function sever() {
  if (!located.runs) return;
  const body = { ...located.body, tables: ["states severed mlp", "states severed attn"] };
  await jobs.severed.run("/api/locate", body, (event) => {
    if (event.event === "cells") {
      severed[event.kind] ??= located.runs.labels.map(() => new Array(about.layers).fill(null));
      event.tokens.forEach((token, i) => { severed[event.kind][token] = event.values[i]; });
    }
    if (event.event === "record") severed = event.tables.severed;
    drawSevered();
  });
}

// The subject's token where a restored state brings most of the answer back.
function decisiveToken() {
  const [start, stop] = located.runs.subject;
  const best = (token) => Math.max(...maps.states.scores[token]);
  return [...Array(stop - start).keys()].map((i) => start + i).reduce((a, b) => (best(b) > best(a) ? b : a));
}

function drawSevered() {
  if (!severed.mlp || !severed.attn) return;
  const token = Number($("severed-token").value);
  const lines = [
    { name: "intact graph", kind: "states", values: maps.states.scores[token] },
    { name: "MLP severed", kind: "mlp", values: severed.mlp[token] },
    { name: "attention severed", kind: "attn", values: severed.attn[token] },
  ];
  const levels = [{ name: "clean run", value: located.runs.clean }, { name: "subject hidden", value: located.runs.corrupted }];
  fill($("severed"), linesChart(lines, levels, `layer of the restored state at “${located.runs.labels[token]}”`));
}

async function integrate() {
  if (!located.runs) return;
  const kind = $("gradient-kind").value;
  const map = heat(`Integrated gradients of ${about.looks[kind].name}`, kind, 0, asNumber);
  fill($("gradients"), map.node);
  await jobs.gradients.run("/api/locate", { ...located.body, tables: [`gradients ${kind}`] }, (event) => {
    if (event.event === "cells") map.put(event.tokens, event.layers, event.values);
    if (event.event === "record") map.put([...event.labels.keys()], [...Array(about.layers).keys()], event.tables.gradients[kind]);
  });
}
