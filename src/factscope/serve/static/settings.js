// Form controls for settings. Names, defaults, choices and help texts come from /api/about.

import { el, fill } from "./dom.js";

const SELECTOR = "[data-setting]";

function control({ name, control: type, default: value, choices, min, step }) {
  if (type === "select") {
    return el("select", { name, "data-setting": name },
      choices.map((choice) => el("option", { value: choice, selected: choice === value }, choice)));
  }
  if (type === "checkbox") return el("input", { type, name, "data-setting": name, checked: value });
  return el("input", {
    type, name, "data-setting": name, value, autocomplete: "off", spellcheck: false,
    ...(type === "number" ? { min, step, inputMode: "decimal" } : { className: "short" }),
  });
}

export function drawSettings(node, settings) {
  fill(node, settings.map((setting) =>
    el("label", { title: setting.help }, setting.name.replaceAll("-", " "), control(setting))));
}

// The values by name. An empty field is left out, so that the default applies.
export function readSettings(node) {
  const controls = [...node.querySelectorAll(SELECTOR)].filter((c) => c.type === "checkbox" || c.value !== "");
  return Object.fromEntries(controls.map((c) => [c.name, c.type === "checkbox" ? c.checked : c.value]));
}

export function writeSettings(node, values = {}) {
  for (const c of node.querySelectorAll(SELECTOR)) {
    if (!(c.name in values)) continue;
    if (c.type === "checkbox") c.checked = values[c.name] === true;
    else c.value = values[c.name];
  }
}
