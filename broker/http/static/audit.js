// Audit: who changed what, and who was denied what.

import { html, useState } from "./vendor/preact-htm.js";
import { pages } from "./api.js";
import { Empty, Loaded, More, Table, Tag, usePoll } from "./parts.js";

const POLL_MS = 5000;
const PAGE = 100;
const KINDS = {
  "administrative change": ["changed", "good"],
  "administrative change failed": ["failed", "warn"],
  "operation denied": ["denied", "bad"],
  "request denied": ["denied", "bad"],
};

export function AuditPage() {
  const [filter, setFilter] = useState("");
  const [count, setCount] = useState(1);
  const path = `/api/v1/audit?limit=${PAGE}&contains=${encodeURIComponent(filter)}`;
  const state = usePoll(() => pages(path, "events", count), POLL_MS, [path, count]);
  return html`<h1>Audit</h1>
    <div class="tools">
      <label>Contains
        <input type="search" value=${filter} placeholder="a user or a topic"
          onInput=${(event) => setFilter(event.target.value)} />
      </label>
      <span class="small">The last 2,000 events since the start. The log of the broker has all of them.</span>
    </div>
    <${Loaded} state=${state}>${({ rows, hasMore }) => html`
      <${Events} rows=${rows} isFiltered=${filter !== ""} />
      <${More} hasMore=${hasMore} noun="events" onMore=${() => setCount(count + 1)} />
    `}<//>`;
}

function Events({ rows, isFiltered }) {
  if (!rows.length && isFiltered) return html`<${Empty} title="No event contains this">Change the filter above.<//>`;
  if (!rows.length) {
    return html`<${Empty} title="No events yet">Changes of topics, settings, users and groups appear here, and what was denied.<//>`;
  }
  const columns = [
    { title: "Time (UTC)", className: "nowrap", cell: (row) => (row.timestamp || "").slice(0, 19).replace("T", " ") },
    { title: "Who", cell: (row) => html`${row.principal}<small class="block">${row.host}</small>` },
    { title: "What", cell: what },
    { title: "Of", cell: (row) => row.resource },
    { title: "Details", className: "wide", cell: details },
  ];
  return html`<${Table} caption="Audit events" stacks=${true} columns=${columns} rows=${rows} keyOf=${(row) => row.number} />`;
}

function what(row) {
  const [label, kind] = KINDS[row.event] || [row.event, "plain"];
  return html`<${Tag} kind=${kind}>${label}<//> <span class="action">${row.action}</span>`;
}

function details(row) {
  const parts = Object.entries(row.details).map(
    ([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`,
  );
  return html`${row.reason && html`<span class="block">${row.reason}</span>`}
    <small class="data">${parts.join(", ").slice(0, 400)}</small>`;
}
