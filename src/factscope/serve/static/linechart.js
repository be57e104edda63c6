// A line chart by layer, as SVG. The values of a layer are shown when it is pointed at, tapped, or
// reached with the arrow keys.

import { el, fill } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 230, LEFT = 60, RIGHT = 12, TOP = 24, BOTTOM = 38;
const PIXELS_PER_TICK = 42;

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const text = (label, attributes) => svg("text", { class: "axis", ...attributes }, label);

// Round numbers from at most `low` to at least `high`.
function roundTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((x) => x * power >= raw) * power;
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

// `lines`: [{ name, kind, values }], null where there is no value; `levels`: [{ name, value }], dashed
// horizontal lines. `axis` names the layers, `unit` the values, `format` turns a value into text.
export function lineChart({ lines, levels = [], axis, unit, format }) {
  const layers = lines[0].values.length;
  const values = [0, ...lines.flatMap((line) => line.values), ...levels.map((level) => level.value)].filter((x) => x !== null);
  const low = Math.min(...values), ticks = roundTicks(low, Math.max(...values, low + 1e-3), 4);
  const plot = el("div", { className: "plot", tabIndex: 0, role: "application",
    ariaLabel: `${unit} by ${axis}: ${lines.map((line) => line.name).join(", ")}; arrow keys move to a layer` });
  const output = el("output", { className: "soft small" }, "\u00a0");
  let x, cursor, layer = null;

  function draw(width) {
    const [bottom, top] = [ticks[0], ticks.at(-1)];
    x = (l) => LEFT + ((width - LEFT - RIGHT) * (l + 0.5)) / layers;
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - bottom) / (top - bottom));
    cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    const chart = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" }, text(unit, { x: 0, y: 13 }));
    for (const tick of ticks) {
      chart.append(svg("line", { class: tick === 0 ? "grid zero" : "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
        text(format(tick), { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }));
    }
    const step = [1, 2, 5, 10, 20].find((s) => (layers / s) * PIXELS_PER_TICK <= width - LEFT) ?? 20;
    for (let l = 0; l < layers; l += step) {
      chart.append(text(String(l), { x: x(l), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }));
    }
    chart.append(text(axis, { x: (width + LEFT - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }), cursor);
    for (const { name, value } of levels) {
      chart.append(svg("line", { class: "level", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        text(name, { x: width - RIGHT, y: y(value) - 4, "text-anchor": "end" }));
    }
    for (const { kind, values: row } of lines) {
      const points = row.map((value, l) => (value === null ? null : `${x(l).toFixed(1)},${y(value).toFixed(1)}`)).filter(Boolean);
      chart.append(svg("polyline", { class: `curve ${kind}`, points: points.join(" ") }));
    }
    fill(plot, chart);
    show(layer);
  }

  function show(chosen) {
    layer = chosen;
    cursor.setAttribute("visibility", layer === null ? "hidden" : "visible");
    if (layer === null) return fill(output, "\u00a0");
    cursor.setAttribute("x1", x(layer));
    cursor.setAttribute("x2", x(layer));
    return fill(output, `layer ${layer} · ${lines.map(({ name, values: row }) => `${name} ${row[layer] === null ? "–" : format(row[layer])}`).join(" · ")}`);
  }

  const clamp = (l) => Math.max(0, Math.min(layers - 1, l));
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    show(clamp(Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * layers)));
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", () => show(null));
  plot.addEventListener("focus", () => show(layer ?? 0));
  plot.addEventListener("blur", () => show(null));
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(clamp((layer ?? 0) + move));
  });
  draw(560);
  new ResizeObserver(([{ contentRect: { width } }]) => { if (width > 0) draw(width); }).observe(plot);
  const legend = el("p", { className: "legend small" }, lines.map(({ name, kind }) => el("span", { className: `swatch ${kind}` }, name)));
  return el("div", { className: "chart" }, plot, legend, output);
}
