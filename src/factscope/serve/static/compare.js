// Compare: the runs of the server's folder, as tables, figures and texts side by side.

import { get } from "./api.js";
import { $, el, fill, refill, visible } from "./dom.js";

let remember, chosen = [], runs = [], chosenCase = null;

export async function startCompare(about, keep) {
  remember = keep;
  runs = about.runs ? (await get("/api/runs")).runs : [];
  drawList();
}

export const compareState = () => ({ runs: chosen, case: chosenCase });

export async function setCompare({ runs: names = [], case: id = null } = {}) {
  chosen = names.filter((name) => runs.some((run) => run.name === name));
  chosenCase = id;
  drawList();
  await show();
}

function drawList() {
  if (!runs.length) return fill($("run-list"), el("p", { className: "soft" }, "No runs here. Start the server with ", el("code", {}, "--runs FOLDER"), "."));
  return refill($("run-list"), el("ul", { className: "runs" }, runs.map((run) => {
    const kind = commandOf(chosen[0]);
    const fits = !run.error && (!kind || chosen.includes(run.name) || (kind === run.command && kind === "evaluate"));
    const words = run.error ?? [run.command, run.method, run.data, run.model].filter(Boolean).join(" · ");
    return el("li", {}, el("label", { className: fits ? "" : "soft" },
      el("input", { type: "checkbox", "data-key": run.name, checked: chosen.includes(run.name), disabled: !!run.error, onchange: (event) => choose(run, event.target.checked) }),
      el("span", {}, el("b", {}, visible(run.name)), el("small", { className: "soft" }, visible(words)))));
  })));
}

const commandOf = (name) => runs.find((run) => run.name === name)?.command;

// Evaluations go together; a sweep or a run of traces stands alone.
function choose(run, on) {
  if (!on) chosen = chosen.filter((name) => name !== run.name);
  else if (run.command === "evaluate" && commandOf(chosen[0]) === "evaluate") chosen = [...chosen, run.name];
  else chosen = [run.name];
  chosenCase = null;
  drawList();
  show();
}

const query = () => chosen.map((name) => `run=${encodeURIComponent(name)}`).join("&");

async function show() {
  remember();
  if (!chosen.length) return fill($("compared"), runs.length ? el("p", { className: "soft lead" }, "Choose a run, or several evaluations.") : null);
  const asked = query();
  fill($("compared"), el("p", { className: "soft" }, "reading…"));
  try {
    const { command, tables, figures } = await get(`/api/tables?${asked}`);
    if (asked !== query()) return null;
    const browser = el("section", { className: "card", hidden: true });
    fill($("compared"),
      tables.map((table) => el("section", { className: "card paper" }, tableOf(table))),
      figures.map((figure) => figureOf(figure, asked)),
      browser);
    if (command === "evaluate") await browse(browser, asked);
  } catch (error) {
    fill($("compared"), el("p", { className: "status failed", role: "alert" }, error.message));
  }
  return null;
}

// A figure over thousands of texts takes a while to draw.
function figureOf(figure, asked) {
  const wait = el("p", { className: "soft" }, "drawing…");
  const image = el("img", {
    alt: `figure: ${figure}`, src: `/api/figure/${figure}?${asked}`,
    onload: () => wait.remove(), onerror: () => image.parentNode.remove(),
  });
  return el("div", { className: "figure" }, wait, image);
}

function tableOf({ title, columns, rows, rules, note }) {
  const number = (i) => (columns[i].words ? "" : "number");
  return el("div", { className: "scrollable" }, el("table", {}, el("caption", {}, title),
    el("thead", {}, el("tr", {}, columns.map((column, i) => el("th", { className: number(i), scope: "col" }, column.name)))),
    el("tbody", {}, rows.map((cells, r) => el("tr", { className: rules.includes(r) ? "ruled" : "" },
      cells.map(({ text, mark }, i) => el("td", { className: `${number(i)} ${mark ?? ""}` }, text)))))),
    note ? el("p", { className: "soft small" }, note) : null);
}

// ---- the texts, case by case

async function browse(node, asked) {
  const { cases } = await get(`/api/cases?${asked}`);
  if (!cases.length || asked !== query()) return;
  const list = el("select", { ariaLabel: "Case", onchange: () => open(list.value) },
    cases.map(({ id, text, new: target }) => el("option", { value: id }, visible(`${id}: ${text} → ${target}`))));
  const move = (by) => () => { list.selectedIndex = (list.selectedIndex + by + cases.length) % cases.length; open(list.value); };
  const texts = el("div");
  async function open(id) {
    chosenCase = id;
    remember();
    const { samples } = await get(`/api/samples?${asked}&case=${encodeURIComponent(id)}`);
    fill(texts, samples.map(sampleOf));
  }
  node.hidden = false;
  fill(node, el("h2", {}, "What it says"),
    el("p", { className: "line" }, el("button", { type: "button", onclick: move(-1), ariaLabel: "previous case" }, "←"), list,
      el("button", { type: "button", onclick: move(1), ariaLabel: "next case" }, "→")),
    el("p", { className: "soft small" }, "Marked are ", el("mark", {}, "the new object"), " and ", el("mark", { className: "was" }, "the true one"), "."), texts);
  if (cases.some(({ id }) => id === chosenCase)) list.value = chosenCase;
  await open(list.value);
}

const MARKS = { new: "", true: "was", reference: "reference" };

function pieces(list) {
  return list.map(([text, kind]) => (kind in MARKS ? el("mark", { className: MARKS[kind] }, visible(text))
    : kind === "opening" ? el("i", {}, visible(text)) : visible(text)));
}

const OPEN = 3; // How many texts of a case are shown at once.

function sampleOf({ text, true: was, new: target, model, rows }) {
  const texts = rows.map((row) => el("div", { className: "both" }, Object.entries(row).map(([name, list]) => el("div", {}, el("h3", {}, visible(name)), pieces(list)))));
  const more = texts.slice(OPEN);
  return el("section", {}, el("h3", {}, visible(text), " ", el("span", { className: "old" }, visible(was ?? "?")), " ", el("mark", {}, visible(target ?? "?")), " ", el("span", { className: "tag" }, model)),
    texts.slice(0, OPEN), more.length ? el("details", { className: "plain" }, el("summary", {}, `${more.length} more texts`), more) : null);
}
