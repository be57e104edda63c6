// A heat map that fills in as cells arrive; each cell tells its numbers by pointer, tap or keys.

import { el, fill, percent } from "./dom.js";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const NIGHT = [38, 36, 46];

// The paper's colours; at night from dark to light.
function ramp([light, middle, deep]) {
  const [from, to] = dark.matches ? [NIGHT, light] : [light, deep];
  const mix = (a, b, x) => a.map((value, i) => Math.round(value + (b[i] - value) * x));
  return (x) => (x < 0.5 ? mix(from, middle, 2 * x) : mix(middle, to, 2 * x - 1));
}

export class HeatMap {
  // `words` says what is drawn and how a number is told; `choose` hears of a layer that is clicked.
  constructor({ title, shades, labels, layers, low = 0, tell, choose }) {
    Object.assign(this, { title, shades, labels, layers, low, tell, choose });
    this.scores = labels.map(() => new Array(layers).fill(null));
    this.row = labels.length - 1;
    this.column = 0;
    this.canvas = el("canvas", { width: layers, height: labels.length });
    this.cursor = el("div", { className: "mark", hidden: true });
    this.cells = el("div", {
      className: "cells", tabIndex: 0, role: "application",
      ariaLabel: `${title}: tokens by layers; arrow keys read a cell, Enter chooses its layer`,
    }, this.canvas, this.cursor);
    this.output = el("output", {}, "\u00a0");
    this.bar = el("canvas", { width: 64, height: 1 });
    this.ends = [el("span"), el("span")];
    this.node = el("figure", { className: "heat" },
      el("h3", {}, title),
      el("div", { className: "map" },
        el("ul", { className: "tokens" }, labels.map((label) => el("li", { title: label }, label))),
        this.cells, el("div", { className: "layers" }, this.axis())),
      el("div", { className: "scale" }, this.ends[0], this.bar, this.ends[1]),
      this.output);
    this.listen();
    this.draw();
  }

  axis() {
    const step = [1, 2, 5, 10, 20].find((x) => this.layers / x <= 8) ?? 20;
    const ticks = Array.from({ length: Math.ceil(this.layers / step) }, (_, i) => i * step);
    return ticks.map((layer) => {
      const tick = el("span", {}, String(layer));
      tick.style.left = `${(100 * (layer + 0.5)) / this.layers}%`;
      return tick;
    });
  }

  put(tokens, layers, values) {
    tokens.forEach((token, i) => layers.forEach((layer, j) => {
      this.scores[token][layer] = values[i][j];
    }));
    this.draw();
  }

  get best() {
    let best = null;
    this.scores.forEach((row, token) => row.forEach((score, layer) => {
      if (score !== null && (best === null || score > best.score)) best = { token, layer, score };
    }));
    return best;
  }

  draw() {
    const color = ramp(this.shades);
    const best = this.best;
    const high = Math.max(this.low + 1e-3, best?.score ?? 0);
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(this.layers, this.labels.length);
    this.scores.flat().forEach((score, i) => {
      if (score === null) return;
      const share = Math.max(0, Math.min(1, (score - this.low) / (high - this.low)));
      image.data.set([...color(share), 255], 4 * i);
    });
    context.putImageData(image, 0, 0);
    const line = this.bar.getContext("2d");
    const strip = line.createImageData(64, 1);
    for (let i = 0; i < 64; i++) strip.data.set([...color(i / 63), 255], 4 * i);
    line.putImageData(strip, 0, 0);
    fill(this.ends[0], this.tell(this.low));
    fill(this.ends[1], best ? this.tell(high) : "…");
    if (this.cursor.hidden) this.rest();
  }

  rest() {
    const best = this.best;
    this.output.textContent = best
      ? `highest at “${this.labels[best.token]}”, layer ${best.layer}: ${this.tell(best.score)}` : "…";
  }

  show() {
    const score = this.scores[this.row][this.column];
    const effect = score === null ? 0 : score - this.low;
    const said = score === null ? "not measured yet"
      : `${this.tell(score)}${this.low ? `, effect ${effect < 0 ? "−" : "+"}${this.tell(Math.abs(effect))}` : ""}`;
    this.output.textContent = `${this.labels[this.row]} · layer ${this.column} · ${said}`;
    this.cursor.hidden = false;
    Object.assign(this.cursor.style, {
      left: `${(100 * this.column) / this.layers}%`, top: `${(100 * this.row) / this.labels.length}%`,
      width: `${100 / this.layers}%`, height: `${100 / this.labels.length}%`,
    });
  }

  hide() {
    this.cursor.hidden = true;
    this.rest();
  }

  listen() {
    const clamp = (x, count) => Math.max(0, Math.min(count - 1, x));
    const point = (event) => {
      const box = this.cells.getBoundingClientRect();
      this.column = clamp(Math.floor(((event.clientX - box.left) / box.width) * this.layers), this.layers);
      this.row = clamp(Math.floor(((event.clientY - box.top) / box.height) * this.labels.length), this.labels.length);
      this.show();
    };
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    this.cells.addEventListener("pointermove", point);
    this.cells.addEventListener("pointerdown", point);
    this.cells.addEventListener("pointerleave", () => this.hide());
    this.cells.addEventListener("focus", () => this.show());
    this.cells.addEventListener("blur", () => this.hide());
    this.cells.addEventListener("click", () => this.choose?.(this.column));
    this.cells.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (event.key === "Enter") this.choose?.(this.column);
      if (!step) return;
      event.preventDefault();
      this.row = clamp(this.row + step[0], this.labels.length);
      this.column = clamp(this.column + step[1], this.layers);
      this.show();
    });
    dark.addEventListener("change", () => this.draw());
  }
}

export const asProbability = percent;
export const asNumber = (x) => (x === 0 ? "0" : x.toPrecision(2));
