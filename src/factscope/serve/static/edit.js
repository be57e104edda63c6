// The edit view: choose a layer, give the new object, see what changed; a list of edits with switches.

import { get, remove } from "./api.js";
import { sideBySide } from "./diff.js";
import { $, downloadLinks, el, fill, percent, refill, showNumbers, visible } from "./dom.js";
import { Job } from "./job.js";
import { prompt } from "./prompt.js";
import { drawSettings, readSettings, writeSettings } from "./settings.js";
import { layerEffects } from "./trace.js";

const FILES = [["edit", "edit.safetensors"], ["LoRA adapter", "adapter.zip"], ["figure", "figure.png"], ["SVG", "figure.svg"], ["page", "page.html"], ["record", "record.json"]];
const COMBINED_FILES = FILES.slice(0, 2);

let about, saveState, jobs;
let layer = null;
let edits = []; // As the server returns them, with `on` (selected) and `now` (its event "facts").
let shown = null; // Id of the edit whose details are shown.
let lastPrompt = null; // Predicted again when edits are switched on or off.

const form = () => $("edit-form").elements;

export function startEdit(info, save) {
  [about, saveState] = [info, save];
  jobs = { edit: new Job($("edit-status")), predict: new Job($("predict-status")) };
  fill(form().method, Object.entries(about.methods).map(([value, { name }]) => el("option", { value }, name)));
  form().method.addEventListener("change", drawMethod);
  drawMethod();
  chooseLayer(about.default_layer);
  $("edit-form").addEventListener("submit", (event) => { event.preventDefault(); createEdit(requestBody()); });
  $("predict-form").addEventListener("submit", (event) => { event.preventDefault(); predict($("predict-form").elements.prompt.value); });
}

const drawMethod = () => drawSettings($("edit-settings"), about.methods[form().method.value].settings);

// ---- layer

export function chooseLayer(number) {
  layer = number;
  drawLayers();
}

export function drawLayers() {
  const effects = layerEffects();
  const high = Math.max(1e-9, ...(effects ?? [0]));
  refill($("layers"), [...Array(about.n_layers).keys()].map((number) => {
    const bar = el("i");
    bar.style.height = `${effects ? 100 * (effects[number] / high) : 0}%`;
    const selected = number === layer;
    return el("button", {
      type: "button", role: "radio", "data-key": number, ariaChecked: String(selected), tabIndex: selected ? 0 : -1,
      className: about.layers_with_statistics.includes(number) ? "known" : "",
      ariaLabel: `layer ${number}${effects ? `, MLP effect ${percent(effects[number])}` : ""}`,
      title: effects ? `MLP effect at the last subject token: ${percent(effects[number])}` : `layer ${number}`,
      onclick: () => { chooseLayer(number); saveState(); }, onkeydown: moveLayer,
    }, el("b", {}, bar), String(number));
  }));
  $("layers").classList.toggle("bare", !effects);
  fill($("layer-notes"), layerNotes(effects));
}

function layerNotes(effects) {
  const link = (number) => el("button", { type: "button", className: "link", onclick: () => chooseLayer(number) }, `layer ${number}`);
  const source = about.default_layer_source;
  const notes = layer === about.default_layer ? [`Layer ${layer} is the default for this model (${source}).`]
    : [`Layer ${layer} is selected. The default for this model is `, link(about.default_layer), ` (${source}).`];
  if (effects) {
    const peak = effects.indexOf(Math.max(...effects));
    notes.push(...(peak === layer ? [" The MLP effect of the trace is highest at this layer."]
      : [" The MLP effect of the trace is highest at ", link(peak), "."]));
  }
  if (!about.layers_with_statistics.includes(layer)) {
    notes.push(` No second moment C was collected for layer ${layer} (factscope stats). The edit uses C = I, which is not the paper's method and changes other facts more.`);
  }
  return notes;
}

function moveLayer(event) {
  const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  chooseLayer((layer + step + about.n_layers) % about.n_layers);
  $("layers").children[layer].focus();
}

// ---- new edits

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function requestBody() {
  const f = form();
  return {
    ...prompt.body, target: f.target.value, layer, method: f.method.value,
    without_statistics: !about.layers_with_statistics.includes(layer),
    settings: readSettings($("edit-settings")),
    paraphrases: lines(f.paraphrases.value), neighbours: lines(f.neighbours.value),
  };
}

async function createEdit(body, on = true) {
  if (!body.subject.trim()) return jobs.edit.showMessage("select the subject in the prompt");
  if (!body.target.trim()) return jobs.edit.showMessage("enter the new object");
  let created = null;
  await jobs.edit.run("/api/edits", body, (event) => {
    if (event.event === "edit") created = event.edit;
  });
  if (!created) return null;
  edits.push({ ...created, on, now: null });
  shown = created.id;
  draw();
  saveState();
  return predict(lastPrompt);
}

// ---- list of edits

const selectedIds = () => edits.filter((edit) => edit.on).map((edit) => edit.id);

function draw() {
  $("no-edits").hidden = edits.length > 0;
  $("predict-form").hidden = edits.length === 0;
  refill($("edits"), edits.map(editRow));
  const on = selectedIds();
  if (on.length > 1) downloadLinks($("edits-files"), "Download the selected edits combined:", `/api/edits/${on.join(",")}`, COMBINED_FILES);
  else fill($("edits-files"));
  drawDetails();
}

function editRow(edit) {
  const toggle = el("input", {
    type: "checkbox", role: "switch", "data-key": `switch ${edit.id}`, checked: edit.on, ariaLabel: `edit ${edit.id}: ${edit.text} ${edit.new}`,
    onchange: (event) => { edit.on = event.target.checked; draw(); saveState(); predict(lastPrompt); },
  });
  const now = edit.now && `P(${visible(edit.new)}) ${percent(edit.now.before.new)} → ${percent(edit.now.after.new)}`;
  return el("li", { className: edit.id === shown ? "shown" : "" },
    toggle,
    el("button", { type: "button", className: "fact", "data-key": `fact ${edit.id}`, ariaExpanded: String(edit.id === shown), onclick: () => { shown = edit.id; draw(); } },
      factText(edit), el("small", { className: "soft" }, ` ${now ?? ""}`)),
    edit.complaints.length ? el("span", { className: "tag bad", title: edit.complaints.join("; ") }, "checks failed") : null,
    el("button", { type: "button", className: "quiet", ariaLabel: `remove edit ${edit.id}`, onclick: () => removeEdit(edit) }, "Remove"));
}

function factText({ text, subject: [start, stop], old, new: target }) {
  const characters = [...text]; // The server counts characters, not UTF-16 code units.
  const slice = (from, to) => visible(characters.slice(from, to).join(""));
  return [slice(0, start), el("span", { className: "subject" }, slice(start, stop)), slice(stop), " ",
    el("span", { className: "old" }, visible(old ?? "?")), " ", el("mark", {}, visible(target))];
}

async function removeEdit(edit) {
  await remove(`/api/edits/${edit.id}`).catch(() => {});
  edits = edits.filter((other) => other !== edit);
  if (shown === edit.id) shown = edits.at(-1)?.id ?? null;
  draw();
  saveState();
  predict(lastPrompt);
}

// ---- details of one edit

function drawDetails() {
  const edit = edits.find((other) => other.id === shown);
  if (!edit) return fill($("edit-details"));
  const ofKind = (kind) => edit.prompts.filter((change) => change.kind === kind);
  const [own] = ofKind("prompt");
  const neighbours = ofKind("neighbour"), paraphrases = ofKind("paraphrase");
  const unchanged = neighbours.filter((change) => change.before.top === change.after.top).length;
  const summary = el("dl", { className: "numbers" });
  showNumbers(summary, {
    [`P(${visible(own.new)})`]: `${percent(own.before.new)} → ${percent(own.after.new)}`,
    [`P(${visible(own.old ?? "old")})`]: `${percent(own.before.old)} → ${percent(own.after.old)}`,
    "neighbours with an unchanged prediction": `${unchanged} of ${neighbours.length}`,
  });
  const files = el("p", { className: "downloads" });
  downloadLinks(files, "Download:", `/api/edits/${edit.id}`, FILES);
  return fill($("edit-details"), el("div", { className: "card" },
    el("h2", {}, "Effect of this edit alone"), summary,
    changes("Prompt and paraphrases: should change", [own, ...paraphrases], ["new", "old"]),
    neighbours.length ? changes("Neighbours: should not change", neighbours, ["old", "new"]) : null,
    edit.generations.length ? el("h3", {}, "Generated text") : null,
    edit.generations.map(({ text, before, after }) => [el("p", { className: "opening" }, `${visible(text)} …`), sideBySide(before, after, "with this edit")]).flat(),
    el("details", { className: "plain" }, el("summary", {}, edit.complaints.length ? "Checks: failed" : "Checks: passed"), checks(edit)),
    files));
}

// CSS classes of the two objects; page.css defines their colors.
const TONES = { new: "new", old: "was" };

// A dumbbell chart: the probability of each object before (○) and after (●), by prompt.
function changes(title, prompts, objects) {
  const names = { new: "new object", old: "old object" };
  const legend = el("p", { className: "legend small" },
    objects.map((object) => el("span", { className: `swatch ${TONES[object]}` }, names[object])), el("span", { className: "soft" }, "○ before ● after"));
  return el("section", { className: "dumbbells" }, el("h3", {}, title), legend,
    prompts.map((change) => el("div", { className: "dumbbell" },
      el("p", {}, visible(change.text), el("small", { className: "soft" }, `  predicts ${change.before.top} → ${change.after.top}`)),
      el("div", {}, objects.map((object) => track(change, object))))));
}

function track(change, object) {
  const [before, after] = [change.before[object], change.after[object]];
  if (before === null || after === null) return null;
  const bar = el("i"), from = el("b", { className: "from" }), to = el("b");
  bar.style.left = `${100 * Math.min(before, after)}%`;
  bar.style.width = `${100 * Math.abs(after - before)}%`;
  from.style.left = `${100 * before}%`;
  to.style.left = `${100 * after}%`;
  return el("div", { className: `track ${TONES[object]}` }, el("span", {}, bar, from, to), el("small", {}, `${visible(change[object] ?? "")} ${percent(before)} → ${percent(after)}`));
}

function checks(edit) {
  return el("div", { className: "scrollable" }, el("table", {}, el("tbody", {},
    edit.checks.map(({ name, value, limit, passed }) => el("tr", {}, el("td", {}, name), el("td", {}, value), el("td", {}, limit),
      el("td", { className: passed ? "" : "failure" }, passed ? "passed" : "failed"))))),
    edit.changed_weights.map((weight) => el("p", { className: "soft small" }, weight)));
}

// ---- predictions

async function predict(text) {
  lastPrompt = text?.trim() ? text : null;
  if (!edits.length) {
    jobs.predict.cancel();
    return fill($("prediction"));
  }
  if (!lastPrompt) fill($("prediction"));
  await jobs.predict.run("/api/predict", { prompts: lastPrompt ? [lastPrompt] : [], edits: selectedIds() }, (event) => {
    if (event.event === "facts") {
      for (const fact of event.facts) Object.assign(edits.find((edit) => edit.id === fact.id) ?? {}, { now: fact });
      draw();
    }
    if (event.event === "prediction") fill($("prediction"), predictionNodes(event));
  });
  return null;
}

function predictionNodes({ text, before, after }) {
  const top = (side) => el("p", { className: "soft small" }, "next token: ", side.top_tokens.map(({ token, p }) => `${token} ${percent(p)}`).join(" · "));
  const both = sideBySide(before.continuation, after.continuation);
  both.children[0].append(top(before));
  both.children[1].append(top(after));
  return [el("p", { className: "opening" }, `${visible(text)} …`), both];
}

// ---- state in the page's address

export function editState() {
  const { target, method } = requestBody();
  return { layer, target, method, settings: readSettings($("edit-settings")), edits: edits.map(({ request, on }) => ({ ...request, on })) };
}

// Restore the form and the edits. Edits that this session does not have are computed again.
export async function setEdit({ layer: number, target, method, settings, edits: wanted = [] } = {}) {
  if (target) form().target.value = target;
  if (method in about.methods) {
    form().method.value = method;
    drawMethod();
  }
  writeSettings($("edit-settings"), settings);
  if (Number.isInteger(number) && number >= 0 && number < about.n_layers) chooseLayer(number);
  const stored = (await get("/api/edits").catch(() => ({ edits: [] }))).edits;
  edits = stored.map((edit) => ({ ...edit, on: true, now: null }));
  for (const { on, ...body } of wanted) {
    const known = edits.find((edit) => JSON.stringify(edit.request) === JSON.stringify(body));
    if (known) known.on = on;
    else await createEdit(body, on);
  }
  shown ??= edits.at(-1)?.id ?? null;
  draw();
  if (edits.length) predict(lastPrompt);
}
