// A heat map of tokens (or heads) by layers that fills in as cells arrive. The value of a cell is
// shown when it is pointed at, tapped, or reached with the arrow keys.

import { el, fill, percent } from "./dom.js";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const DARK_BACKGROUND = [38, 36, 46];
const MIN_WORD_WIDTH = 32; // Pixels of a cell that has room for a word.

// Color of a value in [0, 1]: the paper's colors; in dark mode from dark to light.
function colorScale([light, middle, deep]) {
  const [from, to] = dark.matches ? [DARK_BACKGROUND, light] : [light, deep];
  const mix = (a, b, x) => a.map((value, i) => Math.round(value + (b[i] - value) * x));
  return (x) => (x < 0.5 ? mix(from, middle, 2 * x) : mix(middle, to, 2 * x - 1));
}

// Perceived lightness, from 0 to 1.
const luminance = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b) / 255;

export class HeatMap {
  // The colors go from the base of the `scale` to `high(map)`, by default the strongest value.
  // `axis` names the layers, `rows` the rows, `detail(token, layer)` is shown with a cell,
  // `words[token][layer]` in a cell, and `onLayer` is called with the layer of a clicked cell.
  constructor({ title, colors, labels, layers, scale, high = (map) => map.strongest?.value, axis = "layer", rows = "token", detail, words, onLayer }) {
    Object.assign(this, { title, colors, labels, layers, scale, high, detail, onLayer });
    this.values = labels.map(() => new Array(layers).fill(null));
    this.row = labels.length - 1;
    this.column = 0;
    this.canvas = el("canvas", { width: layers, height: labels.length });
    this.cursor = el("div", { className: "mark", hidden: true });
    this.cells = el("div", {
      className: "cells", tabIndex: 0, role: "application",
      ariaLabel: `${title}: ${rows}s by layers; arrow keys move to a cell${onLayer ? ", Enter selects its layer" : ""}`,
    }, this.canvas, words ? this.wordGrid(words) : null, this.cursor);
    this.output = el("output", {}, "\u00a0");
    this.bar = el("canvas", { width: 64, height: 1 });
    this.unit = el("span");
    this.barLabels = [el("span"), el("span")];
    this.more = detail ? el("div", { className: "soft small detail" }) : null;
    this.node = el("figure", { className: "heat" },
      el("h3", {}, title),
      el("div", { className: "map" },
        el("ul", { className: "tokens", ariaLabel: `${rows}s` }, labels.map((label) => el("li", { title: label }, label))),
        this.cells, el("p", { className: "axis-name tokens-name" }, rows), el("div", { className: "layers" }, this.ticks()),
        el("p", { className: "axis-name layers-name" }, axis)),
      el("div", { className: "scale" }, this.unit, this.barLabels[0], this.bar, this.barLabels[1]),
      this.output, this.more);
    this.listen();
    this.draw();
  }

  // Words over the cells, in the color that reads better; hidden where the cells are too narrow.
  wordGrid(words) {
    const grid = el("div", { className: "words", ariaHidden: "true" }, words.flat().map((word) => el("span", {}, word)));
    grid.style.gridTemplateColumns = `repeat(${this.layers}, 1fr)`;
    new ResizeObserver(([{ contentRect }]) => grid.classList.toggle("narrow", contentRect.width < MIN_WORD_WIDTH * this.layers)).observe(grid);
    return (this.words = grid);
  }

  ticks() {
    const step = [1, 2, 5, 10, 20].find((x) => this.layers / x <= 8) ?? 20;
    const ticks = Array.from({ length: Math.ceil(this.layers / step) }, (_, i) => i * step);
    return ticks.map((layer) => {
      const tick = el("span", {}, String(layer));
      tick.style.left = `${(100 * (layer + 0.5)) / this.layers}%`;
      return tick;
    });
  }

  update(tokens, layers, values) {
    tokens.forEach((token, i) => layers.forEach((layer, j) => {
      this.values[token][layer] = values[i][j];
    }));
    this.draw();
  }

  updateAll(values) {
    this.update([...this.labels.keys()], [...Array(this.layers).keys()], values);
  }

  // A value as it is shown; null if it is not computed yet.
  shown(token, layer) {
    const value = this.values[token][layer];
    return value === null ? null : this.scale.value(value);
  }

  get strongest() {
    let best = null;
    this.values.forEach((row, token) => row.forEach((_, layer) => {
      const value = this.shown(token, layer);
      if (value !== null && (best === null || this.scale.sign * (value - best.value) > 0)) best = { token, layer, value };
    }));
    return best;
  }

  draw() {
    const color = colorScale(this.colors);
    const { base, sign, format, unit } = this.scale;
    const best = this.strongest;
    const range = Math.max(1e-3, sign * ((this.high(this) ?? base) - base)), end = base + sign * range;
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(this.layers, this.labels.length);
    this.values.forEach((row, token) => row.forEach((_, layer) => {
      const value = this.shown(token, layer), i = token * this.layers + layer;
      if (value === null) return;
      const rgb = color(Math.max(0, Math.min(1, (sign * (value - base)) / range)));
      image.data.set([...rgb, 255], 4 * i);
      if (this.words) this.words.children[i].style.color = luminance(rgb) > 0.5 ? "#1f1d24" : "#ffffff";
    }));
    context.putImageData(image, 0, 0);
    const bar = this.bar.getContext("2d");
    const strip = bar.createImageData(64, 1);
    for (let i = 0; i < 64; i++) strip.data.set([...color(i / 63), 255], 4 * i);
    bar.putImageData(strip, 0, 0);
    fill(this.unit, unit);
    fill(this.barLabels[0], format(base));
    // Values beyond the scale have its last color.
    const beyond = best && sign * (best.value - end) > 0 ? (sign > 0 ? "≥ " : "≤ ") : "";
    fill(this.barLabels[1], `${beyond}${format(end)}`);
    if (this.cursor.hidden) this.showStrongest();
  }

  showStrongest() {
    const best = this.strongest;
    this.output.textContent = best
      ? `${this.scale.sign > 0 ? "highest" : "lowest"} at “${this.labels[best.token]}”, layer ${best.layer}: ${this.scale.format(best.value)}` : "…";
  }

  showCell() {
    const { base, sign, format, hasEffects } = this.scale;
    const value = this.shown(this.row, this.column);
    const effect = value === null ? 0 : sign * (value - base);
    const text = value === null ? "not computed yet"
      : `${format(value)}${hasEffects ? `, effect ${effect < 0 ? "−" : "+"}${format(Math.abs(effect))}` : ""}`;
    this.output.textContent = `${this.labels[this.row]} · layer ${this.column} · ${text}`;
    if (this.more) fill(this.more, value === null ? null : this.detail(this.row, this.column));
    this.cursor.hidden = false;
    Object.assign(this.cursor.style, {
      left: `${(100 * this.column) / this.layers}%`, top: `${(100 * this.row) / this.labels.length}%`,
      width: `${100 / this.layers}%`, height: `${100 / this.labels.length}%`,
    });
  }

  hideCell() {
    this.cursor.hidden = true;
    if (this.more) fill(this.more);
    this.showStrongest();
  }

  listen() {
    const clamp = (x, count) => Math.max(0, Math.min(count - 1, x));
    const point = (event) => {
      const box = this.cells.getBoundingClientRect();
      this.column = clamp(Math.floor(((event.clientX - box.left) / box.width) * this.layers), this.layers);
      this.row = clamp(Math.floor(((event.clientY - box.top) / box.height) * this.labels.length), this.labels.length);
      this.showCell();
    };
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    this.cells.addEventListener("pointermove", point);
    this.cells.addEventListener("pointerdown", point);
    this.cells.addEventListener("pointerleave", () => this.hideCell());
    this.cells.addEventListener("focus", () => this.showCell());
    this.cells.addEventListener("blur", () => this.hideCell());
    this.cells.addEventListener("click", () => this.onLayer?.(this.column));
    this.cells.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (event.key === "Enter") this.onLayer?.(this.column);
      if (!step) return;
      event.preventDefault();
      this.row = clamp(this.row + step[0], this.labels.length);
      this.column = clamp(this.column + step[1], this.layers);
      this.showCell();
    });
    dark.addEventListener("change", () => this.draw());
  }
}

// A scale that a few very large values do not dominate, such as those of the first token.
export function quantile(values, fraction) {
  const sorted = values.flat().filter((value) => value !== null).sort((a, b) => a - b);
  return sorted[Math.floor(fraction * (sorted.length - 1))];
}

// ---- scales

// How values are shown: `value` turns a raw value into the shown one, `format` that into text,
// `unit` names it. `base` is the shown value of a cell without effect; `sign` is -1 if effects
// lower the value.
const plainScale = (unit, format) => ({ unit, format, value: (x) => x, base: 0, sign: 1, hasEffects: false });

export const probabilityScale = (unit) => plainScale(unit, percent);
export const normScale = plainScale("norm", (x) => (x === 0 ? "0" : x.toPrecision(2)));

const fixed = (digits) => (x) => x.toFixed(digits).replace("-", "−").replace(/^−(0\.0*)$/, "$1");
const FORMATS = { "probability": percent, "rank": fixed(1) };

// The scale of a trace's metric, given its baseline; normalised, 0 is the corrupted run and 1 the
// clean run. `clean` and `corrupted` are the shown values of the two runs, `other` is that of the run
// that cells come from.
export function metricScale(baseline, normalised = false) {
  const { metric, metric_label: unit, clean_value: clean, corrupted_value: corrupted, base_value: base, sign } = baseline;
  const corrupts = baseline.direction === "corrupt";
  const raw = { unit, format: FORMATS[metric] ?? fixed(2), value: (x) => x, base, sign, clean, corrupted, hasEffects: true, normalised: false };
  if (!normalised || clean === corrupted) return { ...raw, other: corrupts ? corrupted : clean };
  const value = (x) => (x - corrupted) / (clean - corrupted);
  return {
    unit: `normalised ${unit}`, format: fixed(2), value, base: value(base), sign: corrupts ? -1 : 1,
    clean: 1, corrupted: 0, other: corrupts ? 0 : 1, hasEffects: true, normalised: true,
  };
}
