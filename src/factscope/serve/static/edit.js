// Edit: choose a layer, give the new object, see what changed; a list of edits with switches.

import { get, remove } from "./api.js";
import { sideBySide } from "./diff.js";
import { $, el, fill, links, numbers, percent, refill, visible } from "./dom.js";
import { Job } from "./job.js";
import { layerEffects } from "./locate.js";
import { prompt } from "./prompt.js";

const FILES = [["edit", "edit.safetensors"], ["LoRA adapter", "adapter.zip"], ["figure", "figure.png"], ["SVG", "figure.svg"], ["page", "page.html"], ["record", "record.json"]];
const TOGETHER = [["edit", "edit.safetensors"], ["LoRA adapter", "adapter.zip"]];

const TONES = { new: "new", old: "was" };

let about, remember, jobs;
let layer = null;
let edits = []; // The server's, each with `on` and how it stands now.
let shown = null;
let asked = null; // The last question, asked again when a switch is turned.

export function startEdit(known, keep) {
  [about, remember] = [known, keep];
  jobs = { rewrite: new Job($("rewrite-status")), ask: new Job($("ask-status")) };
  chooseLayer(about.layer);
  $("rewrite").addEventListener("submit", (event) => { event.preventDefault(); rewrite(request()); });
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); ask($("ask").elements.prompt.value); });
}

// ---- the layer

export function chooseLayer(number) {
  layer = number;
  drawLayers();
}

export function drawLayers() {
  const effects = layerEffects();
  const high = Math.max(1e-9, ...(effects ?? [0]));
  refill($("layers"), [...Array(about.layers).keys()].map((number) => {
    const bar = el("i");
    bar.style.height = `${effects ? 100 * (effects[number] / high) : 0}%`;
    const here = number === layer;
    return el("button", {
      type: "button", role: "radio", "data-key": number, ariaChecked: String(here), tabIndex: here ? 0 : -1,
      className: about.layers_known.includes(number) ? "known" : "",
      ariaLabel: `layer ${number}${effects ? `, MLP effect ${percent(effects[number])}` : ""}`,
      title: effects ? `MLP effect at the subject's last token: ${percent(effects[number])}` : `layer ${number}`,
      onclick: () => { chooseLayer(number); remember(); }, onkeydown: step,
    }, el("b", {}, bar), String(number));
  }));
  $("layers").classList.toggle("bare", !effects);
  fill($("layer-words"), layerWords(effects));
}

function layerWords(effects) {
  const peak = effects ? effects.indexOf(Math.max(...effects)) : null;
  const suggested = layer === about.layer ? `Layer ${layer} is suggested: ${about.why}.`
    : [`Layer ${layer} is yours; suggested is `, el("button", { type: "button", className: "link", onclick: () => chooseLayer(about.layer) }, `layer ${about.layer}`), `: ${about.why}.`];
  const traced = peak === null || peak === layer ? (peak === layer ? " The trace's MLP effect peaks here, too." : "")
    : [" The trace's MLP effect peaks at ", el("button", { type: "button", className: "link", onclick: () => chooseLayer(peak) }, `layer ${peak}`), "."];
  const bare = about.layers_known.includes(layer) ? ""
    : ` There are no statistics of layer ${layer} here: C is left out, which is not the paper's method and disturbs other facts more.`;
  return [suggested, traced, bare].flat();
}

function step(event) {
  const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  chooseLayer((layer + by + about.layers) % about.layers);
  $("layers").children[layer].focus();
}

// ---- making an edit

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function request() {
  const f = $("rewrite").elements;
  return {
    ...prompt.body, target: f.target.value, layer, method: f.method.value,
    without_statistics: !about.layers_known.includes(layer),
    paraphrases: lines(f.paraphrases.value), neighbours: lines(f.neighbours.value),
  };
}

async function rewrite(body, on = true) {
  if (!body.subject.trim()) return jobs.rewrite.fail("select the words of the prompt that name its subject");
  if (!body.target.trim()) return jobs.rewrite.fail("say what the new object shall be");
  let made = null;
  await jobs.rewrite.run("/api/edits", body, (event) => {
    if (event.event === "edit") made = event.edit;
  });
  if (!made) return null;
  edits.push({ ...made, on, now: null });
  shown = made.id;
  draw();
  remember();
  await ask(asked);
  return made;
}

// ---- the list

function draw() {
  $("no-edits").hidden = edits.length > 0;
  $("ask").hidden = edits.length === 0;
  refill($("edits"), edits.map(row));
  const on = edits.filter((edit) => edit.on).map((edit) => edit.id);
  if (on.length > 1) links($("edits-files"), `Those that are on, together:`, `/api/edits/${on.join(",")}`, TOGETHER);
  else fill($("edits-files"));
  drawDetail();
}

function row(edit) {
  const flip = el("input", {
    type: "checkbox", role: "switch", "data-key": `switch ${edit.id}`, checked: edit.on, ariaLabel: `edit ${edit.id}: ${edit.text} ${edit.new}`,
    onchange: (event) => { edit.on = event.target.checked; draw(); remember(); ask(asked); },
  });
  const now = edit.now && `P(${visible(edit.new)}) ${percent(edit.now.before.new)} → ${percent(edit.now.after.new)}`;
  return el("li", { className: edit.id === shown ? "shown" : "" },
    flip,
    el("button", { type: "button", className: "words", "data-key": `words ${edit.id}`, ariaExpanded: String(edit.id === shown), onclick: () => { shown = edit.id; draw(); } },
      factWords(edit), el("small", { className: "soft" }, ` ${now ?? ""}`)),
    edit.complaints.length ? el("span", { className: "tag bad", title: edit.complaints.join("; ") }, "beyond the guard rails") : null,
    el("button", { type: "button", className: "quiet", ariaLabel: `remove edit ${edit.id}`, onclick: () => drop(edit) }, "Remove"));
}

function factWords({ text, subject: [start, stop], old, new: target }) {
  const letters = [...text]; // The server counts characters, not UTF-16 units.
  const cut = (from, to) => visible(letters.slice(from, to).join(""));
  return [cut(0, start), el("span", { className: "subject" }, cut(start, stop)), cut(stop), " ",
    el("span", { className: "old" }, visible(old ?? "?")), " ", el("mark", {}, visible(target))];
}

async function drop(edit) {
  await remove(`/api/edits/${edit.id}`).catch(() => {});
  edits = edits.filter((other) => other !== edit);
  if (shown === edit.id) shown = edits.at(-1)?.id ?? null;
  draw();
  remember();
  ask(asked);
}

// ---- one edit

function drawDetail() {
  const edit = edits.find((other) => other.id === shown);
  if (!edit) return fill($("edit-detail"));
  const of = (kind) => edit.prompts.filter((scores) => scores.kind === kind);
  const [own] = of("prompt");
  const neighbours = of("neighbour"), paraphrases = of("paraphrase");
  const kept = neighbours.filter((scores) => scores.before.top === scores.after.top).length;
  const summary = el("dl", { className: "numbers" });
  numbers(summary, {
    [`P(${visible(own.new)})`]: `${percent(own.before.new)} → ${percent(own.after.new)}`,
    [`P(${visible(own.old ?? "old")})`]: `${percent(own.before.old)} → ${percent(own.after.old)}`,
    "neighbours that answer as before": `${kept} of ${neighbours.length}`,
  });
  const files = el("p", { className: "downloads" });
  links(files, "Take it away:", `/api/edits/${edit.id}`, FILES);
  return fill($("edit-detail"), el("div", { className: "card" },
    el("h2", {}, "What this edit alone changes"), summary,
    group("The prompt and its paraphrases should change", [own, ...paraphrases], ["new", "old"]),
    neighbours.length ? group("Neighbours should stay", neighbours, ["old", "new"]) : null,
    edit.generations.length ? el("h3", {}, "What it says") : null,
    edit.generations.map(({ text, before, after }) => [el("p", { className: "opening" }, `${visible(text)} …`), sideBySide(before, after, "with this edit")]).flat(),
    el("details", { className: "plain" }, el("summary", {}, edit.complaints.length ? "Guard rails: beyond the limits" : "Guard rails: kept"), rails(edit)),
    files));
}

function group(title, prompts, which) {
  return el("section", { className: "dumbs" }, el("h3", {}, title), key(which),
    prompts.map((scores) => el("div", { className: "dumb" },
      el("p", {}, visible(scores.text), el("small", { className: "soft" }, `  says ${scores.before.top} → ${scores.after.top}`)),
      el("div", {}, which.map((name) => track(scores, name))))));
}

function key(which) {
  const words = { new: "the new object", old: "the old object" };
  return el("p", { className: "key small" }, which.map((name) => el("span", { className: `swatch ${TONES[name]}` }, words[name])), el("span", { className: "soft" }, "○ before ● after"));
}

function track(scores, name) {
  const [before, after] = [scores.before[name], scores.after[name]];
  if (before === null || after === null) return null;
  const bar = el("i"), from = el("b", { className: "from" }), to = el("b");
  bar.style.left = `${100 * Math.min(before, after)}%`;
  bar.style.width = `${100 * Math.abs(after - before)}%`;
  from.style.left = `${100 * before}%`;
  to.style.left = `${100 * after}%`;
  return el("div", { className: `track ${TONES[name]}` }, el("span", {}, bar, from, to), el("small", {}, `${visible(scores[name] ?? "")} ${percent(before)} → ${percent(after)}`));
}

function rails(edit) {
  return el("div", { className: "scrollable" }, el("table", {}, el("tbody", {},
    edit.rails.map((rail) => el("tr", {}, el("td", {}, rail.name), el("td", {}, rail.value), el("td", {}, rail.limit),
      el("td", { className: rail.kept ? "" : "failure" }, rail.kept ? "kept" : "broken"))))),
    edit.changed_weights.map((place) => el("p", { className: "soft small" }, place)));
}

// ---- asking

async function ask(text) {
  asked = text?.trim() ? text : null;
  if (!edits.length) {
    jobs.ask.cancel();
    return fill($("answer"));
  }
  if (!asked) fill($("answer"));
  await jobs.ask.run("/api/ask", { prompts: asked ? [asked] : [], edits: edits.filter((edit) => edit.on).map((edit) => edit.id) }, (event) => {
    if (event.event === "facts") {
      for (const fact of event.facts) Object.assign(edits.find((edit) => edit.id === fact.id) ?? {}, { now: fact });
      draw();
    }
    if (event.event === "answer") fill($("answer"), answer(event));
  });
  return null;
}

function answer({ text, before, after }) {
  const top = ({ likeliest }) => el("p", { className: "soft small" }, "next: ", likeliest.map(({ token, p }) => `${token} ${percent(p)}`).join(" · "));
  const both = sideBySide(before.said, after.said);
  both.children[0].append(top(before));
  both.children[1].append(top(after));
  return [el("p", { className: "opening" }, `${visible(text)} …`), both];
}

// ---- keeping and restoring

export function editState() {
  const f = $("rewrite").elements;
  return { layer, target: f.target.value, method: f.method.value, edits: edits.map(({ asked: body, on }) => ({ ...body, on })) };
}

export async function setEdit({ layer: number, target, method, edits: wanted = [] } = {}) {
  const f = $("rewrite").elements;
  if (target) f.target.value = target;
  if (["rome", "r-rome", "memit"].includes(method)) f.method.value = method;
  if (Number.isInteger(number) && number >= 0 && number < about.layers) chooseLayer(number);
  const there = (await get("/api/edits").catch(() => ({ edits: [] }))).edits;
  edits = there.map((edit) => ({ ...edit, on: true, now: null }));
  for (const { on, ...body } of wanted) {
    const known = edits.find((edit) => JSON.stringify(edit.asked) === JSON.stringify(body));
    if (known) known.on = on;
    else await rewrite(body, on);
  }
  shown ??= edits.at(-1)?.id ?? null;
  draw();
  if (edits.length) ask(asked);
}
