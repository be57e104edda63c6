// The prompt: whatever is selected in it is the subject. A mirror behind the text shows the mark.

import { $, el, fill, visible } from "./dom.js";

export const prompt = {
  text: "",
  start: 0, // The subject's place, in UTF-16 units as the browser counts.
  stop: 0,
  listeners: [],

  get subject() {
    return this.text.slice(this.start, this.stop);
  },

  // Which of the subject's places in the prompt is meant, from 1.
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
    let at = -1;
    for (let i = 0; subject && i < (occurrence ?? Infinity); i++) {
      const next = text.indexOf(subject, at + 1);
      if (next < 0) break;
      at = next;
    }
    this.mark(at < 0 ? 0 : at, at < 0 ? 0 : at + subject.length);
  },

  // Spaces at the ends of a selection are not part of the subject.
  mark(start, stop) {
    const words = this.text.slice(start, stop);
    this.start = start + (words.length - words.trimStart().length);
    this.stop = Math.max(this.start, stop - (words.length - words.trimEnd().length));
    show();
    for (const listener of this.listeners) listener();
  },
};

function show() {
  const { text, start, stop, subject } = prompt;
  // A last line that is empty has no height unless something stands in it.
  fill(document.querySelector(".mirror"), text.slice(0, start), el("mark", {}, text.slice(start, stop)), `${text.slice(stop)}\u200b`);
  fill($("subject"), ...(subject
    ? ["Its subject: ", el("span", { className: "subject" }, visible(subject))]
    : [text.trim() ? "Now select the words that name its subject." : "Type a prompt, then select the words that name its subject."]));
}

function selected() {
  const area = $("prompt");
  const { selectionStart: start, selectionEnd: stop, value } = area;
  const everything = start === 0 && stop === value.length;
  if (document.activeElement === area && start < stop && !everything) prompt.mark(start, stop);
}

function typed() {
  const area = $("prompt");
  const { subject, occurrence } = prompt;
  prompt.set(area.value, subject, occurrence);
}

export function startPrompt() {
  const area = $("prompt");
  area.addEventListener("input", () => {
    const { selectionStart, selectionEnd } = area;
    typed();
    area.setSelectionRange(selectionStart, selectionEnd);
  });
  document.addEventListener("selectionchange", selected);
  area.addEventListener("select", selected);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    document.querySelector(".view:not([hidden]) form")?.requestSubmit();
  });
  show();
}
