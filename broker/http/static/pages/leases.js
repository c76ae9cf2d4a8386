// Leases: which partitions remote compactions hold, until when, and how to release them.

import { html, useState } from "../vendor/preact-htm.js";
import { del, get } from "../api.js";
import { ago, bytes, clock, plural, span } from "../format.js";
import { Action, Empty, Loaded, Table, Tag, TopicLink, usePoll } from "../parts/parts.js";

const POLL_MS = 3000;
const ROOT = "/api/v1/remote-compactions";
const LIVE = ["open", "adopting"];
const KINDS = { open: "busy", adopting: "busy", adopted: "good", expired: "warn", abandoned: "warn", stale: "warn", invalid: "bad" };

export function LeasesPage() {
  const [showsEnded, setShowsEnded] = useState(false);
  const state = usePoll(() => get(ROOT), POLL_MS, []);
  return html`<h1>Leases</h1>
    <p>A remote compaction, such as <code>varve pipeline compact</code>, leases partitions. The broker does not clean them
      until the lease ends.</p>
    <div class="tools">
      <label class="check">
        <input type="checkbox" checked=${showsEnded} onChange=${(event) => setShowsEnded(event.target.checked)} />
        Show leases that have ended
      </label>
    </div>
    <${Loaded} state=${state}>${({ remote_compactions: all }) => {
      const rows = all.filter((row) => showsEnded || held(row).length > 0);
      if (!rows.length) return html`<${Empty} title="No partition is leased">The broker may clean all of them.<//>`;
      return html`<${Leases} rows=${rows} reload=${state.reload} />`;
    }}<//>`;
}

function held(compaction) {
  return compaction.partitions.filter((part) => LIVE.includes(part.state));
}

function Leases({ rows, reload }) {
  const columns = [
    { title: "Holder", className: "nowrap", cell: (row) => html`<code>${row.compaction_id}</code><small class="block">since ${ago(row.created_ms)}</small>` },
    { title: "Topic", className: "name", cell: (row) => html`<${TopicLink} topic=${row.topic} />` },
    { title: "Partitions", className: "wide", cell: partitions },
    { title: "Purpose", cell: (row) => row.purpose },
    { title: "Holds back", className: "number", cell: (row) => bytes(held(row).reduce((sum, part) => sum + part.inputs_bytes, 0)) },
    { title: "Until", cell: until },
    { title: "", cell: (row) => held(row).length > 0 && html`<${Release} row=${row} reload=${reload} />` },
  ];
  return html`<${Table} caption="Leases" stacks=${true} columns=${columns} rows=${rows} keyOf=${(row) => row.compaction_id} />`;
}

function partitions(row) {
  const reasons = [...new Set(row.partitions.map((part) => part.reason).filter(Boolean))];
  return html`${row.partitions.map((part) => html`<span class="item" key=${part.partition}>${part.partition}${" "}
      <${Tag} kind=${KINDS[part.state]}>${part.state}<//></span>`)}
    ${reasons.map((reason) => html`<small class="block" key=${reason}>${reason}</small>`)}`;
}

function until(row) {
  if (!held(row).length) return "ended";
  const left = row.expires_ms - Date.now();
  return html`${clock(row.expires_ms)}<small class="block">${left > 0 ? `in ${span(left)}, unless renewed` : "it is ending"}</small>`;
}

function Release({ row, reload }) {
  const act = async () => {
    await del(`${ROOT}/${encodeURIComponent(row.compaction_id)}`);
    reload();
  };
  return html`<${Action} label="Release" kind="small bad" title=${`Release ${row.topic}`} act=${act}
    question=${`This ends the lease of ${plural(held(row).length, "partition")} and removes its files. The log does not
      change. If the process is alive, its work is lost.`} />`;
}
