// DOM helpers. Strings become text nodes, never markup, so prompts and model output are safe.

export const $ = (id) => document.getElementById(id);

const present = (children) => children.flat().filter((child) => child !== null && child !== undefined);

// Create an element. Names with "on" are listeners; others are properties, or attributes.
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
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
  if (p > 0 && p < 0.0005) return "<0.1 %";
  return `${(100 * p).toFixed(1)} %`;
}

// Replace control and bidirectional formatting characters by visible symbols.
const SYMBOLS = { "\n": "↵", "\r": "↵", "\t": "⇥" };
export const visible = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g, (c) => SYMBOLS[c] ?? "\ufffd");

// Fill a <dl> with names and values.
export function showNumbers(list, pairs) {
  fill(list, Object.entries(pairs).map(([name, value]) =>
    el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))));
}

export function downloadLinks(node, title, base, files) {
  fill(node, title, files.map(([name, file]) =>
    [" ", el("a", { className: "file", href: `${base}/${file}`, download: "" }, name)]).flat());
}
