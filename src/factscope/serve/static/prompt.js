// The prompt field. The text that is selected in it becomes the subject, which an element behind
// the field (.mirror) highlights.

import { $, el, fill, visible } from "./dom.js";

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
    let at = -1;
    for (let i = 0; subject && i < (occurrence ?? Infinity); i++) {
      const next = text.indexOf(subject, at + 1);
      if (next < 0) break;
      at = next;
    }
    this.select(at < 0 ? 0 : at, at < 0 ? 0 : at + subject.length);
  },

  // Spaces at the ends of the selection are not part of the subject.
  select(start, stop) {
    const text = this.text.slice(start, stop);
    this.start = start + (text.length - text.trimStart().length);
    this.stop = Math.max(this.start, stop - (text.length - text.trimEnd().length));
    draw();
  },
};

function draw() {
  const { text, start, stop, subject } = prompt;
  // The zero-width space gives an empty last line its height.
  fill(document.querySelector(".mirror"), text.slice(0, start), el("mark", {}, text.slice(start, stop)), `${text.slice(stop)}\u200b`);
  fill($("subject"), ...(subject
    ? ["Subject: ", el("span", { className: "subject" }, visible(subject))]
    : [text.trim() ? "Select the subject in the prompt." : "Enter a prompt, then select the subject in it."]));
}

function onSelect() {
  const area = $("prompt");
  const { selectionStart: start, selectionEnd: stop, value } = area;
  const everything = start === 0 && stop === value.length;
  if (document.activeElement === area && start < stop && !everything) prompt.select(start, stop);
}

export function startPrompt() {
  const area = $("prompt");
  area.addEventListener("input", () => {
    const { selectionStart, selectionEnd } = area;
    prompt.set(area.value, prompt.subject, prompt.occurrence);
    area.setSelectionRange(selectionStart, selectionEnd);
  });
  document.addEventListener("selectionchange", onSelect);
  area.addEventListener("select", onSelect);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    document.querySelector(".view:not([hidden]) form")?.requestSubmit();
  });
  draw();
}
