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
  return html`<${Tag} kind=${kind}>${label}<//> <span>${breakable(row.action)}</span>`;
}

// A path or a name of Kafka, with line ends between its words only.
function breakable(text) {
  return text.split(/(?<=[/_])/).map((word, index) => html`<wbr key=${index} />${word}`);
}

function details(row) {
  const parts = Object.entries(row.details).flatMap(([name, value]) => named(name, value));
  return html`${row.reason && html`<span class="block">${row.reason}</span>`}
    <small class="data">${visible(parts.join(", ").slice(0, 400))}</small>`;
}

// The parts of an object, such as the parameters of a request, are named themselves.
function named(name, value) {
  if (typeof value !== "object" || value === null) return [`${name}: ${value}`];
  if (Array.isArray(value)) return [`${name}: ${value.map((each) => (typeof each === "object" ? JSON.stringify(each) : each)).join(", ")}`];
  return Object.entries(value).map(([part, each]) => `${part}: ${typeof each === "object" ? JSON.stringify(each) : each}`);
}
