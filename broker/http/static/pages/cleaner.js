// Cleaner: its workers, what waits and why, what is done, and the controls for everything at once.

import { html, useState } from "../vendor/preact-htm.js";
import { get, pages, partitionPath, post } from "../api.js";
import { ago, bytes, number, OUTCOMES, percent, reduction, span, STAGES } from "../format.js";
import { More } from "../parts/list.js";
import { Action, Bar, Empty, Figure, Loaded, PartitionLink, Table, Tag, usePoll } from "../parts/parts.js";

const POLL_MS = 2000;
const JOBS = 50;
const ROWS = 50;

async function load(count) {
  const [status, queue, history] = await Promise.all([
    get("/api/v1/cleaner"),
    pages(`/api/v1/cleaner/queue?limit=${ROWS}`, "queue", count),
    get(`/api/v1/cleaner/history?limit=${JOBS}`),
  ]);
  return { status, queue, jobs: history.jobs };
}

export function CleanerPage() {
  const [count, setCount] = useState(1);
  const state = usePoll(() => load(count), POLL_MS, [count], "/api/v1/cleaner/events");
  return html`<h1>Cleaner</h1>
    <${Loaded} state=${state}>${(data) => html`<${Cleaner} ...${data} reload=${state.reload} onMore=${() => setCount(count + 1)} />`}<//>`;
}

function Cleaner({ status, queue, jobs, reload, onMore }) {
  const all = async (action) => {
    await post(`/api/v1/cleaner/${action}`);
    reload();
  };
  const isPaused = status.partitions.paused > 0;
  return html`
    <dl class="figures">
      <${Figure} label="Dirty and cleanable" value=${bytes(status.cleanable_bytes)}
        note=${`${number(status.partitions.candidates)} waiting, ${number(status.partitions.in_progress)} being cleaned`} />
      <${Gauge} label="Reads" speed=${status.read_speed_bytes_per_second} limit=${status.read_bytes_per_second} />
      <${Gauge} label="Writes" speed=${status.write_speed_bytes_per_second} limit=${status.write_bytes_per_second} />
      <${Figure} label="Cleans since the start" value=${number(status.totals.cleans)}
        note=${`${number(status.totals.failures)} failed, ${number(status.totals.aborted)} aborted`} />
    </dl>
    <div class="buttons">
      <${Action} label="Pause all" question="The broker aborts running cleans, and cleans no partition until you resume it."
        act=${() => all("pause")} />
      ${isPaused && html`<${Action} label="Resume all" question="The broker may clean every paused partition again." act=${() => all("resume")} />`}
    </div>
    <section><h2>Workers</h2><${Workers} workers=${status.workers} enabled=${status.enabled} /></section>
    <section><h2>Waiting and paused</h2><${Queue} rows=${queue.rows} reload=${reload} />
      <${More} hasMore=${queue.hasMore} noun="partitions" onMore=${onMore} /></section>
    <section><h2>Last jobs</h2><${History} jobs=${jobs} /></section>
  `;
}

// How fast the workers go, of how fast they may.
function Gauge({ label, speed, limit }) {
  const share = limit ? Math.min(1, speed / limit) : 0;
  const parts = [
    { value: share, className: "busy", label: `${percent(share)} of the limit` },
    { value: 1 - share, className: "free", label: "" },
  ];
  const value = html`${bytes(speed)}/s ${limit && html`<${Bar} parts=${parts} label=${`${label}: ${percent(share)} of the limit`} />`}`;
  return html`<${Figure} label=${label} value=${value} note=${limit ? `of at most ${bytes(limit)}/s, all workers` : "no limit now"} />`;
}

function Workers({ workers, enabled }) {
  if (!enabled) return html`<${Empty} title="The cleaner is switched off">Set cleaner.enabled to true and restart the broker.<//>`;
  if (!workers.length) return html`<${Empty} title="No worker runs yet">Workers start within seconds of the broker.<//>`;
  return html`<ul class="workers">
    ${workers.map((worker) => {
      const job = worker.job;
      const name = `Worker ${worker.index}`;
      if (!job) return html`<li key=${worker.index}><b>${name}</b> ${worker.ready ? "idle" : "starting"}</li>`;
      const share = job.total_bytes ? job.done_bytes / job.total_bytes : 0;
      const parts = [
        { value: share, className: "busy", label: `${percent(share)} done` },
        { value: 1 - share, className: "free", label: "" },
      ];
      return html`<li key=${worker.index}><b>${name}</b> <${PartitionLink} ...${job} />${" "}
        <span class="small">${STAGES[job.stage] || "starting"}, ${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}, ${span(job.seconds * 1000)}</span>
        <${Bar} parts=${parts} label=${`${percent(share)} done`} /></li>`;
    })}
  </ul>`;
}

function Queue({ rows, reload }) {
  if (!rows.length) return html`<${Empty} title="Nothing waits for a worker">A partition appears here when
    enough of it can be cleaned. The page of a partition says why the broker does not clean it.<//>`;
  const columns = [
    { title: "Next", className: "number", cell: (row) => row.position ?? "–" },
    { title: "Partition", cell: PartitionLink },
    { title: "Dirty", className: "number", cell: (row) => bytes(row.dirty_bytes) },
    { title: "Dirty ratio", className: "number", cell: (row) => (row.dirty_ratio === null ? "" : percent(row.dirty_ratio)) },
    { title: "Live", className: "number", cell: (row) => bytes(row.live_bytes) },
    {
      title: "Why",
      className: "wide",
      cell: (row) => html`<${Tag} kind=${STATES[row.state]}>${row.state}<//>
        <span class="small">${row.reasons.join(" ")}</span>`,
    },
    { title: "", cell: (row) => html`<${RowAction} row=${row} reload=${reload} />` },
  ];
  return html`<${Table} caption="Waiting and paused partitions" stacks=${true} columns=${columns} rows=${rows}
    keyOf=${(row) => `${row.topic}-${row.partition}`} />`;
}

const STATES = { waiting: "busy", paused: "warn", quarantined: "bad" };
const ACTIONS = {
  waiting: ["Pause", "pause", "The broker does not clean it until you resume it."],
  paused: ["Resume", "resume", "The broker may clean it again."],
  quarantined: ["Retry", "retry", "The quarantine ends, and the broker cleans it again."],
};

function RowAction({ row, reload }) {
  const [label, action, question] = ACTIONS[row.state];
  const act = async () => {
    await post(`${partitionPath("cleaner", row.topic, row.partition)}/${action}`);
    reload();
  };
  return html`<${Action} key=${action} label=${label} kind="small" title=${`${label} ${row.topic}-${row.partition}`} question=${question} act=${act} />`;
}

function History({ jobs }) {
  if (!jobs.length) return html`<${Empty} title="No job has ended yet">Finished cleans appear here.<//>`;
  const columns = [
    { title: "Ended", cell: (job) => ago(job.finished_ms) },
    { title: "Partition", cell: (job) => (job.deleted ? html`${job.topic}-${job.partition} <${Tag}>deleted<//>` : html`<${PartitionLink} ...${job} />`) },
    { title: "Outcome", cell: (job) => html`<${Tag} kind=${outcomeKind(job.outcome)}>${OUTCOMES[job.outcome] || job.outcome}<//>` },
    {
      title: "Size",
      className: "number",
      cell: (job) => (job.bytes_before ? `${bytes(job.bytes_before)} → ${bytes(job.bytes_after)}` : ""),
    },
    { title: "Change", className: "number", cell: (job) => (job.bytes_before ? reduction(job.size_reduction_percent) : "") },
    { title: "Took", className: "number", cell: (job) => span(job.seconds * 1000) },
  ];
  return html`<${Table} caption="Last jobs" stacks=${true} columns=${columns} rows=${jobs} keyOf=${(job) => job.job_id} />`;
}

function outcomeKind(outcome) {
  return { finished: "good", damaged: "bad", failed: "bad", aborted: "warn", stale: "warn" }[outcome] || "plain";
}
