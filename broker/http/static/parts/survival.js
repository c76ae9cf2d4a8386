// How long records live: how many of the records written at an age were alive at the last clean.

import { html } from "../vendor/preact-htm.js";
import { get, partitionPath } from "../api.js";
import { number, percent, plural, span } from "../format.js";
import { Bar, Problem, useAnswer } from "./parts.js";

const PARTITIONS = 100; // of a topic, whose records are counted
const FIRST_AGE_MS = 60_000; // the second range of ages begins here

// A bar for each range of ages: [{ age_ms, written, alive }], the youngest first.
export function Survival({ rows }) {
  if (!rows.length) return html`<p class="small">No clean has counted live records yet.</p>`;
  return html`<table class="slacks">
    <caption class="hidden">Records that are alive, by age</caption>
    <thead><tr><th scope="col">Age</th><th scope="col">Alive</th><th scope="col" class="number">Written</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.age_ms}>
      <td class="nowrap">${row.age_ms ? `from ${span(row.age_ms)}` : `below ${span(FIRST_AGE_MS)}`}</td>
      <td><${Share} ...${row} /></td>
      <td class="number">${number(row.written)}</td>
    </tr>`)}</tbody>
  </table>`;
}

function Share({ alive, written }) {
  const parts = [
    { value: alive, className: "used", label: `${number(alive)} alive` },
    { value: written - alive, className: "free", label: `${number(written - alive)} superseded` },
  ];
  const share = percent(alive / written);
  return html`<span class="amount"><${Bar} parts=${parts} label=${`${share} alive`} /><small>${share}</small></span>`;
}

// The same over the partitions of a topic.
export function TopicSurvival({ topic, partitions }) {
  const counted = partitions.slice(0, PARTITIONS);
  const { data, error, busy, load } = useAnswer(() => sumOf(topic, counted));
  return html`<section>
    <h2>How long records live</h2>
    <p>For each age, the share of records that were alive at the last clean. If it falls quickly and then levels off, a
      ${" "}<code>min.compaction.lag.ms</code> of that age saves copying records that are soon superseded.</p>
    <${Problem} error=${error} />
    ${data && html`<${Survival} rows=${data} />`}
    ${data && counted.length < partitions.length && html`<p class="small">Of the first ${plural(counted.length, "partition")}.</p>`}
    <button type="button" disabled=${busy} onClick=${load}>${busy ? "One moment …" : data ? "Count again" : "Show"}</button>
  </section>`;
}

async function sumOf(topic, partitions) {
  const sums = new Map();
  for (const partition of partitions) {
    for (const row of await survivalOf(topic, partition)) {
      const sum = sums.get(row.age_ms) || { age_ms: row.age_ms, written: 0, alive: 0 };
      sums.set(row.age_ms, { ...sum, written: sum.written + row.written, alive: sum.alive + row.alive });
    }
  }
  return [...sums.values()].sort((a, b) => a.age_ms - b.age_ms);
}

async function survivalOf(topic, partition) {
  try {
    return (await get(`${partitionPath("cleaner", topic, partition)}/estimate`)).survival;
  } catch (error) {
    if (error.status === 409) return []; // it has no closed segment, or is offline
    throw error;
  }
}
