// Inputs for topic settings: every kind of value, with units that people write.

import { html } from "../vendor/preact-htm.js";
import { bytes, number, plural, span } from "../format.js";
import { Marked } from "./parts.js";

// The units of the broker, which parses what a person wrote (config/units.py).
const MINUTE = 60_000;
const UNITS = {
  ms: { ms: 1, s: 1000, min: MINUTE, h: 60 * MINUTE, d: 1440 * MINUTE },
  bytes: { b: 1, kib: 1024, mib: 1024 ** 2, gib: 1024 ** 3, tib: 1024 ** 4 },
};
const LARGEST = "9223372036854775807"; // Kafka's "never"

// What the broker stores for what a person wrote: "7d" is 604800000. Anything else stays as it is.
function stored(setting, text) {
  const trimmed = text.trim();
  const [, digits, unit] = /^(\d+)\s*([a-z]+)$/i.exec(trimmed) || [];
  const factor = UNITS[setting.unit]?.[unit?.toLowerCase()];
  return factor ? String(Number(digits) * factor) : trimmed;
}

// A value as people read it, or nothing if that says no more than the value.
export function readable(setting, value) {
  if (value === null || value === undefined || value === "" || !/^-?\d+$/.test(value)) return "";
  if (value === LARGEST || (value === "-1" && setting.unit)) return "no limit";
  const days = Number(value) / UNITS.ms.d;
  if (setting.unit === "ms" && days >= 1 && Number.isInteger(days)) return plural(days, "day");
  if (setting.unit === "ms" && Number(value) >= 1000) return span(Number(value));
  if (setting.unit === "bytes" && Number(value) >= 1024) return bytes(Number(value));
  return Number(value) >= 10_000 ? number(Number(value)) : "";
}

export function SettingInput({ setting, value, onInput, id }) {
  const change = (event) => onInput(event.target.value);
  if (setting.type === "boolean") {
    return html`<${Choice} id=${id} value=${value} choices=${["true", "false"]} onChange=${change} />`;
  }
  if (setting.choices.length && setting.type === "list") {
    return html`<${Subset} id=${id} value=${value} choices=${setting.choices} onChange=${change} />`;
  }
  if (setting.choices.length) {
    return html`<${Choice} id=${id} value=${value} choices=${setting.choices} onChange=${change} />`;
  }
  const hint = { ms: "7d, 12h or 1000", bytes: "64MiB or 1000" }[setting.unit] || "";
  const meaning = readable(setting, stored(setting, value));
  return html`<input id=${id} type="text" value=${value} placeholder=${hint} onInput=${change}
      autocomplete="off" spellcheck=${false} aria-describedby=${`${id}-means`} />
    <small id=${`${id}-means`}>${meaning && `= ${meaning}`}</small>`;
}

function Choice({ id, value, choices, onChange }) {
  return html`<select id=${id} value=${value} onChange=${onChange}>
    ${choices.map((choice) => html`<option key=${choice} value=${choice} selected=${choice === value}>${choice}</option>`)}
  </select>`;
}

// One of the words, all of them, or none.
function Subset({ id, value, choices, onChange }) {
  const subsets = [...choices, choices.join(","), ""];
  const chosen = choices.filter((choice) => value.split(",").includes(choice)).join(",");
  return html`<select id=${id} value=${chosen} onChange=${onChange}>
    ${subsets.map((each) => html`<option key=${each} value=${each} selected=${each === chosen}>${each.replaceAll(",", " and ") || "neither (empty value)"}</option>`)}
  </select>`;
}

// The range and the effect of a setting, after its help text.
export function Help({ setting }) {
  const { minimum, maximum } = setting;
  return html`<p class="help">
    <${Marked} text=${setting.text} />
    ${minimum !== null && maximum !== null && html` From ${minimum} to ${maximum}.`}
    ${minimum !== null && maximum === null && html` At least ${minimum}.`}
    ${!setting.has_effect && html` <i>Stored for tools; it changes nothing in this broker.</i>`}
  </p>`;
}
