// Attribution patching of the trace on the page: estimated cells next to the measured ones, and how
// well they agree.

import { $, el, fill, showNumbers } from "./dom.js";
import { Job } from "./job.js";
import { drawSettings, readSettings } from "./settings.js";
import { KINDS, bodyFor, current, heatMap } from "./traced.js";

let about, job;
let found = null; // The event with the estimates.

export function startAttribution(info) {
  about = info;
  job = new Job($("attribution-status"));
  const [setting] = about.table_settings.filter(({ name }) => name === "attribution");
  drawSettings($("attribution-settings"), [{ ...setting, choices: setting.choices.filter((choice) => choice !== "none") }]);
  $("attribution-kind").addEventListener("change", drawAttribution);
  $("estimate").addEventListener("click", estimate);
}

export const cancelAttribution = () => job.cancel();

// For a new trace.
export function resetAttribution() {
  job.reset();
  found = null;
  drawAttribution();
}

async function estimate() {
  if (!current.tables) return;
  const tables = [...KINDS, ...KINDS.map((kind) => `attribution ${kind}`)];
  await job.run("/api/traces", bodyFor(tables, {}, readSettings($("attribution-settings"))), (event) => {
    if (event.event === "record") found = event;
  });
  drawAttribution();
}

const number = (x) => (x === null ? "–" : x.toFixed(2));

export function drawAttribution() {
  if (!found) return fill($("attribution"));
  const kind = $("attribution-kind").value, { name } = about.kinds[kind], agreement = found.agreement[kind];
  const { restored, attribution } = found.tables;
  const measured = heatMap(about, `Measured: ${name}`, kind);
  measured.updateAll(restored[kind]);
  const estimated = heatMap(about, `${agreement.method} estimate: ${name}`, kind, { high: () => measured.strongest?.value });
  estimated.updateAll(attribution[kind]);
  const numbers = el("dl", { className: "numbers" });
  const { top } = agreement;
  showNumbers(numbers, {
    "correlation (Pearson)": number(agreement.pearson), "rank correlation (Spearman)": number(agreement.spearman),
    [`of the ${top} strongest cells, missed by the ${top} strongest estimates`]: `${agreement.missed} of ${top}`,
    [`cells to measure to find all ${top}, strongest estimates first`]: `${agreement.to_verify} of ${agreement.cells}`,
  });
  return fill($("attribution"), numbers, el("div", { className: "heats" }, measured.node, estimated.node));
}
