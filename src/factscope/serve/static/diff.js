// Two texts side by side, with the words that differ highlighted.

import { el } from "./dom.js";

const words = (text) => text.match(/\s+|[^\s]+/g) ?? [];

// For each word of both texts, whether it is in their longest common subsequence.
function commonWords(a, b) {
  const lengths = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const common = [a.map(() => false), b.map(() => false)];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) common[0][i++] = common[1][j++] = true;
    else if (lengths[i + 1][j] >= lengths[i][j + 1]) i++;
    else j++;
  }
  return common;
}

// Adjacent words that differ become one <mark>, including the spaces between them.
function highlight(list, common, className) {
  const nodes = [];
  let run = [];
  const closeRun = () => {
    const last = run.findLastIndex((word) => word.trim()) + 1;
    if (last) nodes.push(el("mark", { className }, run.slice(0, last).join("")));
    nodes.push(run.slice(last).join(""));
    run = [];
  };
  list.forEach((word, i) => {
    if (!common[i] || (run.length && !word.trim())) return run.push(word);
    closeRun();
    return nodes.push(word);
  });
  closeRun();
  return nodes;
}

export function sideBySide(before, after, afterTitle = "with the selected edits") {
  const [a, b] = [words(before), words(after)];
  const [commonA, commonB] = commonWords(a, b);
  return el("div", { className: "both" },
    el("div", {}, el("h3", {}, "unedited model"), highlight(a, commonA, "diff was")),
    el("div", {}, el("h3", {}, afterTitle), highlight(b, commonB, "diff")));
}
