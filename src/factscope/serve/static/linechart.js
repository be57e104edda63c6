// A line chart of probabilities by layer, as SVG.

import { el, fill, percent } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const W = 560, H = 220, LEFT = 46, RIGHT = 12, TOP = 12, BOTTOM = 34;

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// `lines`: [{ name, kind, values }]; `levels`: [{ name, value }], dashed horizontal lines.
export function lineChart(lines, levels, axis) {
  const layers = lines[0].values.length;
  const values = [...lines.flatMap((line) => line.values), ...levels.map((level) => level.value)].filter((x) => x !== null);
  const MARGIN = 1.06;
  const high = Math.max(0.05, ...values) * MARGIN;
  const x = (layer) => LEFT + ((W - LEFT - RIGHT) * layer) / Math.max(1, layers - 1);
  const y = (p) => TOP + (H - TOP - BOTTOM) * (1 - p / high);
  const text = (label, attributes) => svg("text", { class: "axis", ...attributes }, label);
  const chart = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${axis}: ${lines.map((line) => line.name).join(", ")}` });
  for (const p of [0, 0.5, 1].map((fraction) => fraction * high / MARGIN)) {
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(p), y2: y(p) }),
      text(percent(p), { x: LEFT - 6, y: y(p) + 4, "text-anchor": "end" }));
  }
  const step = Math.max(1, Math.ceil(layers / 8 / 5) * 5);
  for (let layer = 0; layer < layers; layer += layers > 12 ? step : 1) {
    chart.append(text(String(layer), { x: x(layer), y: H - BOTTOM + 16, "text-anchor": "middle" }));
  }
  chart.append(text(axis, { x: (W + LEFT) / 2, y: H - 3, "text-anchor": "middle" }));
  for (const { name, value } of levels) {
    chart.append(svg("line", { class: "level", x1: LEFT, x2: W - RIGHT, y1: y(value), y2: y(value) }),
      text(name, { x: W - RIGHT, y: y(value) - 4, "text-anchor": "end" }));
  }
  for (const { kind, values: ps } of lines) {
    const points = ps.map((p, layer) => (p === null ? null : `${x(layer).toFixed(1)},${y(p).toFixed(1)}`)).filter(Boolean);
    chart.append(svg("polyline", { class: `curve ${kind}`, points: points.join(" ") }));
  }
  const legend = el("p", { className: "legend small" }, lines.map(({ name, kind }) => el("span", { className: `swatch ${kind}` }, name)));
  return fill(el("div", { className: "chart" }), chart, legend);
}
