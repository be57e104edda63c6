// The trace on the page: its request body, the clean and corrupted runs, and, once it is finished,
// its tables. The form may hold another prompt by now.

import { $, downloadLinks } from "./dom.js";
import { HeatMap, metricScale } from "./heatmap.js";

export const KINDS = ["states", "mlp", "attn"];
const FILES = [["PNG", "figure.png"], ["SVG", "figure.svg"], ["PDF", "figure.pdf"], ["page", "page.html"], ["record", "record.json"]];

export const current = { body: null, baseline: null, tables: null, strongest: null, name: null };

// The scale of the trace's values: raw, or normalised if the switch is on.
export const currentScale = () => metricScale(current.baseline, $("normalised").checked);

// A request for further tables of the trace.
export const bodyFor = (tables, more = {}, settings = {}) => ({ ...current.body, ...more, tables, settings: { ...current.body.settings, ...settings } });

// What happens to a cell: "Restored" or "Corrupted".
export const intervention = ({ direction }) => (direction === "corrupt" ? "Corrupted" : "Restored");

export const heatMap = (about, title, kind, options) =>
  new HeatMap({ title, colors: about.kinds[kind].colors, labels: current.baseline.labels, layers: about.n_layers, scale: currentScale(), ...options });

export function showDownloads() {
  const query = $("normalised").checked ? "?normalise=true" : "";
  downloadLinks($("trace-files"), "Download:", `/api/traces/${current.name}`, FILES.map(([name, file]) => [name, `${file}${file === "record.json" ? "" : query}`]));
}
