// The erasures of a topic, with their receipts, and a form that requests one.

import { html, useState } from "../vendor/preact-htm.js";
import { del, get, post } from "../api.js";
import { ago, dateTime, number, plural } from "../format.js";
import { Action, Empty, Loaded, Table, Tag, usePoll } from "../parts/parts.js";
import { TopicFrame } from "./topics.js";

const POLL_MS = 2000;
const QUIET_PARTS = 5; // partitions without the key that are listed one by one
const KINDS = { open: "busy", complete: "good", cancelled: "plain", void: "warn" };
const TIMES = [["3600", "an hour"], ["86400", "a day"], ["604800", "a week"], ["2592000", "30 days"]];
const RISKS = {
  overdue: "The deadline has passed.",
  obstacle: "It will miss the deadline unless the obstacle ends in time.",
  rate: "It will miss the deadline at the present rate.",
};

export function ErasuresPage({ topic }) {
  const path = `/api/v1/topics/${encodeURIComponent(topic)}/erasures`;
  const state = usePoll(() => get(path), POLL_MS, [topic]);
  return html`<${TopicFrame} topic=${topic} tab="erasures" state=${state}>
    <${Loaded} state=${state}>${({ erasures }) => html`
      <p>An erasure searches all files of this topic for a key, writes a tombstone if there is a value, and rewrites the
        segments that have one. The receipt follows when a last search finds none.</p>
      <div class="tools"><${Request} topic=${topic} path=${path} reload=${state.reload} /></div>
      ${erasures.length
        ? html`<${List} path=${path} rows=${[...erasures].reverse()} reload=${state.reload} />`
        : html`<${Empty} title="No key was erased">The last erasures of the broker, 1,000 at most, stay listed.<//>`}
    `}<//>
  <//>`;
}

function Request({ topic, path, reload }) {
  const [key, setKey] = useState("");
  const [within, setWithin] = useState("86400");
  const act = async () => {
    await post(path, { key, within_seconds: Number(within) });
    setKey("");
    reload();
  };
  return html`<${Action} label="Erase a key" kind="bad" confirm=${topic} act=${act}>
    <label class="field">Key
      <input name="key" type="text" required autocomplete="off" spellcheck=${false} value=${key}
        onInput=${(event) => setKey(event.target.value)} />
      <small>All its values are lost, also the last one. Values that clients write later stay.</small>
    </label>
    <label class="field">Deadline
      <select name="within" value=${within} onChange=${(event) => setWithin(event.target.value)}>
        ${TIMES.map(([seconds, text]) => html`<option key=${seconds} value=${seconds}>in ${text}</option>`)}
      </select>
    </label>
  <//>`;
}

function List({ path, rows, reload }) {
  const columns = [
    { title: "Key digest", className: "nowrap", cell: (row) => html`<code>${row.key_digest.slice(0, 12)}</code><small class="block">${row.requested_by}, ${ago(row.requested_ms)}</small>` },
    { title: "State", cell: state },
    { title: "Deadline (UTC)", className: "nowrap", cell: (row) => dateTime(row.deadline_ms) },
    { title: "Partitions", className: "wide", cell: parts },
    { title: "", cell: (row) => row.state === "open" && html`<${Cancel} path=${path} row=${row} reload=${reload} />` },
  ];
  return html`<${Table} caption="Erasures" stacks=${true} columns=${columns} rows=${rows} keyOf=${(row) => row.id} />`;
}

function state(row) {
  const isAtRisk = row.partitions.some((part) => part.risk !== null);
  const hadValue = row.partitions.some((part) => part.tombstone_offset !== null);
  return html`<${Tag} kind=${KINDS[row.state]}>${row.state}<//>
    ${isAtRisk && html`<${Tag} kind="bad">at risk<//>`}
    ${row.state === "complete" && !hadValue && html`<small class="block">The broker found no value of this key, and erased nothing.</small>`}
    ${row.reason && html`<small class="block">${row.reason}</small>`}`;
}

// The partitions that had the key or are not done, and some of the others: most never had it.
function parts({ partitions }) {
  const isNotable = (part) => part.receipt === null || part.tombstone_offset !== null;
  const others = partitions.filter((part) => !isNotable(part));
  const folded = others.slice(QUIET_PARTS);
  const files = folded.reduce((sum, part) => sum + part.receipt.files, 0);
  const shown = [...partitions.filter(isNotable), ...others.slice(0, QUIET_PARTS)].sort((a, b) => a.partition - b.partition);
  return html`${shown.map((part) => html`<${Part} key=${part.partition} part=${part} />`)}
    ${folded.length > 0 && html`<small class="block">No value in ${plural(folded.length, "more partition")}, ${plural(files, "file")} searched.</small>`}`;
}

function Part({ part }) {
  const { receipt } = part;
  if (receipt === null) {
    return html`<span class="block">${part.partition}: ${part.waits_for}
      ${part.risk && html`<small class="block">${RISKS[part.risk]}</small>`}</span>`;
  }
  return html`<span class="block">${part.partition}: no value below offset ${number(part.end_offset)}
    <small class="block">${plural(receipt.files, "file")} searched, ${dateTime(receipt.at_ms)} UTC${receipt.tombstones > 0
      && `; the key stays in a tombstone until ${dateTime(receipt.tombstones_until_ms)} UTC or later`}</small></span>`;
}

function Cancel({ path, row, reload }) {
  const act = async () => {
    await del(`${path}/${encodeURIComponent(row.id)}`);
    reload();
  };
  return html`<${Action} label="Cancel erasure" kind="small" act=${act}
    question="The broker searches and rewrites nothing more for it. A tombstone that it has written stays." />`;
}
