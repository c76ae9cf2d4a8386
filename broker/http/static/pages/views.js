// Views: the latest record of each key of a topic, how far each view is behind, and their controls.

import { html, useState } from "../vendor/preact-htm.js";
import { get, partitionPath, patch, post } from "../api.js";
import { ago, bytes, number, percent, plural } from "../format.js";
import { List } from "../parts/list.js";
import { baseOf, viewOf } from "../parts/partitions.js";
import { Action, Bar, Empty, Loaded, PartitionLink, Table, Tag, TopicLink, topicPath, usePoll } from "../parts/parts.js";
import { TopicFrame, TopicPage } from "./topics.js";

const POLL_MS = 3000;
const VIEWS_MAX = 1000; // partitions on the page of one view
const STRATEGIES = [
  ["offset", "the largest offset"],
  ["timestamp", "the largest timestamp"],
  ["header", "the largest version in a header"],
];
const KINDS = { done: "good", running: "busy", waiting: "busy", failed: "bad", unusable: "bad", aborted: "warn" };

export function ViewsPage() {
  return html`<h1>Views</h1>
    <p>A compacted view keeps the latest record of each key of a topic, also after the topic has dropped it. Consumers
      read it as <code>TOPIC.compacted</code>.</p>
    <${List} path="/api/v1/view" noun="views" milliseconds=${POLL_MS} tools=${(reload) => html`<${CreateView} reload=${reload} />`}
      empty=${html`<${Empty} title="No views yet">Create one for a topic whose consumers need the latest value of each key.<//>`}>
      ${(rows, reload) => html`<${ViewTable} rows=${rows} reload=${reload} />`}
    <//>`;
}

// The page of a topic whose name is that of a view.
export function ViewPage({ topic }) {
  const base = baseOf(topic);
  const state = usePoll(() => get(`/api/v1/view?limit=${VIEWS_MAX}&topic=${encodeURIComponent(base)}`), POLL_MS, [topic]);
  if (state.error?.status === 404 || state.data?.views.length === 0) return html`<${TopicPage} topic=${topic} />`;
  return html`<${TopicFrame} topic=${topic} tab="partitions" base=${base}>
    <${Loaded} state=${state}>${({ views }) => html`
      <p><${Tag} kind="view">view<//> of <${TopicLink} topic=${base} />: the latest record of each key below the horizon, and the records of the
        topic from there on. It is read-only and has ${bytes(views.reduce((sum, row) => sum + row.ledger_bytes, 0))}.</p>
      <${ViewTable} rows=${views} reload=${state.reload} />`}<//>
  <//>`;
}

function ViewTable({ rows, reload }) {
  const columns = [
    { title: "Partition", className: "name", cell: place },
    { title: "State", className: "wide", cell: (row) => html`<${State} row=${row} />` },
    { title: "Horizon", className: "number", cell: (row) => number(row.horizon) },
    { title: "Lag", className: "number", cell: (row) => number(row.log_end_offset - row.horizon) },
    { title: "To compact", className: "number", cell: (row) => bytes(row.backlog_bytes) },
    { title: "Size", className: "number", cell: (row) => html`${bytes(row.ledger_bytes)}<small class="block">${plural(row.ledger_records, "record")}</small>` },
    { title: "Compacted", cell: (row) => (row.made_ms < 0 ? "never" : ago(row.made_ms)) },
    { title: "", cell: (row) => html`<${Controls} row=${row} reload=${reload} />` },
  ];
  return html`<${Table} caption="Compacted views" stacks=${true} columns=${columns} rows=${rows}
    keyOf=${(row) => `${row.topic}-${row.partition}`} />`;
}

function place(row) {
  return html`<${PartitionLink} ...${row} />
    <small class="block nowrap"><a href=${`${topicPath(viewOf(row.topic))}/messages/${row.partition}`}
      aria-label=${`Messages of the view of ${row.topic}-${row.partition}`}>messages</a>, <a href=${`${topicPath(row.topic)}/settings`} aria-label=${`Settings of ${row.topic}`}>settings</a></small>`;
}

function State({ row }) {
  const share = row.total_bytes ? row.done_bytes / row.total_bytes : 0;
  const parts = [
    { value: share, className: "busy", label: `${percent(share)} read` },
    { value: 1 - share, className: "free", label: "" },
  ];
  return html`<${Tag} kind=${KINDS[row.state]}>${row.state}${row.place > 0 && `, place ${row.place}`}<//>
    <span class="small">latest by ${row.strategy}</span>
    ${row.state === "running" && html`<${Bar} parts=${parts} label=${`${percent(share)} read, round ${row.round}`} />`}
    ${row.error && html`<small class="block">${row.error}</small>`}
    ${row.missed.map(([first, end]) => html`<small class="block" key=${first}>Offsets ${number(first)} to ${number(end - 1)} had
      expired before they were compacted.</small>`)}
    ${row.records_without_version > 0 && html`<small class="block">${plural(row.records_without_version, "record")} without a
      version rank below all others.</small>`}`;
}

function Controls({ row, reload }) {
  const name = `${row.topic}-${row.partition}`;
  const act = (action, body) => async () => {
    await post(`${partitionPath("view", row.topic, row.partition)}/${action}`, body);
    reload();
  };
  if (row.state === "running" || row.place > 0) {
    return html`<${Action} label="Abort" kind="small" title=${`Abort the compaction of ${name}`}
      question="The compaction ends. The view stays as it is." act=${act("abort")} />`;
  }
  return html`<span class="rowbuttons">
    <${Action} label="Compact" kind="small" title=${`Compact the view of ${name}`}
      question="The broker compacts the log up to its end into the view." act=${act("compact")} />
    <${Action} label="Rebuild" kind="small" title=${`Rebuild the view of ${name}`} confirm=${row.topic}
      question="The broker rebuilds the view from the records in the log. Keys whose records have expired are lost."
      act=${act("compact", { from_scratch: true })} />
    <${Action} label="Delete" kind="small bad" title=${`Delete the views of ${row.topic}`} confirm=${row.topic}
      question=${`This removes all views of ${row.topic}, and their consumers fail. The topic itself stays.`}
      act=${async () => {
        await setView(row.topic, { "varve.view": "none" });
        reload();
      }} />
  </span>`;
}

function setView(topic, settings) {
  return patch(`/api/v1/topics/${encodeURIComponent(topic)}`, { set: settings }, "*");
}

function CreateView({ reload }) {
  const [topic, setTopic] = useState("");
  const [strategy, setStrategy] = useState("offset");
  const [header, setHeader] = useState("");
  const act = async () => {
    const version = strategy === "header" ? { "varve.view.version.header": header } : {};
    await setView(topic, { "varve.view": "compacted", "varve.view.strategy": strategy, ...version });
    setTopic("");
    reload();
  };
  return html`<${Action} label="Create view" kind="main" act=${act}>
    <label class="field">Topic
      <input type="text" required value=${topic} autocomplete="off" spellcheck=${false} onInput=${(event) => setTopic(event.target.value)} /></label>
    <label class="field">The latest record of a key has
      <select value=${strategy} onChange=${(event) => setStrategy(event.target.value)}>
        ${STRATEGIES.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}
      </select></label>
    ${strategy === "header" && html`<label class="field">Name of the header
      <input type="text" required value=${header} autocomplete="off" onInput=${(event) => setHeader(event.target.value)} />
      <small>Its value is 8 bytes, big-endian, signed.</small></label>`}
  <//>`;
}
