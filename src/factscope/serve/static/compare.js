// The compare view: tables, figures and generated texts of the runs in the server's folder.

import { get } from "./api.js";
import { $, el, fill, refill, visible } from "./dom.js";

let saveState, selected = [], runs = [], selectedCase = null;

export async function startCompare(about, save) {
  saveState = save;
  runs = about.has_runs ? (await get("/api/runs")).runs : [];
  drawRuns();
}

export const compareState = () => ({ runs: selected, case: selectedCase });

export async function setCompare({ runs: names = [], case: id = null } = {}) {
  selected = names.filter((name) => runs.some((run) => run.name === name));
  selectedCase = id;
  drawRuns();
  await show();
}

function drawRuns() {
  if (!runs.length) return fill($("run-list"), el("p", { className: "soft" }, "No runs. Start the server with ", el("code", {}, "--runs FOLDER"), "."));
  return refill($("run-list"), el("ul", { className: "runs" }, runs.map((run) => {
    const command = commandOf(selected[0]);
    const compatible = !run.error && (!command || selected.includes(run.name) || (command === run.command && command === "evaluate"));
    const description = run.error ?? [run.command, run.method, run.data, run.model].filter(Boolean).join(" · ");
    return el("li", {}, el("label", { className: compatible ? "" : "soft" },
      el("input", { type: "checkbox", "data-key": run.name, checked: selected.includes(run.name), disabled: !!run.error, onchange: (event) => select(run, event.target.checked) }),
      el("span", {}, el("b", {}, visible(run.name)), el("small", { className: "soft" }, visible(description)))));
  })));
}

const commandOf = (name) => runs.find((run) => run.name === name)?.command;

// Several evaluations can be compared; of sweeps and traces one run is shown.
function select(run, on) {
  if (!on) selected = selected.filter((name) => name !== run.name);
  else if (run.command === "evaluate" && commandOf(selected[0]) === "evaluate") selected = [...selected, run.name];
  else selected = [run.name];
  selectedCase = null;
  drawRuns();
  show();
}

const runQuery = () => selected.map((name) => `run=${encodeURIComponent(name)}`).join("&");

async function show() {
  saveState();
  if (!selected.length) return fill($("compared"), runs.length ? el("p", { className: "soft lead" }, "Select a run, or several evaluations.") : null);
  const query = runQuery();
  fill($("compared"), el("p", { className: "soft" }, "loading…"));
  try {
    const { command, tables, figures } = await get(`/api/tables?${query}`);
    if (query !== runQuery()) return null; // The selection changed meanwhile.
    const texts = el("section", { className: "card", hidden: true });
    fill($("compared"),
      tables.map((table) => el("section", { className: "card paper" }, tableNode(table))),
      figures.map((figure) => figureNode(figure, query)),
      texts);
    if (command === "evaluate") await showTexts(texts, query);
  } catch (error) {
    fill($("compared"), el("p", { className: "status failed", role: "alert" }, error.message));
  }
  return null;
}

// Drawing a figure of thousands of texts takes seconds.
function figureNode(figure, query) {
  const placeholder = el("p", { className: "soft" }, "drawing…");
  const image = el("img", {
    alt: `figure: ${figure}`, src: `/api/figures/${figure}?${query}`,
    onload: () => placeholder.remove(), onerror: () => image.parentNode.remove(),
  });
  return el("div", { className: "figure" }, placeholder, image);
}

function tableNode({ title, columns, rows, rules, note }) {
  const align = (i) => (columns[i].numeric ? "number" : "");
  return el("div", { className: "scrollable" }, el("table", {}, el("caption", {}, title),
    el("thead", {}, el("tr", {}, columns.map((column, i) => el("th", { className: align(i), scope: "col" }, column.name)))),
    el("tbody", {}, rows.map((cells, r) => el("tr", { className: rules.includes(r) ? "ruled" : "" },
      cells.map(({ text, mark }, i) => el("td", { className: `${align(i)} ${mark ?? ""}` }, text)))))),
    note ? el("p", { className: "soft small" }, note) : null);
}

// ---- generated texts, case by case

async function showTexts(node, query) {
  const { cases } = await get(`/api/cases?${query}`);
  if (!cases.length || query !== runQuery()) return;
  const list = el("select", { ariaLabel: "Case", onchange: () => open(list.value) },
    cases.map(({ id, text, new: target }) => el("option", { value: id }, visible(`${id}: ${text} → ${target}`))));
  const move = (step) => () => { list.selectedIndex = (list.selectedIndex + step + cases.length) % cases.length; open(list.value); };
  const texts = el("div");
  async function open(id) {
    selectedCase = id;
    saveState();
    const { samples } = await get(`/api/samples?${query}&case=${encodeURIComponent(id)}`);
    fill(texts, samples.map(sampleNode));
  }
  node.hidden = false;
  fill(node, el("h2", {}, "Generated texts"),
    el("p", { className: "line" }, el("button", { type: "button", onclick: move(-1), ariaLabel: "previous case" }, "←"), list,
      el("button", { type: "button", onclick: move(1), ariaLabel: "next case" }, "→")),
    el("p", { className: "soft small" }, "Highlighted: ", el("mark", {}, "new object"), ", ", el("mark", { className: "was" }, "true object"), "."), texts);
  if (cases.some(({ id }) => id === selectedCase)) list.value = selectedCase;
  await open(list.value);
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
