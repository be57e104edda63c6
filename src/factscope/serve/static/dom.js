// DOM helpers. Strings become text nodes, never markup, so prompts and model output are safe.

export const $ = (id) => document.getElementById(id);

// Replace invisible characters by visible symbols, such as controls and U+202E, which reverses text.
// Zero-width joiners stay: emoji and several scripts need them.
const SYMBOLS = { "\n": "↵", "\r": "↵", "\t": "⇥", "\u200c": "\u200c", "\u200d": "\u200d" };
export const visible = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => SYMBOLS[c] ?? "\ufffd");

const asVisible = (value) => (typeof value === "string" ? visible(value) : value);
const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asVisible);

const READ_ALOUD = ["title", "ariaLabel", "alt"]; // Attributes whose text users see or hear.

// Create an element. Names with "on" are listeners; others are properties, or attributes.
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, given] of Object.entries(properties)) {
    if (given === undefined || given === null || given === false) continue;
    const value = READ_ALOUD.includes(name) ? asVisible(given) : given;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && (node[name] === null || typeof node[name] !== "object")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

// Like `fill`, but the focus stays on the element with the same data-key.
export function refill(node, ...children) {
  const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  fill(node, ...children);
  if (key !== undefined) node.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
  return node;
}

export function percent(p) {
  if (p === null || p === undefined) return "–";
  const number = p > 0 && p < 0.0005 ? "<0.1" : (100 * p).toFixed(1);
  return `${number}\u00a0%`; // A number and its unit stay on one line.
}

// Tokens with their probabilities, as a list.
export const tokenList = (tokens) => el("ol", { className: "likely" }, tokens.map(({ token, p }) => el("li", {}, el("b", {}, token), ` ${percent(p)}`)));

// Fill a <dl> with names and values.
export function showNumbers(list, pairs) {
  fill(list, Object.entries(pairs).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// A prompt with its subject highlighted; `start` and `stop` count UTF-16 code units.
export const promptNodes = (text, start, stop) => [text.slice(0, start), el("span", { className: "subject" }, text.slice(start, stop)), text.slice(stop)];

export function downloadLinks(node, title, base, files) {
  fill(node, title, files.map(([name, file]) => [" ", el("a", { className: "file", href: `${base}/${file}`, download: "" }, name)]));
}
