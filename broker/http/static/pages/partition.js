// One partition: its strata, why it is or is not being cleaned, and its controls.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { get, partitionPath, post } from "../api.js";
import { ago, bytes, clock, dateTime, number, offsets, OUTCOMES, percent, plural, reduction, span } from "../format.js";
import { Action, Bar, Empty, isDeleted, isMissing, isStale, Loaded, Marked, Table, Tag, TopicLink, topicPath, useAnswer, usePoll } from "../parts/parts.js";
import { onePerSecond, remember, undone } from "../parts/past.js";
import { stratumName, Strata, toModel } from "../parts/strata.js";
import { Survival } from "../parts/survival.js";
import { isCompacted, policyTags } from "./topics.js";

const POLL_MS = 1500;
const SEGMENTS_MAX = 20_000; // that the broker lists at once

async function load(topic, partition) {
  const path = `/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/segments?limit=${SEGMENTS_MAX}`;
  const [facts, segments] = await Promise.all([get(partitionPath("cleaner", topic, partition)), get(path)]);
  return toModel(facts, segments, Date.now());
}

export function PartitionPage({ topic, partition }) {
  const events = `/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/events`;
  const state = usePoll(() => load(topic, partition), POLL_MS, [topic, partition], events);
  const isGone = isDeleted(state);
  return html`
    <p class="crumbs"><a href="#/topics">Topics</a>${!isMissing(state) && html` / <${TopicLink} topic=${topic} />`}</p>
    <h1>${topic}-${partition}</h1>
    <${Loaded} state=${state} keepsLast=${true}>${(model) => html`<${Partition} topic=${topic} partition=${partition}
      model=${model} isGone=${isGone} isStale=${isStale(state)} reload=${state.reload} />`}<//>
  `;
}

// `isGone`: its topic was deleted, and `model` is what was there last. `isStale`: the broker does not
// answer, and `model` is its last answer.
function Partition({ topic, partition, model, isGone, isStale, reload }) {
  const past = usePast(topic, partition, model.facts.last_job?.job_id);
  const { shown, largest, times, position, choose } = useReplay(model, past);
  const facts = model.facts;
  // It shows the present, so it stays as it is while the slider moves.
  const table = useMemo(() => html`<${SegmentTable} model=${model} />`, [model]);
  return html`
    <p class="headline">
      ${policyTags(facts.cleanup_policy)}
      <b>${bytes(facts.size_bytes)}</b> in ${plural(model.segments.length, "segment")}, ${offsets(model.offsets.log_start_offset, model.offsets.log_end_offset)}
      ${!isGone && html` (<a href=${`${topicPath(topic)}/messages/${partition}`}>messages</a>)`}
      ${!isGone && model.expectedBytes !== null && html`, about <b>${bytes(model.expectedBytes)}</b> after the next clean`}
    </p>
    <${Strata} model=${shown} largest=${largest} isLive=${!isGone && !isStale && position === times.length - 1} />
    <${Replay} times=${times} position=${position} choose=${choose} newest=${isGone || isStale ? "last" : "live"}
      sinceMs=${past?.since_ms} />
    <div class="columns">
      ${!isGone && html`<section key="why">
        <h2>Why</h2>
        <ul class="sentences">${facts.sentences.map((sentence) => html`<li key=${sentence}><${Marked} text=${sentence} /></li>`)}</ul>
        <${Controls} topic=${topic} partition=${partition} facts=${facts} disabled=${isStale} reload=${reload} />
      </section>`}
      ${(isCompacted(facts) || facts.last_jobs?.length > 0) && html`<section key="cleans">
        <h2>Last cleans</h2>
        <${LastJobs} jobs=${facts.last_jobs || []} />
      </section>`}
    </div>
    ${!isGone && isCompacted(facts) && html`<section>
      <h2>What the next clean costs</h2>
      <${Estimate} topic=${topic} partition=${partition} />
    </section>`}
    ${table}
  `;
}

// What the broker knows of the partition's past, and again after each clean: it knows the size before, which
// the page may have missed; null without.
function usePast(topic, partition, lastJob) {
  const [past, setPast] = useState(null);
  useEffect(() => {
    get(`/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/history`).then(setPast, () => setPast(null));
  }, [topic, partition, lastJob]);
  return past;
}

// Keeps what changed while the page is open, beside what the broker knows of the past, so that one can go
// back. `times` are those of all states, the present one last, and `largest` is the one with the most bytes.
function useReplay(model, past) {
  const snapshots = useRef([]);
  const [chosen, choose] = useState(null); // a time
  remember(snapshots.current, model);
  const earlier = useMemo(() => (past ? undone(past) : []), [past]);
  const states = useMemo(
    () => onePerSecond([...earlier, ...snapshots.current.slice(0, -1)].sort((a, b) => a.atMs - b.atMs).concat(snapshots.current.at(-1))),
    [model, earlier],
  );
  const at = chosen === null ? -1 : states.findIndex((state) => state.atMs === chosen);
  const position = at < 0 ? states.length - 1 : at;
  const shown = useMemo(() => (at < 0 ? model : states[at].build?.(model) ?? states[at]), [at < 0 ? model : chosen, earlier]);
  const largest = useMemo(() => states.reduce((most, state) => (state.total > most.total ? state : most), model), [states]);
  return { shown, largest, times: states.map((state) => state.atMs), position, choose };
}

// `sinceMs`: from when on the broker knows the states; undefined before it has answered.
function Replay({ times, position, choose, newest, sinceMs }) {
  if (times.length < 2) {
    return sinceMs !== undefined && html`<p class="small">Earlier states: none since ${dateTime(sinceMs)} UTC. The broker
      keeps them in memory, so a restart loses them.</p>`;
  }
  const isLive = position === times.length - 1;
  const shown = isLive ? newest : clock(times[position]);
  const move = (event) => {
    const value = Number(event.target.value);
    choose(value === times.length - 1 ? null : times[value]);
  };
  return html`<div class="replay">
    <label>Earlier states
      <input type="range" min="0" max=${times.length - 1} value=${position} aria-valuetext=${shown} onInput=${move} />
    </label>
    <output>${shown}</output>
    ${!isLive && html`<button type="button" onClick=${() => choose(null)}>Back to ${newest}</button>
      <p>The picture shows ${shown}; the rest of the page shows ${newest === "live" ? "the present" : "the last state"}.</p>`}
  </div>`;
}

function Controls({ topic, partition, facts, disabled, reload }) {
  const [refusal, setRefusal] = useState(null); // why the clean that was asked for does not start
  const act = (action, body) => async () => {
    const answer = await post(`${partitionPath("cleaner", topic, partition)}/${action}`, body);
    setRefusal(action === "run" && answer.requested_offset === null ? refusalText(answer) : null);
    reload();
  };
  if (!isCompacted(facts)) return null;
  return html`<div class="buttons">
    ${!facts.paused && html`<${Action} label="Clean now" kind=${facts.to_clean || facts.dirty_bytes ? "main" : ""} disabled=${disabled}
      hint="Closes the active segment, then cleans"
      question="Like varve cleaner run --roll, this closes the active segment, and cleans the partition next, whatever its dirty ratio. Records that min.compaction.lag.ms or an open transaction protects stay."
      act=${act("run", { roll: true })} />`}
    ${facts.paused
      ? html`<${Action} key="resume" label="Resume" disabled=${disabled} question="The partition may be cleaned again." act=${act("resume")} />`
      : html`<${Action} key="pause" label="Pause" disabled=${disabled} question="The broker aborts a running clean, and does not clean the partition until you resume it."
          act=${act("pause")} />`}
    ${facts.job && html`<${Action} label="Abort" disabled=${disabled} question="The running clean ends. Segments that it has published stay; the others do not change." act=${act("abort")} />`}
    ${facts.quarantine && html`<${Action} label="Retry" disabled=${disabled} question="The quarantine ends, and the broker cleans the partition again." act=${act("retry")} />`}
  </div>
  ${refusal && !facts.job && html`<p class="notice" role="status">${refusal}</p>`}`;
}

function refusalText(answer) {
  if (answer.to_clean) return "Nothing is dirty. The next clean removes expired tombstones.";
  if (answer.obstacle !== null) return `No clean starts. ${answer.obstacle}`;
  return `There is nothing to clean: ${answer.size_bytes ? "no record was written since the last clean" : "the partition is empty"}.`;
}

// What a clean reads, writes and frees: now, and with other values of varve.compaction.slack.
function Estimate({ topic, partition }) {
  const { data, error, busy, load } = useAnswer(() => get(`${partitionPath("cleaner", topic, partition)}/estimate`));
  return html`
    ${error && html`<p class="notice" role="alert">${error.message}</p>`}
    ${data && html`<${Cost} cost=${data} />`}
    <button type="button" disabled=${busy} onClick=${load}>${busy ? "One moment …" : data ? "Estimate again" : "Estimate"}</button>
  `;
}

function Cost({ cost }) {
  return html`
    ${cost.read_bytes || cost.freed_bytes ? html`<${NextClean} cost=${cost} />` : html`<p>There is nothing to clean now.</p>`}
    ${cost.by_dirty_ratio.length > 0 && html`<h3>What other dirty ratios cost</h3>
      <${Ratios} rows=${cost.by_dirty_ratio} chosen=${cost.dirty_ratio} />`}
    <h3>How long records live</h3>
    <p>For each age, the share of records that were alive at the last clean.</p>
    <${Survival} rows=${cost.survival} />`;
}

// What a clean at each value of min.cleanable.dirty.ratio costs; a selective clean has no cost of its own.
function Ratios({ rows, chosen }) {
  const columns = [
    { title: "Dirty ratio", className: "number", cell: (row) => html`${row.ratio}${row.ratio === chosen && html` <${Tag} kind="busy">now<//>`}` },
    { title: "Log up to", className: "number", cell: (row) => bytes(row.log_bytes) },
    { title: "Clean every", className: "number", cell: (row) => bytes(row.new_bytes) },
    { title: "Reads", className: "number", cell: (row) => bytes(row.read_bytes) },
    { title: "Writes", className: "number", cell: (row) => bytes(row.written_bytes) },
  ];
  return html`<${Table} caption="Costs of other dirty ratios" stacks=${true} columns=${columns} rows=${rows} keyOf=${(row) => row.ratio} />
    <p class="small"><b>Log up to</b> is the largest size of the log, <b>Clean every</b> what clients write between two
      cleans, and <b>Reads</b> and <b>Writes</b> the bytes of one clean.</p>`;
}

function NextClean({ cost }) {
  const rows = cost.by_slack.length ? cost.by_slack : [{ ...cost, slack: null }];
  const largest = Math.max(1, ...rows.map((row) => Math.max(row.written_bytes, row.freed_bytes)));
  return html`<p>It reads ${bytes(cost.read_bytes)}, writes ${bytes(cost.written_bytes)} and frees
      <b> ${bytes(cost.freed_bytes)}</b>, in about ${span(cost.seconds * 1000)}.
      ${cost.selective
        ? html` It rewrites only segments with more garbage than the slack of ${cost.slack} allows.`
        : html` It rewrites every closed segment that has garbage.`}</p>
    <table class="slacks">
      <caption class="hidden">Bytes written and freed</caption>
      <thead><tr>${cost.by_slack.length > 0 && html`<th scope="col" class="number">Slack</th>`}
        <th scope="col">Written</th><th scope="col">Freed</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.slack} class=${row.slack === cost.slack ? "chosen" : ""}>
        ${cost.by_slack.length > 0 && html`<td class="number">${row.slack}</td>`}
        <td><${Amount} value=${row.written_bytes} largest=${largest} className="busy" /></td>
        <td><${Amount} value=${row.freed_bytes} largest=${largest} className="used" /></td>
      </tr>`)}</tbody>
    </table>`;
}

function Amount({ value, largest, className }) {
  const parts = [
    { value, className, label: bytes(value) },
    { value: largest - value, className: "none", label: "" },
  ];
  return html`<span class="amount"><${Bar} parts=${parts} label=${bytes(value)} /><small>${bytes(value)}</small></span>`;
}

// The last clean with its figures, and the sizes of those before it: a small clean must not hide a large one.
function LastJobs({ jobs: [job, ...earlier] }) {
  if (!job) return html`<${Empty} title="Not cleaned yet">The first clean appears here.<//>`;
  return html`<dl class="facts">
    <dt>Ended</dt><dd>${ago(job.finished_ms)} <${Tag} kind=${job.outcome === "finished" ? "good" : "warn"}>${OUTCOMES[job.outcome] || job.outcome}<//></dd>
    <dt>Size</dt><dd>${sizes(job)}</dd>
    <dt>Records</dt><dd>${number(job.records_before)} → ${number(job.records_after)}</dd>
    <dt>Took</dt><dd>${span(job.seconds * 1000)}</dd>
    ${job.reason && html`<dt>Reason</dt><dd>${job.reason}</dd>`}
  </dl>
  ${earlier.length > 0 && html`<ul class="earlier">${earlier.map((each) => html`<li key=${each.job_id}>
    ${ago(each.finished_ms)}: ${each.bytes_before ? sizes(each) : OUTCOMES[each.outcome] || each.outcome}</li>`)}</ul>`}`;
}

function sizes(job) {
  return `${bytes(job.bytes_before)} → ${bytes(job.bytes_after)} (${reduction(job.size_reduction_percent)})`;
}

function SegmentTable({ model }) {
  const [isOpen, setIsOpen] = useState(false);
  return html`<details onToggle=${(event) => setIsOpen(event.target.open)}>
    <summary>Segments as a table</summary>
    ${isOpen && html`<${Segments} model=${model} />`}
  </details>`;
}

function Segments({ model }) {
  const [shown, setShown] = useState(200);
  const columns = [
    { title: "First offset", className: "number", cell: (s) => number(s.baseOffset) },
    { title: "Last offset", className: "number", cell: (s) => (s.sizeBytes ? number(s.nextOffset - 1) : "empty") },
    { title: "Size", className: "number", cell: (s) => bytes(s.sizeBytes) },
    { title: "Newest record", cell: (s) => (s.sizeBytes ? ago(s.newestMs) : "") },
    { title: "State", cell: (s) => stratumName(s) },
    { title: "Known garbage", cell: (s) => (s.garbageBytes === null ? "" : percent(s.garbageBytes / Math.max(1, s.sizeBytes))) },
    { title: "Next tombstone expires", cell: (s) => horizonText(s.horizonMs) },
  ];
  const rows = model.segments.slice(0, shown);
  return html`<${Table} caption="Segments" columns=${columns} rows=${rows} keyOf=${(s) => s.baseOffset} />
    ${shown < model.segments.length &&
    html`<button type="button" onClick=${() => setShown(shown + 1000)}>Show more</button>`}`;
}

function horizonText(horizonMs) {
  if (horizonMs < 0) return "";
  const wait = horizonMs - Date.now();
  return wait > 0 ? `in ${span(wait)}` : "now";
}
