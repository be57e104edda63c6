// Displays pairs of passages one by one; order and sides are drawn at random for every rater.
// Answers refer to a text by its index in the study's data, not by the side it was displayed on.
"use strict";
const study = JSON.parse(document.getElementById("study").textContent);
const items = new Map(study.items.map((item) => [item.id, item]));
const QUESTIONS = ["consistent", "fluent"];
const CHOICES = [["left", "A"], ["same", "No difference"], ["right", "B"]];
const STORAGE_KEY = `factscope-study-${study.study}`;
const $ = (id) => document.getElementById(id);
let state = restored() || fresh();

function fresh() {
  const order = [...items.keys()];
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  const chosen = order.slice(0, study.per_rater);
  const left = Object.fromEntries(chosen.map((id) => [id, Math.random() < 0.5 ? 0 : 1]));
  return { rater: "", order: chosen, left, answers: {}, at: 0, view: "intro", saves: 0 };
}

// Answers are kept in localStorage and, for a reload, in the history entry: Chromium sometimes loses
// what a page opened from a file has stored.
function restored() {
  const read = (source) => {
    try {
      const saved = JSON.parse(source());
      return saved.order.length && saved.order.every((id) => items.has(id) && id in saved.left) ? [saved] : [];
    } catch {
      return [];
    }
  };
  const found = [() => localStorage.getItem(STORAGE_KEY), () => history.state[STORAGE_KEY]].flatMap(read);
  return found.sort((a, b) => b.saves - a.saves)[0];
}

function save() {
  state.saves += 1;
  const text = JSON.stringify(state);
  try {
    localStorage.setItem(STORAGE_KEY, text);
  } catch {
    $("trouble").textContent = "This browser does not store your answers: download them before you close the page.";
    $("trouble").hidden = false;
  }
  try {
    history.replaceState({ [STORAGE_KEY]: text }, "");
  } catch {
    // Some browsers limit how often this may be called.
  }
}

// Convert between the side on which a text is displayed and the index of the text.
const textOf = (id, side) => (side === "same" ? "same" : side === "left" ? state.left[id] : 1 - state.left[id]);
const sideOf = (id, text) => (text === "same" ? "same" : text === state.left[id] ? "left" : "right");

function answered() {
  return state.order.filter((id) => QUESTIONS.some((name) => (state.answers[id] || {})[name] !== undefined));
}

function answersFile() {
  const answers = answered().map((id) => ({ item: id, left: state.left[id], ...state.answers[id] }));
  return JSON.stringify({ kind: study.kind, study: study.study, rater: state.rater, answers }, null, 1) + "\n";
}

function show(view, focus = true) {
  state.view = view;
  save();
  for (const name of ["intro", "pair", "end"]) $(name).hidden = name !== view;
  if (view === "pair") showPair();
  if (view === "end") showEnd();
  if (!focus) return;
  scrollTo(0, 0);
  $({ intro: "rater", pair: "statement", end: "done" }[view]).focus({ preventScroll: true });
}

function showPair() {
  const id = state.order[state.at];
  const item = items.get(id);
  $("statement").textContent = item.statement;
  $("left").textContent = item.texts[state.left[id]];
  $("right").textContent = item.texts[1 - state.left[id]];
  $("place").textContent = `${state.at + 1} of ${state.order.length}`;
  $("bar").value = state.at / state.order.length;
  for (const name of QUESTIONS) {
    const given = (state.answers[id] || {})[name];
    const side = given === undefined ? null : sideOf(id, given);
    for (const radio of document.getElementsByName(name)) radio.checked = radio.value === side;
  }
}

function showEnd() {
  const count = answered().length;
  $("done").textContent = `You compared ${count} of ${state.order.length} pairs. Thank you!`;
  $("copy").value = answersFile();
}

function choose(name, side) {
  const id = state.order[state.at];
  state.answers[id] = { ...state.answers[id], [name]: textOf(id, side) };
  save();
  showPair();
}

function step(by) {
  const to = state.at + by;
  if (to < 0) return;
  if (to >= state.order.length) return show("end");
  state.at = to;
  show("pair");
}

function download() {
  const link = document.createElement("a");
  const name = state.rater.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "rater";
  link.href = URL.createObjectURL(new Blob([answersFile()], { type: "application/json" }));
  link.download = `answers-${name}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function press(event) {
  if (state.view !== "pair" || event.ctrlKey || event.metaKey || event.altKey) return;
  const place = "123456".indexOf(event.key);
  if (event.key.length === 1 && place >= 0) choose(QUESTIONS[Math.floor(place / 3)], CHOICES[place % 3][0]);
  else if (event.key === "Enter" && event.target.tagName !== "BUTTON") step(1);
  else if (event.key === "Backspace") step(-1);
  else return;
  event.preventDefault();
}

QUESTIONS.forEach((name, q) =>
  CHOICES.forEach(([side, text], c) => {
    const label = document.createElement("label");
    const radio = Object.assign(document.createElement("input"), { type: "radio", name, value: side });
    const caption = document.createElement("span");
    const key = Object.assign(document.createElement("kbd"), { textContent: String(3 * q + c + 1) });
    caption.append(text, " ", key);
    label.append(radio, caption);
    radio.addEventListener("change", () => choose(name, side));
    $(name).append(label);
  }),
);
$("who").addEventListener("submit", (event) => {
  event.preventDefault();
  state.rater = $("rater").value.trim();
  if (state.rater) show("pair");
});
$("back").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
$("stop").addEventListener("click", () => show("end"));
$("return").addEventListener("click", () => show("pair"));
$("download").addEventListener("click", download);
$("again").addEventListener("click", () => {
  if (!confirm("Have you downloaded your answers? They are deleted from this browser.")) return;
  state = fresh();
  $("rater").value = "";
  show("intro");
});
document.addEventListener("keydown", press);
show(state.view, false);
