// A heat map of tokens by layers that fills in as cells arrive. The value of a cell is shown when
// it is pointed at, tapped, or reached with the arrow keys.

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
  // The colors go from `low` to `high(map)`, by default the highest value. `unit` names the values,
  // `format` turns one into text, `axis` names the layers, `detail(token, layer)` is shown with a
  // cell, `words[token][layer]` in a cell, and `onLayer` is called with the layer of a clicked cell.
  constructor({ title, colors, labels, layers, low = 0, high = (map) => map.highest?.value, unit, format, axis = "layer", detail, words, onLayer }) {
    Object.assign(this, { title, colors, labels, layers, low, high, unit, format, detail, onLayer });
    this.values = labels.map(() => new Array(layers).fill(null));
    this.row = labels.length - 1;
    this.column = 0;
    this.canvas = el("canvas", { width: layers, height: labels.length });
    this.cursor = el("div", { className: "mark", hidden: true });
    this.cells = el("div", {
      className: "cells", tabIndex: 0, role: "application",
      ariaLabel: `${title}: tokens by layers; arrow keys move to a cell, Enter selects its layer`,
    }, this.canvas, words ? this.wordGrid(words) : null, this.cursor);
    this.output = el("output", {}, "\u00a0");
    this.bar = el("canvas", { width: 64, height: 1 });
    this.barLabels = [el("span"), el("span")];
    this.more = detail ? el("div", { className: "soft small detail" }) : null;
    this.node = el("figure", { className: "heat" },
      el("h3", {}, title),
      el("div", { className: "map" },
        el("ul", { className: "tokens", ariaLabel: "tokens" }, labels.map((label) => el("li", { title: label }, label))),
        this.cells, el("p", { className: "axis-name tokens-name" }, "token"), el("div", { className: "layers" }, this.ticks()),
        el("p", { className: "axis-name layers-name" }, axis)),
      el("div", { className: "scale" }, el("span", {}, unit), this.barLabels[0], this.bar, this.barLabels[1]),
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

  get highest() {
    let best = null;
    this.values.forEach((row, token) => row.forEach((value, layer) => {
      if (value !== null && (best === null || value > best.value)) best = { token, layer, value };
    }));
    return best;
  }

  draw() {
    const color = colorScale(this.colors);
    const best = this.highest;
    const high = Math.max(this.low + 1e-3, this.high(this) ?? 0);
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(this.layers, this.labels.length);
    this.values.flat().forEach((value, i) => {
      if (value === null) return;
      const fraction = Math.max(0, Math.min(1, (value - this.low) / (high - this.low)));
      const rgb = color(fraction);
      image.data.set([...rgb, 255], 4 * i);
      if (this.words) this.words.children[i].style.color = luminance(rgb) > 0.5 ? "#1f1d24" : "#ffffff";
    });
    context.putImageData(image, 0, 0);
    const bar = this.bar.getContext("2d");
    const strip = bar.createImageData(64, 1);
    for (let i = 0; i < 64; i++) strip.data.set([...color(i / 63), 255], 4 * i);
    bar.putImageData(strip, 0, 0);
    fill(this.barLabels[0], this.format(this.low));
    // Values above the scale have its last color.
    fill(this.barLabels[1], `${best?.value > high ? "≥ " : ""}${this.format(high)}`);
    if (this.cursor.hidden) this.showHighest();
  }

  showHighest() {
    const best = this.highest;
    this.output.textContent = best
      ? `highest at “${this.labels[best.token]}”, layer ${best.layer}: ${this.format(best.value)}` : "…";
  }

  showCell() {
    const value = this.values[this.row][this.column];
    const effect = value === null ? 0 : value - this.low;
    const text = value === null ? "not computed yet"
      : `${this.format(value)}${this.low ? `, effect ${effect < 0 ? "−" : "+"}${this.format(Math.abs(effect))}` : ""}`;
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
    this.showHighest();
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

export const formatProbability = percent;
export const formatNumber = (x) => (x === 0 ? "0" : x.toPrecision(2));
