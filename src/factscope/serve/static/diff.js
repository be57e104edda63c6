// Two texts side by side, the words that differ marked.

import { el, visible } from "./dom.js";

const parts = (text) => text.match(/\s+|[^\s]+/g) ?? [];

// For each word of both texts whether it is in their longest common subsequence.
function shared(a, b) {
  const lengths = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const kept = [a.map(() => false), b.map(() => false)];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) kept[0][i++] = kept[1][j++] = true;
    else if (lengths[i + 1][j] >= lengths[i][j + 1]) i++;
    else j++;
  }
  return kept;
}

// Words that differ, with the spaces between them, as one mark.
function marked(words, kept, className) {
  const pieces = [];
  let run = [];
  const close = () => {
    const last = run.findLastIndex((word) => word.trim()) + 1;
    if (last) pieces.push(el("mark", { className }, visible(run.slice(0, last).join(""))));
    pieces.push(visible(run.slice(last).join("")));
    run = [];
  };
  words.forEach((word, i) => {
    if (!kept[i] || (run.length && !word.trim())) return run.push(word);
    close();
    return pieces.push(visible(word));
  });
  close();
  return pieces;
}

export function sideBySide(before, after, name = "with the edits") {
  const [a, b] = [parts(before), parts(after)];
  const [left, right] = shared(a, b);
  return el("div", { className: "both" },
    el("div", {}, el("h3", {}, "as it is"), marked(a, left, "diff was")),
    el("div", {}, el("h3", {}, name), marked(b, right, "diff")));
}
