// The edit view: choose a layer, give the new object, see what changed; a list of edits with switches.

import { get, post, remove } from "./api.js";
import { sideBySide } from "./diff.js";
import { $, downloadLinks, el, fill, percent, promptNodes, refill, showNumbers } from "./dom.js";
import { Job } from "./job.js";
import { prompt } from "./prompt.js";
import { drawSettings, readSettings, writeSettings } from "./settings.js";
import { layerEffects, recordMaps } from "./trace.js";

const FILES = [["edit", "edit.safetensors"], ["LoRA adapter", "adapter.zip"], ["figure", "figure.png"], ["SVG", "figure.svg"], ["page", "page.html"], ["record", "record.json"]];
const COMBINED_FILES = FILES.slice(0, 2);

let about, saveState, jobs;
let layer = null;
let edits = []; // As the server returns them, with `on` (applied) and `now` (its event "facts").
let loaded = false; // Whether the session's edits were loaded.
let shown = null; // Id of the edit whose details are shown.
let drawn; // Id of the edit whose details were drawn; they do not change.
let lastPrompt = null; // Predicted again when edits are switched on or off.

const METHOD_HELP = {
  "rome": "A rank-one update of one layer (Meng et al., 2022).",
  "r-rome": "ROME with the mean key everywhere in the update (Gupta et al., 2024).",
  "memit": "An update that is spread over a range of layers (Meng et al., 2023).",
};

const form = () => $("edit-form").elements;

export function startEdit(info, save) {
  [about, saveState] = [info, save];
  jobs = { edit: new Job($("edit-status")), predict: new Job($("predict-status")), retrace: new Job($("retrace-status")) };
  fill(form().method, Object.entries(about.methods).map(([value, { name }]) => el("option", { value }, name)));
  form().method.addEventListener("change", drawMethod);
  $("suggest").addEventListener("click", suggest);
  layer = about.default_layer;
  drawMethod();
  $("edit-form").addEventListener("submit", (event) => { event.preventDefault(); createEdit(requestBody()); });
  $("predict-form").addEventListener("submit", (event) => { event.preventDefault(); predict($("predict-form").elements.prompt.value); });
}

const method = () => about.methods[form().method.value];

function drawMethod() {
  drawSettings($("edit-settings"), method().settings);
  fill($("method-help"), METHOD_HELP[form().method.value]);
  form()["first-layer"].value = method().layers[0];
  form()["last-layer"].value = method().layers.at(-1);
  drawLayers();
}

// ---- layer

// MEMIT spreads an edit over a range of layers; the other methods edit one.
const hasRange = () => form().method.value === "memit";

function editedLayers() {
  if (!hasRange()) return [layer];
  const [first, last] = ["first-layer", "last-layer"].map((name) => Number(form()[name].value));
  return Array.from({ length: Math.max(0, Math.min(about.n_layers, last - first + 1)) }, (_, i) => first + i);
}

const withoutStatistics = () => editedLayers().filter((number) => !about.layers_with_statistics.includes(number));

export function chooseLayer(number) {
  layer = number;
  drawLayers();
}

export function drawLayers() {
  const traced = layerEffects();
  const high = traced && Math.max(1e-9, traced.total, ...traced.effects);
  refill($("layers"), [...Array(about.n_layers).keys()].map((number) => {
    const bar = el("i");
    bar.style.height = `${traced ? 100 * (traced.effects[number] / high) : 0}%`;
    const selected = number === layer;
    const effect = traced ? `, MLP effect ${traced.format(traced.effects[number])} at “${traced.token}”` : "";
    return el("button", {
      type: "button", role: "radio", "data-key": number, ariaChecked: String(selected), tabIndex: selected ? 0 : -1,
      className: about.layers_with_statistics.includes(number) ? "known" : "",
      ariaLabel: `layer ${number}${effect}`, title: `layer ${number}${effect}`,
      onclick: () => { chooseLayer(number); saveState(); }, onkeydown: moveLayer,
    }, el("b", {}, bar), String(number));
  }));
  $("layers").classList.toggle("bare", !traced);
  $("layers").hidden = hasRange();
  $("layer-range").hidden = !hasRange();
  fill($("layer-notes"), layerNotes(traced));
}

const WEAK_EFFECT = 0.1; // Fraction of the total effect below which a trace suggests no layer.

function layerNotes(traced) {
  const link = (number) => el("button", { type: "button", className: "link", onclick: () => chooseLayer(number) }, `layer ${number}`);
  const source = about.default_layer_source;
  const notes = hasRange() ? [`The method spreads the edit over these layers. The default for this model is layers ${method().layers[0]} to ${method().layers.at(-1)}.`]
    : layer === about.default_layer ? [`Layer ${layer} is the default for this model. Source: ${source}.`]
    : [`Layer ${layer} is selected. The default for this model is `, link(about.default_layer), `. Source: ${source}.`];
  if (traced) {
    const peak = Math.max(...traced.effects), at = traced.effects.indexOf(peak);
    const size = `${traced.format(peak)}; the total effect is ${traced.format(traced.total)}`;
    notes.push(...(peak < WEAK_EFFECT * traced.total ? [` The trace suggests no layer: restored MLP outputs have an effect of at most ${size}.`]
      : [" Bars: the MLP effect of the trace at “", traced.token, "”. It is highest at ", at === layer ? "this layer" : link(at), `: ${size}.`]));
  }
  const missing = withoutStatistics();
  if (missing.length) {
    notes.push(` No second moment C was collected for layer ${missing.join(", ")} (factscope stats). The edit uses C = I, which is not the paper's method and changes other facts more.`);
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
    ...prompt.body, target: f.target.value, method: f.method.value,
    ...(hasRange() ? { layers: ["first-layer", "last-layer"].map((name) => Number(f[name].value)) } : { layer }),
    without_statistics: withoutStatistics().length > 0,
    settings: readSettings($("edit-settings")),
    paraphrases: lines(f.paraphrases.value), neighbours: lines(f.neighbours.value), generations: lines(f.generations.value),
  };
}

// Fill empty fields with prompts of the same relation.
async function suggest() {
  if (!prompt.ready) return jobs.edit.showMessage("click the subject's tokens under the prompt");
  const found = await post("/api/suggestions", prompt.body).catch((error) => jobs.edit.showMessage(error.message));
  for (const [name, prompts] of Object.entries(found ?? {})) form()[name].value ||= prompts.join("\n");
  return null;
}

async function createEdit(body, on = true) {
  if (!body.subject.trim()) return jobs.edit.showMessage("click the subject's tokens under the prompt");
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

// Edits from the link of another session are listed apart from the session's own.
function draw() {
  const shared = edits.filter((edit) => edit.request.from_link), own = edits.filter((edit) => !edit.request.from_link);
  $("no-edits").hidden = own.length > 0;
  $("shared-edits").hidden = shared.length === 0;
  $("predict-form").hidden = edits.length === 0;
  refill($("edits"), own.map(editRow));
  refill($("link-edits"), shared.map(editRow));
  const on = selectedIds();
  if (on.length > 1) downloadLinks($("edits-files"), "Download the applied edits combined:", `/api/edits/${on.join(",")}`, COMBINED_FILES);
  else fill($("edits-files"));
  drawDetails();
}

function editRow(edit) {
  const toggle = el("input", {
    type: "checkbox", role: "switch", "data-key": `switch ${edit.id}`, checked: edit.on, title: "Apply this edit in predictions", ariaLabel: `apply edit ${edit.id}: ${edit.text} ${edit.new}`,
    onchange: (event) => { edit.on = event.target.checked; draw(); saveState(); predict(lastPrompt); },
  });
  const now = edit.now && `p(${edit.new}) ${percent(edit.now.before.new)} → ${percent(edit.now.after.new)}`;
  return el("li", { className: edit.id === shown ? "shown" : "" },
    toggle,
    el("button", { type: "button", className: "fact", "data-key": `fact ${edit.id}`, ariaExpanded: String(edit.id === shown), title: "Show what this edit changes", onclick: () => { shown = edit.id; draw(); } },
      factText(edit), el("small", { className: "soft" }, ` ${now ?? ""}`)),
    el("span", { className: `tag ${edit.verdict === "took" ? "good" : "bad"}`, title: edit.complaints.join("; ") }, edit.verdict),
    el("button", { type: "button", className: "quiet", ariaLabel: `remove edit ${edit.id}`, title: "Remove this edit from your session", onclick: () => removeEdit(edit) }, "Remove"));
}

function factText({ text, subject: [start, stop], old, new: target }) {
  const units = (characters) => [...text].slice(0, characters).join("").length; // The server counts characters.
  return [promptNodes(text, units(start), units(stop)), " ", el("span", { className: "old" }, old ?? "?"), " ", el("mark", {}, target)];
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
  if (drawn === edit?.id) return null;
  drawn = edit?.id;
  if (!edit) return fill($("edit-details"));
  const ofKind = (kind) => edit.prompts.filter((change) => change.kind === kind);
  const [own] = ofKind("prompt");
  const neighbours = ofKind("neighbour"), paraphrases = ofKind("paraphrase");
  const summary = el("dl", { className: "numbers" });
  showNumbers(summary, {
    [`p(${own.new})`]: `${percent(own.before.new)} → ${percent(own.after.new)}`,
    ...(own.old && { [`p(${own.old})`]: `${percent(own.before.old)} → ${percent(own.after.old)}` }),
    "neighbours with another prediction": `${neighbours.filter(({ changed }) => changed).length} of ${neighbours.length}`,
  });
  const files = el("p", { className: "downloads" });
  downloadLinks(files, "Download:", `/api/edits/${edit.id}`, FILES);
  return fill($("edit-details"), el("div", { className: "card" },
    el("h2", {}, "This edit alone: ", factText(edit)),
    el("p", { className: `verdict ${edit.verdict === "took" ? "good" : "bad"}` }, `The edit ${edit.verdict}.`),
    edit.complaints.map((complaint) => el("p", { className: "small" }, complaint)),
    summary,
    changes("Prompt and paraphrases: should change", [own, ...paraphrases], ["new", "old"]),
    neighbours.length ? changes("Neighbours: should not change", neighbours, ["old", "new"]) : null,
    edit.generations.length ? el("h3", {}, "Generated text") : null,
    edit.generations.map(({ text, before, after }) => [el("p", { className: "opening" }, `${text} …`), sideBySide(before, after, "with this edit")]),
    el("details", { className: "plain" }, el("summary", {}, `Checks: ${edit.checks.every(({ passed }) => passed) ? "passed" : "failed"}`), checks(edit)),
    el("p", { className: "line" }, el("button", { type: "button", id: "retrace-button", onclick: () => retrace(edit) }, "Trace before and after"),
      el("span", { className: "soft small" }, "Causal traces of the prompt in the unedited model and with this edit.")),
    jobs.retrace.node, el("div", { id: "retrace" }),
    files));
}

async function retrace({ id, request: { prompt: text, subject, occurrence } }) {
  const models = [["Unedited model", []], ["With this edit", [id]]];
  fill($("retrace"));
  for (const [title, ids] of models) {
    await jobs.retrace.run("/api/traces", { prompt: text, subject, occurrence, edits: ids }, (event) => {
      if (event.event !== "record" || shown !== id) return;
      $("retrace").append(el("h3", {}, title, ": ", text, " ", el("span", { className: "answer" }, event.answer)), el("div", { className: "heats" }, recordMaps(event)));
    });
  }
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
      el("p", {}, change.text, el("small", { className: "soft" }, `  predicts ${change.before.top} → ${change.after.top} `,
        change.kind === "neighbour" && change.changed ? el("span", { className: "tag bad" }, "changed") : null)),
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
  return el("div", { className: `track ${TONES[object]}` }, el("span", {}, bar, from, to), el("small", {}, `${change[object] ?? ""} ${percent(before)} → ${percent(after)}`));
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
  return [el("p", { className: "opening" }, `${text} …`), both];
}

// ---- state in the page's address

export function editState() {
  return { ...requestBody(), layer, predict: $("predict-form").elements.prompt.value, edits: edits.map(({ request, on }) => ({ ...request, on })) };
}

const isText = (value) => typeof value === "string";

// Restore the form and the edits. If edits are listed, only these are applied; those that this
// session does not have are computed again, as edits from a link.
export async function setEdit({ layer: number, layers, method: name, settings, predict: text, edits: wanted, ...saved } = {}) {
  if (isText(saved.target)) form().target.value = saved.target;
  if (isText(text)) $("predict-form").elements.prompt.value = text;
  if (isText(name) && name in about.methods) form().method.value = name;
  for (const field of ["paraphrases", "neighbours", "generations"]) {
    if (Array.isArray(saved[field])) form()[field].value = saved[field].join("\n");
  }
  drawMethod();
  writeSettings($("edit-settings"), method().settings, settings);
  if (Array.isArray(layers)) ["first-layer", "last-layer"].forEach((field, i) => { form()[field].value = layers[i]; });
  if (Number.isInteger(number) && number >= 0 && number < about.n_layers) layer = number;
  drawLayers();
  if (wanted === undefined) return;
  const missing = [];
  for (const edit of edits) edit.on = false;
  for (const { on, from_link: _, ...body } of wanted) {
    const known = edits.find(({ request }) => Object.entries(body).every(([name, value]) => JSON.stringify(value) === JSON.stringify(request[name])));
    if (known) known.on = on === true;
    else if (!isText(body.prompt) || !isText(body.subject) || !isText(body.target)) throw new TypeError("an edit of the link is incomplete");
    else missing.push([{ ...body, from_link: true }, on === true]);
  }
  draw();
  saveState();
  for (const [body, on] of missing) await createEdit(body, on);
  if (!missing.length) predict(lastPrompt);
}

// The session's edits as the server has them. Edits that are new to this tab are applied only when
// the page opens: otherwise the predictions on the page would change on their own.
export const editIds = () => edits.map(({ id }) => id);

export async function updateEdits() {
  const stored = (await get("/api/edits").catch(() => ({ edits: [] }))).edits;
  const known = new Map(edits.map((edit) => [edit.id, edit]));
  edits = stored.map((edit) => ({ on: !loaded, now: null, ...known.get(edit.id), ...edit }));
  loaded = true;
  if (!edits.some(({ id }) => id === shown)) shown = edits.at(-1)?.id ?? null;
  draw();
  predict(lastPrompt);
}
