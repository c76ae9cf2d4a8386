// Overview: is the broker well, what moves, what needs attention.

import { html, useEffect, useMemo, useRef } from "../vendor/preact-htm.js";
import { get } from "../api.js";
import { bytes, dateTime, number, percent, plural, span } from "../format.js";
import { Bar, Figure, Loaded, usePoll } from "../parts/parts.js";

const POLL_MS = 2000;
const SAMPLES = 300; // ten minutes
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600]; // seconds: its labels have no smaller part
const ROUND_RATES = Array.from({ length: 40 }, (_, power) => 2 ** power); // of the chart's axis

async function load() {
  const [overview, cleaner] = await Promise.all([get("/api/v1/overview"), get("/api/v1/cleaner")]);
  return { overview, cleaner };
}

export function OverviewPage() {
  const state = usePoll(load, POLL_MS, [], "/api/v1/events/overview");
  return html`<h1>Overview</h1>
    <${Loaded} state=${state}>${(data) => html`<${Overview} ...${data} />`}<//>`;
}

function Overview({ overview, cleaner }) {
  const counts = cleaner.partitions;
  const workers = cleaner.workers.filter((worker) => worker.ready).length;
  const saved = cleaner.totals.bytes_before - cleaner.totals.bytes_after;
  const cleaned = cleaner.totals.bytes_before;
  return html`
    <${Attention} problems=${overview.attention} />
    <dl class="figures">
      <${Figure} label="Topics" value=${number(overview.topics)}
        note=${plural(counts.compacted, "compacted partition")} />
      <${Figure} label="Dirty and cleanable" value=${bytes(cleaner.cleanable_bytes)}
        note=${`${number(counts.candidates)} waiting, ${number(counts.in_progress)} being cleaned`} />
      <${Figure} label="Cleaner" value=${`${workers} of ${cleaner.workers_wanted}`}
        note="workers ready" />
      <${Figure} label="Removed since the start" value=${bytes(Math.max(0, saved))}
        note=${cleaned ? `${percent(saved / cleaned)} of ${bytes(cleaned)} that ${plural(cleaner.totals.cleans, "clean")} read` : "nothing cleaned yet"} />
    </dl>
    <section>
      <h2>Throughput</h2>
      <${Throughput} overview=${overview} />
    </section>
    <section>
      <h2>Disks</h2>
      ${overview.directories.map((directory) => html`<${Disk} key=${directory.path} ...${directory} />`)}
    </section>
    <p class="small">
      Varve ${overview.version}, cluster ${overview.cluster_id}, up for ${span(overview.uptime_seconds * 1000)}.
    </p>
  `;
}

const REMEDIES = {
  not_served: ["See the topics", "#/topics"],
  damaged: ["See what is damaged", "#/topics"],
  quarantined: ["See why and retry", "#/cleaner"],
  not_reloaded: ["Correct the file, then send SIGHUP"],
  policy_unknown: ["Set its cleanup.policy", "#/topics"],
  over_max_lag: ["See the queue", "#/cleaner"],
  erasure_at_risk: ["See varve erase TOPIC --status"],
  paused: ["See and resume", "#/cleaner"],
  cleaner_off: ["See the cleaner", "#/cleaner"],
};

function Attention({ problems }) {
  if (!problems.length) return html`<p class="notice good">Every partition is served, and nothing needs attention.</p>`;
  return html`<section class="attention" aria-label="Needs attention">
    <h2>Needs attention</h2>
    <ul>${problems.map((problem) => html`<li key=${problem.text}>${problem.text} <${Remedy} ...${problem} /></li>`)}</ul>
  </section>`;
}

// A link to where one can see more, and do something about it.
function Remedy({ kind, topic, partition }) {
  const [label, page] = REMEDIES[kind] || ["See the broker's log", "#/"];
  const place = [topic, partition].filter((part) => part !== null).map(encodeURIComponent);
  if (!page && !place.length) return html`(${label})`;
  return html`<a href=${place.length ? `#/topics/${place.join("/")}` : page}>${label}</a>`;
}

function Disk({ path, online, reason, total_bytes: total, free_bytes: free }) {
  if (!online) return html`<p class="notice bad">${path} is offline: ${reason}</p>`;
  if (total === null) return html`<p>${path}</p>`;
  const used = total - free;
  const parts = [
    { value: used, className: free < total / 10 ? "bad" : "used", label: `${bytes(used)} used` },
    { value: free, className: "free", label: `${bytes(free)} free` },
  ];
  return html`<div class="disk">
    <span class="path" title=${path}>${path}</span>
    <${Bar} parts=${parts} label=${`${percent(used / total)} of the disk used`} />
    <span>${bytes(free)} free of ${bytes(total)}</span>
  </div>`;
}

// The rates between two answers of the broker, from its counters: lists of times in seconds, and of bytes in and
// out per second. The first rate holds since the first answer, so two answers make a line.
function useRates(overview) {
  const state = useRef({ last: null, data: [[], [], []] }).current;
  useMemo(() => {
    const now = Date.now() / 1000;
    const { last, data } = state;
    if (last && now > last.at) {
      const rates = [overview.bytes_in - last.in, overview.bytes_out - last.out].map((count) => Math.max(0, count / (now - last.at)));
      for (const at of data[0].length ? [now] : [last.at, now]) [at, ...rates].forEach((value, index) => data[index].push(value));
      for (const values of data) values.splice(0, Math.max(0, values.length - SAMPLES));
    }
    state.last = { at: now, in: overview.bytes_in, out: overview.bytes_out };
  }, [overview]);
  return state.data;
}

function Throughput({ overview }) {
  const data = useRates(overview);
  const box = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    if (!data[0].length) return;
    if (plot.current) plot.current.setData(data);
    else plot.current = makePlot(box.current, data);
  }, [overview]);
  useEffect(() => {
    const resize = () => plot.current?.setSize({ width: box.current.clientWidth, height: 200 });
    addEventListener("resize", resize);
    return () => {
      removeEventListener("resize", resize);
      plot.current?.destroy();
    };
  }, []);
  const isMeasuring = !data[0].length;
  const [, into, out] = data.map((values) => `${bytes(Math.round(values.at(-1)))}/s`);
  return html`<p class="rates">${isMeasuring ? "Measuring …" : html`<span class="key in"></span>In ${into}<span class="key out"></span>Out ${out} <small>times in UTC</small>`}</p>
    <div class="chart" ref=${box} role="img" aria-label=${isMeasuring ? "Throughput: measuring" : `Throughput: in ${into}, out ${out}`}></div>`;
}

function makePlot(box, data) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  const points = { show: false };
  return new window.uPlot(
    {
      width: box.clientWidth,
      height: 200,
      padding: [8, 36, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      series: [
        {},
        { label: "in", stroke: color("--accent"), width: 2, points, fill: color("--accent-wash") },
        { label: "out", stroke: color("--sand"), width: 2, points },
      ],
      scales: { y: { range: (_plot, _low, high) => [0, Math.max(1024, high * 1.1)] } },
      axes: [
        { ...axis, size: 30, space: 90, incrs: TIME_STEPS, values: (_plot, values) => values.map((value) => dateTime(value * 1000).slice(11)) },
        { ...axis, size: 80, incrs: ROUND_RATES, values: (_plot, values) => values.map((value) => `${bytes(value)}/s`) },
      ],
    },
    data,
    box,
  );
}

