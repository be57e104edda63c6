// The compare view: figures, tables, generated texts and single facts of the runs in the server's folder.

import { get } from "./api.js";
import { $, el, fill, percent, refill, showNumbers, visible } from "./dom.js";

const FIGURE_FILES = ["png", "svg", "pdf"], TABLE_FILES = { csv: "CSV", tex: "LaTeX", md: "Markdown" };
const WIDE = /^(heatmaps|lines|fact-)/; // Figures of three panels, which are scrolled where there is little room.
const MAX_BESIDE = 2; // Runs that are shown side by side; of traces and sweeps, no more can be selected.

let saveState, selected = [], runs = [], selectedCase = null, hasFolder = false;
let listed; // A promise: whether the runs could be listed.

// The other views do not wait for the list of runs, nor fail with it.
export function startCompare(about, save) {
  [saveState, hasFolder] = [save, about.has_runs];
  fill($("run-list"), el("p", { className: "soft" }, "loading…"));
  listed = listRuns();
}

async function listRuns() {
  try {
    runs = hasFolder ? (await get("/api/runs")).runs : [];
    drawRuns();
    fill($("compared"), hint());
    return true;
  } catch (error) {
    const retry = el("button", { type: "button", className: "quiet", title: "Load the page again", onclick: () => location.reload() }, "Try again");
    fill($("run-list"), el("p", { className: "status failed", role: "alert" }, error.message), retry);
    return false;
  }
}

export const compareState = () => ({ runs: selected, case: selectedCase });

// A TypeError says that the link is damaged.
export async function setCompare({ runs: names = [], case: id } = {}) {
  if (!(await listed)) return;
  selected = names.filter((name) => runs.some((run) => run.name === name && !run.error));
  selectedCase = typeof id === "string" ? id : null;
  drawRuns();
  await show();
}

// What this view is for, and how to get something to show.
function hint() {
  const example = (...commands) => el("pre", { className: "commands" }, commands.map((command) => el("code", {}, command)));
  return el("div", { className: "card lead" },
    el("p", {}, runs.length ? "Select a run in the list. Two runs are shown side by side, with the settings in which they differ; several evaluations are compared in one table."
      : "This view compares finished runs: average traces of many facts, evaluations of editing methods, and sweeps of a setting. There are no runs yet."),
    runs.length ? null : [el("p", {}, "Create one in a folder of runs:"), example("factscope trace --facts everyday --out runs/traces", "factscope evaluate --method rome --data everyday --limit 20 --out runs/rome"),
      hasFolder ? el("p", {}, "Then reload this page.") : [el("p", {}, "Then start the server with that folder:"), example("factscope serve --runs runs")]]);
}

// ---- selection

const commandOf = (name) => runs.find((run) => run.name === name)?.command;

function drawRuns() {
  if (!runs.length) return fill($("run-list"), el("p", { className: "soft" }, "No runs."));
  return refill($("run-list"), el("ul", { className: "runs" }, runs.map((run) => {
    const description = run.error ?? [run.command, run.method, run.data, run.model].filter(Boolean).join(" · ");
    const other = selected.length && commandOf(selected[0]) !== run.command;
    return el("li", {}, el("label", { className: run.error || other ? "soft" : "", title: other ? "Replaces the selection: only runs of one command are compared." : "Add this run to the comparison, or remove it." },
      el("input", { type: "checkbox", "data-key": run.name, checked: selected.includes(run.name), disabled: !!run.error, onchange: (event) => select(run, event.target.checked) }),
      el("span", {}, el("b", {}, visible(run.name)), el("small", { className: "soft" }, visible(description)))));
  })));
}

function select(run, on) {
  const same = selected.filter((name) => name !== run.name && commandOf(name) === run.command);
  if (!on) selected = selected.filter((name) => name !== run.name);
  else selected = [...(run.command === "evaluate" ? same : same.slice(1 - MAX_BESIDE)), run.name];
  selectedCase = null;
  drawRuns();
  show();
}

// ---- figures and tables

const queryOf = (names) => names.map((name) => `run=${encodeURIComponent(name)}`).join("&");

async function show() {
  saveState();
  if (!selected.length) return fill($("compared"), hint());
  const shown = selected;
  fill($("compared"), el("p", { className: "soft" }, "loading…"));
  const nodes = await (selected.length === MAX_BESIDE ? pairNodes(selected) : load(selected, { details: true }).then(({ figures, tables, details }) => [figures, tables, details]));
  return selected === shown ? fill($("compared"), nodes) : null;
}

const columns = (contents) => el("div", { className: "pair" }, contents.map((content) => el("div", {}, content)));

// Two runs: the figures of each on the same scales, then what they have together. Evaluations have
// one table of both and the texts of both; traces have tables and facts of their own.
async function pairNodes(names) {
  const together = commandOf(names[0]) === "evaluate";
  const runs = names.map((name, i) => load([name], { beside: names[1 - i], details: !together }));
  const [joint, ...alone] = await Promise.all([load(names, { details: together }), ...runs]);
  return [columns(alone.map(({ figures }, i) => [el("h2", {}, visible(names[i])), figures])), joint.tables, joint.details,
    together ? null : columns(alone.map(({ tables, details }) => [tables, details]))];
}

// The figures, tables and, if wanted, single facts or cases of runs; the figures on the scales of
// the run `beside`. An error takes the place of what could not be loaded.
async function load(names, { beside, details = false }) {
  const query = queryOf(names);
  try {
    const { command, tables, figures } = await get(`/api/tables?${query}`);
    const node = { evaluate: textsNode, trace: factsNode }[command];
    return {
      figures: figures.map((name) => figureNode(name, beside ? `${query}&beside=${encodeURIComponent(beside)}` : query)),
      tables: tables.map((table, number) => el("section", { className: "card paper" }, tableNode(table), files("table", TABLE_FILES, (kind) => `/api/tables/${number}.${kind}?${query}`))),
      details: details && node ? await node(query) : null,
    };
  } catch (error) {
    return { figures: [el("p", { className: "status failed", role: "alert" }, error.message)], tables: [], details: null };
  }
}

function files(what, kinds, address) {
  return el("p", { className: "downloads" }, `Download the ${what}:`, Object.entries(kinds).flatMap(([kind, name]) => [" ", el("a", { className: "file", href: address(kind), download: "" }, name)]));
}

// Drawing a figure of thousands of texts takes seconds; a busy server refuses it.
function figureNode(name, query, alt = `figure: ${name}`) {
  const address = (kind) => `/api/figures/${name}.${kind}?${query}`;
  const status = el("p", { className: "soft", role: "status" }, "drawing…");
  const retry = el("button", { type: "button", className: "quiet", title: "Draw the figure again", onclick: () => { image.src = `${address("svg")}&again=${Date.now()}`; } }, "Try again");
  const image = el("img", { alt, src: address("svg"), onload: () => status.remove(), onerror: () => fill(status, "The figure could not be drawn. ", retry) });
  return el("section", { className: WIDE.test(name) ? "drawing wide" : "drawing" }, status, el("div", { className: "figure scrollable", tabIndex: 0, role: "region", ariaLabel: alt }, image), files("figure", Object.fromEntries(FIGURE_FILES.map((kind) => [kind, kind.toUpperCase()])), address));
}

function tableNode({ title, columns, rows, rules, note }) {
  const align = (i) => (columns[i].numeric ? "number" : "");
  const named = (name, help) => (help ? el("abbr", { title: help }, name) : name);
  const defined = [...columns, ...rows.map(([{ text, help }]) => ({ name: text, help }))].filter(({ help }) => help);
  return [
    el("div", { className: "scrollable", tabIndex: 0, role: "region", ariaLabel: title }, el("table", {}, el("caption", {}, title),
      el("thead", {}, el("tr", {}, columns.map(({ name, help }, i) => el("th", { className: align(i), scope: "col" }, named(visible(name), help))))),
      el("tbody", {}, rows.map((cells, r) => el("tr", { className: rules.includes(r) ? "ruled" : "" },
        cells.map(({ text, mark, help }, i) => el("td", { className: `${align(i)} ${mark ?? ""}` }, named(text, help)))))))),
    note ? el("p", { className: "soft small" }, note) : null,
    defined.length ? el("details", { className: "plain" }, el("summary", {}, "What the names mean"),
      el("dl", { className: "small" }, defined.map(({ name, help }) => [el("dt", {}, name), el("dd", {}, help)]).flat())) : null];
}

// ---- single facts and single cases

// A list with buttons for the previous and the next entry; `open` fills a node with the chosen one.
function browser(title, label, entries, chosen, open) {
  const content = el("div", { ariaLive: "polite" });
  const list = el("select", { ariaLabel: label, title: `Choose a ${label}`, onchange: () => open(list.value, content) }, entries.map(({ id, text }) => el("option", { value: id }, visible(text))));
  const move = (step) => () => { list.selectedIndex = (list.selectedIndex + step + entries.length) % entries.length; open(list.value, content); };
  if (entries.some(({ id }) => String(id) === chosen)) list.value = chosen;
  open(list.value, content);
  return el("section", { className: "card" }, el("h2", {}, title),
    el("p", { className: "line" }, el("button", { type: "button", onclick: move(-1), title: `Show the previous ${label}`, ariaLabel: `previous ${label}` }, "←"), list,
      el("button", { type: "button", onclick: move(1), title: `Show the next ${label}`, ariaLabel: `next ${label}` }, "→")), content);
}

async function factsNode(query) {
  const { facts } = await get(`/api/facts?${query}`);
  const entries = facts.map(({ number, text, answer, known }) => ({ id: number, text: `${number + 1}: ${text} → ${answer}${known ? "" : " (not known)"}` }));
  return browser("Single facts", "fact", entries, selectedCase, (id, node) => {
    selectedCase = id;
    saveState();
    const { text, clean, corrupted, warnings } = facts[Number(id)];
    const numbers = el("dl", { className: "numbers" });
    showNumbers(numbers, { "p(answer), clean run": percent(clean), "p(answer), corrupted run": percent(corrupted), "total effect": percent(clean - corrupted) });
    fill(node, numbers, warnings.map((warning) => el("p", { className: "status failed" }, warning)), figureNode(`fact-${id}`, query, `trace of ${text}`));
  });
}

async function textsNode(query) {
  const { cases } = await get(`/api/cases?${query}`);
  if (!cases.length) return null;
  const entries = cases.map(({ id, text, new: target }) => ({ id, text: `${id}: ${text} → ${target}` }));
  return browser("Generated texts", "case", entries, selectedCase, async (id, node) => {
    selectedCase = id;
    saveState();
    const { samples } = await get(`/api/samples?${query}&case=${encodeURIComponent(id)}`);
    fill(node, el("p", { className: "soft small" }, "Highlighted: ", el("mark", {}, "new object"), ", ", el("mark", { className: "was" }, "true object"), "."), samples.length > 1 ? columns(samples.map(sampleNode)) : samples.map(sampleNode));
  });
}

const MARK_CLASSES = { new: "", true: "was", reference: "reference" };

function segmentNodes(segments) {
  return segments.map(([text, kind]) => (kind in MARK_CLASSES ? el("mark", { className: MARK_CLASSES[kind] }, visible(text))
    : kind === "opening" ? el("i", {}, visible(text)) : visible(text)));
}

const MAX_OPEN = 3; // Texts of a case that are shown without a click.

function sampleNode({ text, true: old, new: target, model, rows }) {
  const texts = rows.map((row) => el("div", { className: "both" }, Object.entries(row).map(([name, segments]) => el("div", {}, el("h3", {}, visible(name)), segmentNodes(segments)))));
  const more = texts.slice(MAX_OPEN);
  return el("section", {}, el("h3", {}, visible(text), " ", el("span", { className: "old" }, visible(old ?? "?")), " ", el("mark", {}, visible(target ?? "?")), " ", el("span", { className: "tag" }, model)),
    texts.slice(0, MAX_OPEN), more.length ? el("details", { className: "plain" }, el("summary", {}, `${more.length} more texts`), more) : null);
}
