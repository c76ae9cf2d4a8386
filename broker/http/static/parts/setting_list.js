// Settings with their values, sources and help, and a form for each that can be changed.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { Empty, Tag, useAttempt } from "./parts.js";
import { Help, readable, SettingInput } from "./setting_input.js";

const SOURCES = {
  unknown: ["policy unknown", "warn"],
  dynamic_topic: ["set on this topic", "busy"],
  static_broker: ["settings file or option", "plain"],
  option: ["option", "plain"],
  dynamic_broker: ["set on the broker", "plain"],
};

// Sources below which the setting has another value.
const RESETTABLE = ["dynamic_topic", "dynamic_broker"];

// `save` sends a change: { set: { name: value } } or { unset: [name] }. `first` is shown above the
// list while nothing is filtered.
export function SettingList({ settings, save, first }) {
  const [filter, setFilter] = useState("");
  const [isShort, setShort] = useState(false);
  const rows = settings.filter(
    (setting) => setting.name.includes(filter) && !(isShort && setting.source === "default"),
  );
  return html`
    <div class="tools">
      <label>Name contains
        <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      </label>
      <label class="check">
        <input type="checkbox" checked=${isShort} onChange=${(event) => setShort(event.target.checked)} />
        Only what is set
      </label>
    </div>
    ${filter === "" && first}
    <ul class="settings">
      ${rows.map((setting) => html`<${Setting} key=${setting.name} setting=${setting} save=${save} />`)}
    </ul>
    ${!rows.length && html`<${Empty} title="No setting matches">Change the filter above.<//>`}
  `;
}

function isAsDefault(setting) {
  return RESETTABLE.includes(setting.source) && setting.value === setting.default;
}

function Setting({ setting, save }) {
  const [draft, setDraft] = useState(null);
  const meaning = readable(setting, setting.value);
  const [source, kind] = SOURCES[setting.source] || [];
  return html`<li>
    <div class="settinghead">
      <h3>${setting.name}</h3>
      ${source && html`<${Tag} kind=${kind}>${source}${isAsDefault(setting) && ", to its default"}<//>`}
      <span class="settingvalue">${setting.value || html`<i>empty</i>`}
        ${meaning && html` <small>${meaning}</small>`}</span>
      ${draft === null && !setting.read_only && html`<button type="button" class="small" aria-label=${`Change ${setting.name}`}
        onClick=${() => setDraft(setting.value ?? "")}>Change</button>`}
    </div>
    ${draft !== null && html`<${Editor} name=${setting.name} present=${setting.value}
      isChanged=${draft.trim() !== (setting.value ?? "")} close=${() => setDraft(null)}
      save=${() => save({ set: { [setting.name]: draft.trim() } })}
      reset=${RESETTABLE.includes(setting.source) ? () => save({ unset: [setting.name] }) : null}
      resetLabel=${`Use the default, ${setting.default === "" ? "empty" : setting.default}`}>
      <${SettingInput} id=${`edit-${setting.name}`} setting=${setting} value=${draft} onInput=${setDraft} />
    <//>`}
    <${Help} setting=${setting} />
  </li>`;
}

// The form of one setting. What the broker refuses is shown in it, and nothing is lost. `present` is the
// value in effect, which somebody else may change meanwhile.
export function Editor({ name, present, isChanged, children, save, reset, resetLabel, close }) {
  const { busy, error, attempt } = useAttempt();
  const [before] = useState(present);
  const form = useRef(null);
  useEffect(() => form.current.querySelector("input, select")?.focus(), []);
  const run = (act) => async (event) => {
    event.preventDefault();
    if (await attempt(act)) close();
  };
  return html`<form class="editor" ref=${form} onSubmit=${run(save)}>
    <label class="hidden" for=${`edit-${name}`}>New value of ${name}</label>
    ${children}
    <span class="editbuttons">
      <button class="main small" disabled=${busy || !isChanged}>Save</button>
      <button type="button" class="small" onClick=${close}>Cancel</button>
      ${reset && html`<button type="button" class="quiet small" disabled=${busy} onClick=${run(reset)}>${resetLabel}</button>`}
    </span>
    ${error
      ? html`<p class="problem" role="alert">${error.message}</p>`
      : present !== before && html`<p class="problem" role="alert">Somebody has changed it to ${present || "empty"} since
          you opened this form.</p>`}
  </form>`;
}
