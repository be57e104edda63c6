// The trace view: three heat maps that fill in, severed modules, integrated gradients, logit lens.

import { cancelAttention, drawAttention, resetAttention, showAttention, startAttention } from "./attention.js";
import { cancelAttribution, drawAttribution, resetAttribution, startAttribution } from "./attribution.js";
import { $, el, fill, percent, promptNodes, showNumbers, tokenList } from "./dom.js";
import { HeatMap, metricScale, normScale, probabilityScale, quantile } from "./heatmap.js";
import { Job } from "./job.js";
import { lineChart } from "./linechart.js";
import { findSubject, prompt } from "./prompt.js";
import { drawSettings, readSettings, writeSettings } from "./settings.js";
import { KINDS, bodyFor, current, currentScale, heatMap, intervention, showDownloads } from "./traced.js";

const GRADIENT_QUANTILE = 0.9;

let about, onLayer, saveState, jobs;
let maps = {};
let lens = null;
let severed = { mlp: null, attn: null };

export function startTrace(info, chooseLayer, save) {
  [about, onLayer, saveState] = [info, chooseLayer, save];
  jobs = Object.fromEntries(["trace", "lens", "severed", "gradients"].map((name) => [name, new Job($(`${name}-status`))]));
  startAttention(about);
  startAttribution(about);
  drawSettings($("trace-settings"), about.trace_settings);
  drawFields();
  $("trace-form").addEventListener("submit", (event) => { event.preventDefault(); traceForm(); });
  $("trace-form").addEventListener("change", drawFields);
  $("shared-scale").addEventListener("change", drawMaps);
  $("normalised").addEventListener("change", drawValues);
  $("lens-run").addEventListener("change", drawLens);
  $("sever").addEventListener("click", sever);
  $("severed-token").addEventListener("change", drawSevered);
  $("integrate").addEventListener("click", integrate);
}

// Fields of the form that only some settings use.
const isUsed = { replacement: ({ distribution }) => distribution === "tokens", foil: ({ metric }) => metric === "logit-difference" };
const FIELDS = ["answer", ...Object.keys(isUsed)];

// These fields are part of the request only if they are given and used.
export function traceState() {
  const settings = readSettings($("trace-settings"));
  const given = FIELDS.filter((name) => (isUsed[name]?.(settings) ?? true) && $(name).value.trim());
  return { settings, ...Object.fromEntries(given.map((name) => [name, $(name).value.trim()])) };
}

export function setTrace({ settings, ...saved }) {
  writeSettings($("trace-settings"), about.trace_settings, settings);
  for (const name of FIELDS) $(name).value = typeof saved[name] === "string" ? saved[name] : "";
  drawFields();
}

function drawFields() {
  const settings = readSettings($("trace-settings"));
  for (const [name, used] of Object.entries(isUsed)) $(`${name}-field`).hidden = !used(settings);
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
  cancelAttention();
  cancelAttribution();
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
  for (const job of [jobs.lens, jobs.severed, jobs.gradients]) job.reset();
  Object.assign(current, { body, baseline, tables: null, strongest: null, name: null });
  lens = null;
  severed = { mlp: null, attn: null };
  for (const id of ["severed", "gradients", "trace-files", "lens"]) fill($(id));
  $("trace-result").hidden = false;
  $("trace-intro").hidden = true;
  const { answer, labels } = baseline;
  fill($("caption"), promptNodes(body.prompt, ...findSubject(body.prompt, body.subject, body.occurrence)), " ", el("span", { className: "answer" }, answer));
  fill($("corruption"), describeCorruption(body, baseline));
  fill($("intervention"), describeCells(baseline));
  $("normalised").disabled = baseline.clean_value === baseline.corrupted_value;
  fill($("warnings"), (baseline.warnings ?? []).map((warning) => el("p", {}, warning)));
  maps = {};
  for (const kind of KINDS) maps[kind] = restoredMap(kind, baseline, body.settings?.window, currentScale(), scaleTop);
  fill($("heatmaps"), KINDS.map((kind) => maps[kind].node));
  fill($("severed-token"), labels.map((label, token) => el("option", { value: token }, label)));
  showBaseline(0);
  resetAttention();
  resetAttribution();
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

// What a cell shows, as the second sentence.
function describeCells({ metric_label: label, direction }) {
  const what = "one state, or a window of MLP or attention outputs around it,";
  return direction === "corrupt"
    ? `Each cell shows ${label} when ${what} in the clean run is set to its value in the corrupted run: the stronger the color, the more the answer depends on it.`
    : `Each cell shows ${label} when ${what} is restored to its value in the clean run: the stronger the color, the more of the fact passes through it.`;
}

function restoredMap(kind, baseline, window, scale, high) {
  const layers = window ?? about.trace_settings.find(({ name }) => name === "window").default;
  const what = { states: "a single state", mlp: `${layers} MLP layers`, attn: `${layers} attention layers` }[kind];
  const axis = kind === "states" ? "layer" : "layer in the middle of the window";
  return new HeatMap({
    title: `${intervention(baseline)}: ${what}`, colors: about.kinds[kind].colors, labels: baseline.labels, layers: about.n_layers,
    scale, high, axis, onLayer,
  });
}

// The value that is furthest in the direction of effects.
const furthest = ({ sign }, values) => values.reduce((best, value) => (sign * (value - best) > 0 ? value : best));

// The heat maps of a finished trace with the default settings, on a shared scale.
export function recordMaps(event) {
  const scale = metricScale(event);
  const high = () => furthest(scale, [scale.other, ...Object.values(event.tables.restored).flat(2)]);
  return KINDS.map((kind) => {
    const map = restoredMap(kind, event, undefined, scale, high);
    map.updateAll(event.tables.restored[kind]);
    return map.node;
  });
}

// On the shared scale, the strongest color is the value of the other run in every map, or that of
// a stronger cell. The scale of a single map ends at its strongest cell, once all its cells are there.
function scaleTop(map) {
  if (current.tables && !$("shared-scale").checked) return map.strongest?.value;
  const strongest = Object.values(maps).map((other) => other.strongest?.value).filter((value) => value !== undefined);
  return furthest(map.scale, [map.scale.other, ...strongest]);
}

const drawMaps = () => Object.values(maps).forEach((map) => map.draw());

// Show all values of the metric on another scale.
function drawValues() {
  if (!current.baseline) return;
  const scale = currentScale();
  for (const map of Object.values(maps)) map.scale = scale; // Before any is drawn: they share it.
  drawMaps();
  showBaseline();
  if (current.name) showDownloads();
  drawSevered();
  drawAttention();
  drawAttribution();
}

let samplesSoFar = 0;

function showBaseline(samples = samplesSoFar) {
  samplesSoFar = samples;
  const { answer, clean, corrupted, metric, samples: all } = current.baseline;
  const scale = currentScale(), isPlain = metric === "probability" && !scale.normalised;
  showNumbers($("baseline"), {
    "answer": answer, "p(answer), clean run": percent(clean), "p(answer), corrupted run": percent(corrupted),
    ...(!isPlain && { [`${scale.unit}, clean run`]: scale.format(scale.clean), [`${scale.unit}, corrupted run`]: scale.format(scale.corrupted) }),
    "total effect": scale.format(Math.abs(scale.clean - scale.corrupted) * Math.sign(current.baseline.total_effect)),
    "noise samples": samples ? `${samples} of ${all}` : `of ${all}`,
  });
}

function finish(event) {
  const { tables, strongest, name } = event;
  Object.assign(current, { tables, strongest, name });
  for (const kind of KINDS) maps[kind].updateAll(tables.restored[kind]);
  drawMaps();
  showBaseline(event.samples);
  showDownloads();
  showAttention(tables);
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
  const { labels, total_effect: total } = current.baseline, { base, sign, format } = metricScale(current.baseline);
  return { token: labels[token], total, format, effects: maps.mlp.values[token].map((value) => Math.max(0, sign * ((value ?? base) - base))) };
}

// ---- logit lens

// The server may have the lens already; then it comes with the trace.
async function decodeStates() {
  const show = (tables) => { ({ lens } = tables); drawLens(); };
  if (current.tables.lens.corrupted) show(current.tables);
  else await jobs.lens.run("/api/traces", bodyFor(["lens clean", "lens corrupted"]), (event) => { if (event.event === "record") show(event.tables); });
}

function drawLens() {
  const decoded = lens?.[$("lens-run").value];
  if (!decoded) return;
  const map = heatMap(about, "", "states", {
    scale: probabilityScale(`p(${current.baseline.answer})`), high: () => 1, onLayer,
    words: decoded.top.map((row) => row.map(([best]) => best.token)), detail: (token, layer) => tokenList(decoded.top[token][layer]),
  });
  map.updateAll(decoded.answer);
  fill($("lens"), map.node);
}

// ---- severed modules and gradients

async function sever() {
  if (!current.baseline) return;
  await jobs.severed.run("/api/traces", bodyFor(["states severed mlp", "states severed attn"]), (event) => {
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
  const { labels } = current.baseline, scale = currentScale();
  const shown = (row) => row.map((value) => (value === null ? null : scale.value(value)));
  const lines = [
    { name: "not severed", kind: "states", values: shown(maps.states.values[token]) },
    { name: "MLP severed", kind: "mlp", values: shown(severed.mlp[token]) },
    { name: "attention severed", kind: "attn", values: shown(severed.attn[token]) },
  ];
  const levels = [{ name: "clean run", value: scale.clean }, { name: "corrupted run", value: scale.corrupted }];
  const axis = `layer of the ${intervention(current.baseline).toLowerCase()} state at “${labels[token]}”`;
  fill($("severed"), lineChart({ lines, levels, axis, unit: scale.unit, format: scale.format }));
}

async function integrate() {
  if (!current.baseline) return;
  const kind = $("gradient-kind").value;
  const map = heatMap(about, `Integrated gradients: ${about.kinds[kind].name}`, kind, {
    scale: normScale, high: ({ values }) => quantile(values, GRADIENT_QUANTILE), onLayer,
  });
  fill($("gradients"), map.node);
  await jobs.gradients.run("/api/traces", bodyFor([`gradients ${kind}`]), (event) => {
    if (event.event === "cells") map.update(event.tokens, event.layers, event.values);
    if (event.event === "record") map.updateAll(event.tables.gradients[kind]);
  });
}
