// The compare view: figures, tables, generated texts and single facts of the runs in the server's folder.

import { get } from "./api.js";
import { $, el, fill, percent, refill, showNumbers, visible } from "./dom.js";

const FIGURE_FILES = ["png", "svg", "pdf"], TABLE_FILES = { csv: "CSV", tex: "LaTeX", md: "Markdown" };
const MAX_BESIDE = 2; // Runs of traces or sweeps that are shown side by side.

let saveState, selected = [], runs = [], selectedCase = null, hasFolder = false;

export async function startCompare(about, save) {
  [saveState, hasFolder] = [save, about.has_runs];
  runs = hasFolder ? (await get("/api/runs")).runs : [];
  drawRuns();
  fill($("compared"), hint());
}

export const compareState = () => ({ runs: selected, case: selectedCase });

// A TypeError says that the link is damaged.
export async function setCompare({ runs: names = [], case: id } = {}) {
  selected = names.filter((name) => runs.some((run) => run.name === name && !run.error));
  selectedCase = typeof id === "string" ? id : null;
  drawRuns();
  await show();
}

// What this view is for, and how to get something to show.
function hint() {
  const example = (...commands) => el("pre", { className: "commands" }, commands.map((command) => el("code", {}, command)));
  return el("div", { className: "card lead" },
    el("p", {}, runs.length ? "Select a run on the left. Several evaluations are compared in one table; two runs of traces or sweeps are shown side by side."
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
    return el("li", {}, el("label", { className: run.error || other ? "soft" : "", title: other ? "Replaces the selection: only runs of one command are compared." : "" },
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
  const groups = commandOf(selected[0]) === "evaluate" ? [selected] : selected.map((name) => [name]);
  const columns = groups.map(() => el("div", {}, el("p", { className: "soft" }, "loading…")));
  fill($("compared"), el("div", { className: columns.length > 1 ? "pair" : "" }, columns));
  await Promise.all(groups.map(async (names, i) => {
    const nodes = await groupNodes(names, groups.length > 1).catch((error) => [el("p", { className: "status failed", role: "alert" }, error.message)]);
    if (selected === shown) fill(columns[i], nodes);
  }));
  return null;
}

async function groupNodes(names, titled) {
  const query = queryOf(names);
  const { command, tables, figures } = await get(`/api/tables?${query}`);
  const details = command === "evaluate" ? await textsNode(query) : command === "trace" ? await factsNode(query) : null;
  return [titled ? el("h2", {}, visible(names[0])) : null,
    figures.map((name) => figureNode(name, query)),
    tables.map((table, number) => el("section", { className: "card paper" }, tableNode(table), files("table", TABLE_FILES, (kind) => `/api/tables/${number}.${kind}?${query}`))),
    details];
}

function files(what, kinds, address) {
  return el("p", { className: "downloads" }, `Download the ${what}:`, Object.entries(kinds).flatMap(([kind, name]) => [" ", el("a", { className: "file", href: address(kind), download: "" }, name)]));
}

// Drawing a figure of thousands of texts takes seconds; a busy server refuses it.
function figureNode(name, query, alt = `figure: ${name}`) {
  const address = (kind) => `/api/figures/${name}.${kind}?${query}`;
  const status = el("p", { className: "soft", role: "status" }, "drawing…");
  const retry = el("button", { type: "button", className: "quiet", onclick: () => { image.src = `${address("svg")}&again=${Date.now()}`; } }, "Try again");
  const image = el("img", { alt, src: address("svg"), onload: () => status.remove(), onerror: () => fill(status, "The figure could not be drawn. ", retry) });
  return el("section", { className: "drawing" }, status, el("div", { className: "figure scrollable", tabIndex: 0, role: "region", ariaLabel: alt }, image), files("figure", Object.fromEntries(FIGURE_FILES.map((kind) => [kind, kind.toUpperCase()])), address));
}

function tableNode({ title, columns, rows, rules, note }) {
  const align = (i) => (columns[i].numeric ? "number" : "");
  const defined = columns.filter((column) => column.help);
  return [
    el("div", { className: "scrollable", tabIndex: 0, role: "region", ariaLabel: title }, el("table", {}, el("caption", {}, title),
      el("thead", {}, el("tr", {}, columns.map(({ name, help }, i) => el("th", { className: align(i), scope: "col" }, help ? el("abbr", { title: help }, name) : name)))),
      el("tbody", {}, rows.map((cells, r) => el("tr", { className: rules.includes(r) ? "ruled" : "" },
        cells.map(({ text, mark }, i) => el("td", { className: `${align(i)} ${mark ?? ""}` }, text))))))),
    note ? el("p", { className: "soft small" }, note) : null,
    defined.length ? el("details", { className: "plain" }, el("summary", {}, "What the columns mean"),
      el("dl", { className: "small" }, defined.map(({ name, help }) => [el("dt", {}, name), el("dd", {}, help)]).flat())) : null];
}

// ---- single facts and single cases

// A list with buttons for the previous and the next entry; `open` fills a node with the chosen one.
function browser(title, label, entries, chosen, open) {
  const content = el("div", { ariaLive: "polite" });
  const list = el("select", { ariaLabel: label, onchange: () => open(list.value, content) }, entries.map(({ id, text }) => el("option", { value: id }, visible(text))));
  const move = (step) => () => { list.selectedIndex = (list.selectedIndex + step + entries.length) % entries.length; open(list.value, content); };
  if (entries.some(({ id }) => String(id) === chosen)) list.value = chosen;
  open(list.value, content);
  return el("section", { className: "card" }, el("h2", {}, title),
    el("p", { className: "line" }, el("button", { type: "button", onclick: move(-1), ariaLabel: `previous ${label}` }, "←"), list,
      el("button", { type: "button", onclick: move(1), ariaLabel: `next ${label}` }, "→")), content);
}

async function factsNode(query) {
  const { facts } = await get(`/api/facts?${query}`);
  const entries = facts.map(({ number, text, answer, known }) => ({ id: number, text: `${number + 1}: ${text} → ${answer}${known ? "" : " (not known)"}` }));
  return browser("Single facts", "fact", entries, selectedCase, (id, node) => {
    selectedCase = id;
    saveState();
    const { text, clean, corrupted, warnings } = facts[Number(id)];
    const numbers = el("dl", { className: "numbers" });
    showNumbers(numbers, { "P, clean run": percent(clean), "P, corrupted run": percent(corrupted), "total effect": percent(clean - corrupted) });
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
    fill(node, el("p", { className: "soft small" }, "Highlighted: ", el("mark", {}, "new object"), ", ", el("mark", { className: "was" }, "true object"), "."), samples.map(sampleNode));
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
