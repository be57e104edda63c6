// Elements from words. Text is always text: nothing that a visitor or a model says becomes markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && (node[name] === null || typeof node[name] !== "object")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// The same; who was on an element with a data-key stays on the one that takes its place.
export function refill(node, ...children) {
  const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  fill(node, ...children);
  if (key !== undefined) node.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
  return node;
}

// A probability with one digit; one that is not quite nothing says so.
export function percent(p) {
  if (p === null || p === undefined) return "–";
  if (p > 0 && p < 0.0005) return "<0.1 %";
  return `${(100 * p).toFixed(1)} %`;
}

// Characters without a shape of their own, made visible.
const SIGNS = { "\n": "↵", "\r": "↵", "\t": "⇥" };
export const visible = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g, (c) => SIGNS[c] ?? "\ufffd");

export function numbers(list, pairs) {
  fill(list, Object.entries(pairs).map(([name, value]) =>
    el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))));
}

export function links(node, words, base, files) {
  fill(node, words, files.map(([name, file]) =>
    [" ", el("a", { className: "file", href: `${base}/${file}`, download: "" }, name)]).flat());
}
