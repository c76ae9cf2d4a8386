// Cleaner: its workers, what waits and why, what is done, and the controls for everything at once.

import { html } from "./vendor/preact-htm.js";
import { get, post } from "./api.js";
import { ago, bytes, number, percent, span } from "./format.js";
import { Action, Bar, Empty, Figure, Loaded, Table, Tag, usePoll } from "./parts.js";

const POLL_MS = 2000;
const JOBS = 50;

async function load() {
  const [status, partitions, history] = await Promise.all([
    get("/api/v1/cleaner"),
    get("/api/v1/cleaner/partitions"),
    get(`/api/v1/cleaner/history?limit=${JOBS}`),
  ]);
  return { status, partitions: partitions.partitions, jobs: history.jobs };
}

export function CleanerPage() {
  const state = usePoll(load, POLL_MS, []);
  return html`<h1>Cleaner</h1>
    <${Loaded} state=${state}>${(data) => html`<${Cleaner} ...${data} reload=${state.reload} />`}<//>`;
}

function partitionLink(row) {
  return html`<a href=${`#/topics/${encodeURIComponent(row.topic)}/${row.partition}`}>${row.topic}-${row.partition}</a>`;
}

function Cleaner({ status, partitions, jobs, reload }) {
  const all = async (action) => {
    await post(`/api/v1/cleaner/${action}`);
    reload();
  };
  const isPaused = status.partitions.paused > 0;
  return html`
    <dl class="figures">
      <${Figure} label="Dirty and cleanable" value=${bytes(status.cleanable_bytes)}
        note=${`${number(status.partitions.candidates)} waiting, ${number(status.partitions.in_progress)} being cleaned`} />
      <${Figure} label="Reads at most" value=${rate(status.read_bytes_per_second)} note="all workers together" />
      <${Figure} label="Writes at most" value=${rate(status.write_bytes_per_second)} note="all workers together" />
      <${Figure} label="Cleans since the start" value=${number(status.totals.cleans)}
        note=${`${number(status.totals.failures)} failed, ${number(status.totals.aborted)} aborted`} />
    </dl>
    <div class="buttons">
      <${Action} label="Pause all" question="Running cleans are aborted, and no partition is cleaned until it is resumed."
        act=${() => all("pause")} />
      ${isPaused && html`<${Action} label="Resume all" question="Every paused partition may be cleaned again." act=${() => all("resume")} />`}
    </div>
    <section><h2>Workers</h2><${Workers} workers=${status.workers} enabled=${status.enabled} /></section>
    <section><h2>Waiting and paused</h2><${Queue} partitions=${partitions} /></section>
    <section><h2>Last jobs</h2><${History} jobs=${jobs} /></section>
  `;
}

function rate(bytesPerSecond) {
  return bytesPerSecond ? `${bytes(bytesPerSecond)}/s` : "no limit";
}

function Workers({ workers, enabled }) {
  if (!enabled) return html`<${Empty} title="The cleaner is switched off">Set cleaner.enabled to true and reload.<//>`;
  if (!workers.length) return html`<${Empty} title="No worker runs yet">Workers start within seconds of the broker.<//>`;
  return html`<ul class="workers">
    ${workers.map((worker) => {
      const job = worker.job;
      if (!job) return html`<li key=${worker.index}><b>${worker.index}</b> ${worker.ready ? "idle" : "starting"}</li>`;
      const share = job.total_bytes ? job.done_bytes / job.total_bytes : 0;
      const parts = [
        { value: share, className: "busy", label: `${percent(share)} done` },
        { value: 1 - share, className: "free", label: "" },
      ];
      return html`<li key=${worker.index}><b>${worker.index}</b> ${partitionLink(job)}${" "}
        <span class="small">${job.stage}, ${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}, ${span(job.seconds * 1000)}</span>
        <${Bar} parts=${parts} label=${`${percent(share)} done`} /></li>`;
    })}
  </ul>`;
}

function Queue({ partitions }) {
  const rows = partitions.filter((row) => row.to_clean || row.paused || row.blocked_by === "quarantined");
  if (!rows.length) return html`<${Empty} title="Nothing waits">Every compacted partition is below its dirty ratio.<//>`;
  const columns = [
    { title: "Partition", cell: partitionLink },
    { title: "Dirty", className: "number", cell: (row) => bytes(row.dirty_bytes) },
    { title: "Dirty ratio", className: "number", cell: (row) => (row.dirty_ratio === null ? "" : percent(row.dirty_ratio)) },
    { title: "Lag over its limit", className: "number", cell: (row) => (row.over_lag_ms ? span(row.over_lag_ms) : "") },
    {
      title: "State",
      cell: (row) =>
        row.paused
          ? html`<${Tag} kind="warn">paused<//>`
          : row.to_clean
            ? html`<${Tag} kind="busy">waiting<//>`
            : html`<${Tag} kind="bad">quarantined<//>`,
    },
  ];
  return html`<${Table} caption="Waiting and paused partitions" columns=${columns} rows=${rows}
    keyOf=${(row) => `${row.topic}-${row.partition}`} />`;
}

function History({ jobs }) {
  if (!jobs.length) return html`<${Empty} title="No job has ended yet">Finished cleans appear here.<//>`;
  const columns = [
    { title: "Ended", cell: (job) => ago(job.finished_ms) },
    { title: "Partition", cell: partitionLink },
    { title: "Outcome", cell: (job) => html`<${Tag} kind=${outcomeKind(job.outcome)}>${job.outcome}<//>` },
    {
      title: "Size",
      className: "number",
      cell: (job) => (job.bytes_before ? `${bytes(job.bytes_before)} → ${bytes(job.bytes_after)}` : ""),
    },
    { title: "Saved", className: "number", cell: (job) => (job.bytes_before ? `${Math.round(job.size_reduction_percent)} %` : "") },
    { title: "Took", className: "number", cell: (job) => span(job.seconds * 1000) },
  ];
  return html`<${Table} caption="Last jobs" columns=${columns} rows=${jobs} keyOf=${(job) => job.job_id} />`;
}

function outcomeKind(outcome) {
  return { finished: "good", damaged: "bad", failed: "bad", aborted: "warn", stale: "warn" }[outcome] || "plain";
}
