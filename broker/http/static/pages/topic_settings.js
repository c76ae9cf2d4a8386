// The settings of a topic: what they are, why, and how to change them.

import { html, useRef, useState } from "../vendor/preact-htm.js";
import { del, get, patch } from "../api.js";
import { plural } from "../format.js";
import { Action, Loaded, usePoll } from "../parts/parts.js";
import { Editor, SettingList } from "../parts/setting_list.js";
import { TopicFrame } from "./topics.js";

const POLL_MS = 10_000;
export function TopicSettingsPage({ topic }) {
  const path = `/api/v1/topics/${encodeURIComponent(topic)}`;
  const state = usePoll(() => get(path), POLL_MS, [topic]);
  return html`<${TopicFrame} topic=${topic} tab="settings" state=${state}>
    <${Loaded} state=${state}>${(data) => html`<${Settings} path=${path} topic=${data} reload=${state.reload} />`}<//>
  <//>`;
}

function Settings({ path, topic, reload }) {
  const warned = useRef(""); // the change that the user has been warned of
  const save = async (change) => {
    const text = JSON.stringify(change);
    if (change.set?.["cleanup.policy"] && warned.current !== text) {
      const { warnings } = await patch(path, { ...change, validate_only: true }, topic.etag);
      warned.current = text;
      if (warnings.length) throw new Error(`${warnings.join(" ")} Save again to change it anyway.`);
    }
    try {
      await patch(path, change, topic.etag);
    } finally {
      reload();
    }
  };
  return html`
    <${SettingList} settings=${topic.settings} save=${save}
      first=${!topic.internal && html`<ul class="settings"><${Partitions} count=${topic.partitions} save=${save} /></ul>`} />
    ${!topic.internal && html`<section class="danger">
      <h2>Delete this topic</h2>
      <p>This removes its ${plural(topic.partitions, "partition")} and all records. You cannot undo it.</p>
      <${Action} label="Delete topic" kind="bad" confirm=${topic.name}
        question=${`All records of ${topic.name} are lost, and its consumers fail.`}
        act=${async () => {
          await del(`${path}?topic_id=${topic.topic_id}`);
          location.hash = "#/topics";
        }} />
    </section>`}
  `;
}

function Partitions({ count, save }) {
  const [draft, setDraft] = useState(null);
  return html`<li>
    <div class="settinghead">
      <h3>Partitions</h3><span class="settingvalue">${count}</span>
      ${draft === null && html`<button type="button" class="small" aria-label="Change the number of partitions"
        onClick=${() => setDraft(String(count))}>Change</button>`}
    </div>
    ${draft !== null && html`<${Editor} name="partitions" present=${count}
      isChanged=${Number(draft) !== count} close=${() => setDraft(null)}
      save=${() => save({ partitions: Number(draft) })}>
      <input id="edit-partitions" type="number" min=${count} value=${draft} onInput=${(event) => setDraft(event.target.value)} />
    <//>`}
    <p class="help">Partitions can be added, but not removed. New records of a key may go to another partition than its
      old ones, so a compacted topic can keep two values of a key.</p>
  </li>`;
}
