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

// What the changes of the HTTP API and of Kafka clients do. Those that are not here have names that say it.
const WORDS = {
  "POST /api/v1/cleaner/partitions/{topic}/{partition}/run": "clean",
  "POST /api/v1/cleaner/partitions/{topic}/{partition}/pause": "pause the cleaner",
  "POST /api/v1/cleaner/partitions/{topic}/{partition}/resume": "resume the cleaner",
  "POST /api/v1/cleaner/partitions/{topic}/{partition}/abort": "abort a clean",
  "POST /api/v1/cleaner/partitions/{topic}/{partition}/retry": "end a quarantine",
  "POST /api/v1/cleaner/partitions/{topic}/{partition}/transactions/{producer_id}/abort": "abort a transaction",
  "POST /api/v1/cleaner/partitions/{topic}/{partition}/verify/abort": "abort a verification",
  "POST /api/v1/cleaner/pause": "pause the cleaner",
  "POST /api/v1/cleaner/resume": "resume the cleaner",
  "POST /api/v1/log/partitions/{topic}/{partition}/skip": "skip damage",
  "POST /api/v1/log/partitions/{topic}/{partition}/truncate": "truncate",
  "POST /api/v1/view/partitions/{topic}/{partition}/compact": "compact a view",
  "POST /api/v1/view/partitions/{topic}/{partition}/abort": "abort the compaction of a view",
  "POST /api/v1/remote-compactions": "lease partitions",
  "POST /api/v1/remote-compactions/{compaction_id}/renew": "renew a lease",
  "POST /api/v1/remote-compactions/{compaction_id}/adopt": "adopt a compaction",
  "DELETE /api/v1/remote-compactions/{compaction_id}": "release a lease",
  "POST /api/v1/topics/{topic}/erasures": "erase a key",
  "DELETE /api/v1/topics/{topic}/erasures/{erasure_id}": "cancel an erasure",
  "PATCH /api/v1/settings": "change settings",
  INCREMENTAL_ALTER_CONFIGS: "change settings",
  ALTER_CONFIGS: "change settings",
  CREATE_PARTITIONS: "add partitions",
  OFFSET_COMMIT: "commit offsets",
  OFFSET_DELETE: "delete offsets",
  ALTER_USER_SCRAM_CREDENTIALS: "change users",
  ALTER_CLIENT_QUOTAS: "change quotas",
  ALTER_REPLICA_LOG_DIRS: "move partitions",
  LEAVE_GROUP: "remove members",
  WRITE_TXN_MARKERS: "end a transaction",
  CREATE_ACLS: "add access entries",
  DELETE_ACLS: "remove access entries",
};

export function AuditPage() {
  return html`<h1>Audit</h1>
    <${List} path="/api/v1/audit" noun="events" limit=${100} milliseconds=${POLL_MS} label="Contains" hint="a user or a topic"
      tools=${() => html`<span class="small">The last 2,000 events since the start. The audit log has all of them.</span>`}
      empty=${html`<${Empty} title="No events yet">Changes of topics, settings, users and groups appear here, and denied requests.<//>`}>
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
  return html`<${Tag} kind=${kind}>${label}<//> <span title=${row.action}>${breakable(inWords(row.action))}</span>`;
}

function inWords(action) {
  return WORDS[action] || (/^[A-Z_]+$/.test(action) ? action.toLowerCase().replaceAll("_", " ") : action);
}

// A path, with line ends between its words only.
function breakable(text) {
  return text.split(/(?<=\/)/).map((word, index) => html`<wbr key=${index} />${word}`);
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
