// Audit: who changed what, and who was denied what.

import { html } from "../vendor/preact-htm.js";
import { visible } from "../format.js";
import { List } from "../parts/list.js";
import { Empty, Table, Tag } from "../parts/parts.js";

const POLL_MS = 5000;
const KINDS = {
  "administrative change": ["changed", "good"],
  "administrative change failed": ["failed", "warn"],
  "operation denied": ["denied", "bad"],
  "request denied": ["denied", "bad"],
};

export function AuditPage() {
  return html`<h1>Audit</h1>
    <${List} path="/api/v1/audit" noun="events" limit=${100} milliseconds=${POLL_MS} label="Contains" hint="a user or a topic"
      tools=${() => html`<span class="small">The last 2,000 events since the start. The log of the broker has all of them.</span>`}
      empty=${html`<${Empty} title="No events yet">Changes of topics, settings, users and groups appear here, and what was denied.<//>`}>
      ${(rows) => html`<${Events} rows=${rows} />`}
    <//>`;
}

function Events({ rows }) {
  const columns = [
    { title: "Time (UTC)", className: "nowrap", cell: (row) => (row.timestamp || "").slice(0, 19).replace("T", " ") },
    { title: "Who", cell: (row) => html`${visible(row.principal)}<small class="block">${row.host}</small>` },
    { title: "What", cell: what },
    { title: "Of", cell: (row) => visible(row.resource) },
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
    <small class="data">${visible(parts.join(", ").slice(0, 400))}</small>`;
}
