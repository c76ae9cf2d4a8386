// The settings of a topic: what they are, why, and how to change them.

import { html, useState } from "./vendor/preact-htm.js";
import { del, get, patch } from "./api.js";
import { plural } from "./format.js";
import { Action, Empty, Loaded, Tag, useAttempt, usePoll } from "./parts.js";
import { Help, readable, SettingInput, toKafka } from "./setting_input.js";
import { TopicFrame } from "./topics.js";

const POLL_MS = 10_000;
const SOURCES = {
  dynamic_topic: ["set on this topic", "busy"],
  static_broker: ["settings file", "plain"],
  dynamic_broker: ["set on the broker", "plain"],
};

export function TopicSettingsPage({ topic }) {
  const path = `/api/v1/topics/${encodeURIComponent(topic)}`;
  const state = usePoll(() => get(path), POLL_MS, [topic]);
  return html`<${TopicFrame} topic=${topic} tab="settings">
    <${Loaded} state=${state}>${(data) => html`<${Settings} path=${path} topic=${data} reload=${state.reload} />`}<//>
  <//>`;
}

function Settings({ path, topic, reload }) {
  const [filter, setFilter] = useState("");
  const [isShort, setShort] = useState(false);
  const rows = topic.settings.filter(
    (setting) => setting.name.includes(filter) && !(isShort && setting.source === "default"),
  );
  const save = async (change) => {
    try {
      await patch(path, change, topic.etag);
    } finally {
      reload();
    }
  };
  return html`
    <div class="tools">
      <label>Name contains
        <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      </label>
      <label class="check">
        <input type="checkbox" checked=${isShort} onChange=${(event) => setShort(event.target.checked)} />
        Only what differs from the defaults
      </label>
    </div>
    ${!topic.internal && filter === "" && html`<ul class="settings"><${Partitions} count=${topic.partitions} save=${save} /></ul>`}
    <ul class="settings">
      ${rows.map((setting) => html`<${Setting} key=${setting.name} setting=${setting} save=${save} />`)}
    </ul>
    ${!rows.length && html`<${Empty} title="No setting matches">Change the filter above.<//>`}
    ${!topic.internal && html`<section class="danger">
      <h2>Delete this topic</h2>
      <p>Its ${plural(topic.partitions, "partition")} and all records are removed. This cannot be undone.</p>
      <${Action} label="Delete topic" kind="bad" confirm=${topic.name}
        question=${`All records of ${topic.name} are lost, and its consumers fail.`}
        act=${async () => {
          await del(`${path}?topic_id=${topic.topic_id}`);
          location.hash = "#/topics";
        }} />
    </section>`}
  `;
}

function Setting({ setting, save }) {
  const [draft, setDraft] = useState(null);
  const meaning = readable(setting, setting.value);
  const [source, kind] = SOURCES[setting.source] || [];
  return html`<li>
    <div class="settinghead">
      <h3>${setting.name}</h3>
      ${source && html`<${Tag} kind=${kind}>${source}<//>`}
      <span class="settingvalue">${setting.value === "" ? html`<i>empty</i>` : setting.value}
        ${meaning && html` <small>${meaning}</small>`}</span>
      ${draft === null && html`<button type="button" class="small" aria-label=${`Change ${setting.name}`}
        onClick=${() => setDraft(setting.value ?? "")}>Change</button>`}
    </div>
    ${draft !== null && html`<${Editor} name=${setting.name} close=${() => setDraft(null)}
      save=${() => save({ set: { [setting.name]: toKafka(setting, draft) } })}
      reset=${setting.source === "dynamic_topic" ? () => save({ unset: [setting.name] }) : null}
      resetLabel=${`Use the default, ${setting.default === "" ? "empty" : setting.default}`}>
      <${SettingInput} id=${`edit-${setting.name}`} setting=${setting} value=${draft} onInput=${setDraft} />
    <//>`}
    <${Help} setting=${setting} />
  </li>`;
}

function Partitions({ count, save }) {
  const [draft, setDraft] = useState(null);
  return html`<li>
    <div class="settinghead">
      <h3>Partitions</h3><span class="settingvalue">${count}</span>
      ${draft === null && html`<button type="button" class="small" aria-label="Change the number of partitions"
        onClick=${() => setDraft(String(count))}>Change</button>`}
    </div>
    ${draft !== null && html`<${Editor} name="partitions" close=${() => setDraft(null)}
      save=${() => save({ partitions: Number(draft) })}>
      <input id="edit-partitions" type="number" min=${count} value=${draft} onInput=${(event) => setDraft(event.target.value)} />
    <//>`}
    <p class="help">Partitions can be added, but not removed. New records of a key may go to another partition than its
      old ones, so a compacted topic can keep two values of a key.</p>
  </li>`;
}

// The form of one setting. What the broker refuses is shown in it, and nothing is lost.
function Editor({ name, children, save, reset, resetLabel, close }) {
  const { busy, error, attempt } = useAttempt();
  const run = (act) => async (event) => {
    event.preventDefault();
    if (await attempt(act)) close();
  };
  return html`<form class="editor" onSubmit=${run(save)}>
    <label class="hidden" for=${`edit-${name}`}>New value of ${name}</label>
    ${children}
    <span class="editbuttons">
      <button class="main small" disabled=${busy}>Save</button>
      <button type="button" class="small" onClick=${close}>Cancel</button>
      ${reset && html`<button type="button" class="quiet small" disabled=${busy} onClick=${run(reset)}>${resetLabel}</button>`}
    </span>
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
  </form>`;
}
