// The prompt, its tokens, and the next tokens that the model predicts. The subject is chosen by
// clicking its first and last token; an element behind the field (.mirror) highlights it.

import { get, post } from "./api.js";
import { $, el, fill, refill, tokenList } from "./dom.js";

const PAUSE = 250; // Milliseconds without typing before the tokens are requested.
const PATIENCE = 1000; // Milliseconds before the page says that the next tokens wait in the queue.

let onChange = () => {};
let tokens = []; // Spans [start, stop) of the tokens, in UTF-16 code units.
let first = null; // The token clicked first, while the last one may still be clicked.
let note = "";
let timer, abort, requested; // The request for tokens: its pause, its signal, its prompt.

export const prompt = {
  text: "",
  start: 0, // The subject's span in UTF-16 code units.
  stop: 0,

  get subject() {
    return this.text.slice(this.start, this.stop);
  },

  // Which occurrence of the subject in the prompt is selected, from 1.
  get occurrence() {
    let count = 0;
    for (let i = 0; i <= this.start; i++) if (this.text.startsWith(this.subject, i)) count++;
    return count;
  },

  get body() {
    return { prompt: this.text, subject: this.subject, occurrence: this.occurrence };
  },

  get ready() {
    return this.text.trim() !== "" && this.subject.trim() !== "";
  },

  set(text, subject, occurrence) {
    this.text = text;
    $("prompt").value = text;
    const [start, stop] = findSubject(text, subject, occurrence);
    note = "";
    first = null;
    this.select(start, stop);
    requestTokens(0);
  },

  // Spaces at the ends of the selection are not part of the subject.
  select(start, stop) {
    const text = this.text.slice(start, stop);
    this.start = start + (text.length - text.trimStart().length);
    this.stop = Math.max(this.start, stop - (text.length - text.trimEnd().length));
    draw();
    onChange();
  },
};

// The span of the subject's given occurrence, by default the last; empty if there is none.
export function findSubject(text, subject, occurrence) {
  let at = -1;
  for (let i = 0; subject && i < (occurrence ?? Infinity); i++) {
    const next = text.indexOf(subject, at + 1);
    if (next < 0) break;
    at = next;
  }
  return at < 0 ? [0, 0] : [at, at + subject.length];
}

// The subject's span after an edit of the text that ends at the caret. Typing inside or directly at
// the end of the subject changes the subject; other edits leave its words as they are.
function movedSpan(before, after, caret, start, stop) {
  const shorter = Math.min(before.length, after.length);
  let head = 0, tail = 0;
  while (tail < Math.min(shorter, after.length - caret) && before[before.length - 1 - tail] === after[after.length - 1 - tail]) tail++;
  while (head < shorter - tail && before[head] === after[head]) head++;
  const removedTo = before.length - tail, insertedTo = after.length - tail, shift = after.length - before.length;
  if (head === stop && removedTo === stop && stop > start) return [start, stop + after.slice(head, insertedTo).match(/^\S*/)[0].length];
  if (removedTo <= start) return [start + shift, stop + shift];
  if (head >= stop) return [start, stop];
  if (head >= start && removedTo <= stop) return [start, stop + shift];
  return head > start ? [start, head] : [insertedTo, Math.max(insertedTo, stop + shift)];
}

function onInput() {
  const before = prompt.text, subject = prompt.subject;
  prompt.text = $("prompt").value;
  const [start, stop] = movedSpan(before, prompt.text, $("prompt").selectionEnd, prompt.start, prompt.stop);
  first = null;
  prompt.select(start, stop);
  if (subject && !prompt.subject) note = "The subject was deleted. ";
  else if (subject && prompt.subject !== subject) note = "The subject changed while you typed. ";
  draw();
  requestTokens(PAUSE);
}

function draw() {
  const { text, start, stop, subject } = prompt;
  // Text nodes of their own, since the mirror must have every character of the field. The
  // zero-width space gives an empty last line its height.
  const mark = el("mark");
  mark.textContent = text.slice(start, stop);
  const mirror = document.querySelector(".mirror");
  mirror.replaceChildren(text.slice(0, start), mark, `${text.slice(stop)}\u200b`);
  const more = first === null ? "" : " Click its last token, if it has several.";
  fill($("subject"), note, subject ? ["Subject: ", el("span", { className: "subject" }, subject), ".", more]
    : text.trim() ? "Click the first and the last token of the subject." : "Enter a prompt, then click its subject.");
  for (const [i, button] of [...$("tokens").children].entries()) button.ariaPressed = String(inSubject(i));
}

// ---- tokens

const inSubject = (i) => tokens[i][0] < prompt.stop && tokens[i][1] > prompt.start;

function clickToken(i) {
  note = "";
  const other = first ?? i;
  first = first === null ? i : null;
  prompt.select(tokens[Math.min(i, other)][0], tokens[Math.max(i, other)][1]);
}

function drawTokens(spans) {
  tokens = spans;
  first = null;
  refill($("tokens"), spans.map(([start, stop], i) =>
    el("button", { type: "button", className: "token", "data-key": i, onclick: () => clickToken(i) }, prompt.text.slice(start, stop))));
  draw();
}

// The tokens and the model's next tokens; words, until the server responds.
function requestTokens(pause) {
  const text = prompt.text;
  if (text === requested) return;
  requested = text;
  clearTimeout(timer);
  abort?.abort();
  $("next").classList.add("stale");
  timer = setTimeout(async () => {
    abort = new AbortController();
    drawTokens([...text.matchAll(/\S+/g)].map((word) => [word.index, word.index + word[0].length]));
    if (!text.trim()) return fill($("next"));
    const waiting = setTimeout(() => showWaiting(text), PATIENCE);
    try {
      const found = await post("/api/next-tokens", { prompt: text }, abort.signal);
      drawTokens(codeUnits(text, found.tokens));
      fill($("next"), "The model continues with", tokenList(found.next));
    } catch (error) {
      if (error.name === "AbortError") return null;
      fill($("next"), error.message);
      requested = null;
    } finally {
      clearTimeout(waiting);
    }
    return $("next").classList.remove("stale");
  }, pause);
}

// Take away the next tokens of the previous prompt while those of this one wait for other jobs.
async function showWaiting(text) {
  fill($("next"), "waiting for the model…");
  const { jobs } = await get("/api/queue").catch(() => ({ jobs: 0 }));
  if (jobs > 1 && requested === text && $("next").classList.contains("stale")) fill($("next"), `waiting for the model: ${jobs} jobs in the queue`);
}

// Spans in UTF-16 code units, from spans in characters. Several tokens may be parts of one
// character; they become one span.
function codeUnits(text, spans) {
  const starts = [0];
  for (const character of text) starts.push(starts.at(-1) + character.length);
  return spans.filter(({ stop }, i) => stop > (spans[i - 1]?.stop ?? 0)).map(({ start, stop }) => [starts[start], starts[stop]]);
}

export function startPrompt(changed) {
  onChange = changed;
  const area = $("prompt");
  area.addEventListener("input", onInput);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    document.querySelector(".view:not([hidden]) form")?.requestSubmit();
  });
  draw();
}
