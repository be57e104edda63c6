// Form controls for settings. Names, defaults, choices and help texts come from /api/about.

import { el, fill } from "./dom.js";

const SELECTOR = "[data-setting]";

function control({ name, control: type, default: value, choices, min, step }) {
  const described = { name, "data-setting": name, "aria-describedby": `help-${name}` };
  if (type === "select") {
    return el("select", described, choices.map((choice) => el("option", { value: choice, selected: choice === value }, choice)));
  }
  if (type === "checkbox") return el("input", { type, ...described, checked: value });
  return el("input", {
    type, ...described, value, autocomplete: "off", spellcheck: false,
    ...(type === "number" ? { min, step, inputMode: "decimal" } : { className: "short" }),
  });
}

export function drawSettings(node, settings) {
  fill(node, settings.map((setting) =>
    el("div", {}, el("label", {}, setting.name.replaceAll("-", " "), control(setting)),
      el("p", { className: "soft help", id: `help-${setting.name}` }, setting.help))));
}

// The values by name. An empty field is left out, so that the default applies.
export function readSettings(node) {
  const controls = [...node.querySelectorAll(SELECTOR)].filter((c) => c.type === "checkbox" || c.value !== "");
  return Object.fromEntries(controls.map((c) => [c.name, c.type === "checkbox" ? c.checked : c.value]));
}

// Settings that are not given get their defaults, so that a link says the same on every page.
export function writeSettings(node, settings, values) {
  drawSettings(node, settings);
  for (const c of node.querySelectorAll(SELECTOR)) {
    const value = values?.[c.name];
    if (value === undefined) continue;
    if (c.type === "checkbox") c.checked = value === true;
    else c.value = String(value);
  }
}
