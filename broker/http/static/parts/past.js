// The past of a partition: segment lists of earlier times, from the changes that the broker has kept.

import { clock } from "../format.js";
import { toModel } from "./strata.js";

const UNKNOWN = -1;
const STATES_MAX = 2400; // that a page keeps: an hour
const ROWS_MAX = 400_000; // segments of all of them, some 50 MB

// Adds a state to the list of those since the page was opened, the oldest first, if it is another one. One
// in which a clean runs stays only until the next: a clean replaces its segments one group after the other.
export function remember(states, model) {
  const last = states.at(-1);
  if (last === model || last?.fingerprint === model.fingerprint) return;
  if (last?.facts.job) states.pop();
  states.push(model);
  const most = Math.min(STATES_MAX, Math.ceil(ROWS_MAX / model.segments.length));
  states.splice(0, Math.max(0, states.length - most));
}

// Returns the earlier states of `history`: { atMs, total, build(model) }. `total` counts bytes. `build` makes
// the model of that time; it undoes the changes since then, so it is called for one state at a time.
// Between two swaps of one clean a list has some of its outputs and some of its sources: it is no state.
export function undone(history) {
  const changes = history.steps.filter((step) => step.added); // the newest first
  const totals = totalsBefore(history, changes);
  return changes.map((change, index) => ({
    atMs: change.at_ms,
    total: totals[index],
    build: (model) => toModel(factsOf(change, model.facts), listBefore(history, changes, index), change.at_ms),
    isBetweenSwaps: change.job_id !== null && change.job_id === changes[index + 1]?.job_id,
  })).filter((state) => !state.isBetweenSwaps);
}

// Of states that have the same time to the second, leaves the one with the most bytes. The last state stays.
export function onePerSecond(states) {
  const kept = [];
  for (const state of states.slice(0, -1)) {
    const last = kept.at(-1);
    if (!last || clock(last.atMs) !== clock(state.atMs)) kept.push(state);
    else if (state.total > last.total) kept.splice(-1, 1, state);
  }
  return [...kept, states.at(-1)];
}

// The bytes before each change.
function totalsBefore(history, changes) {
  const sizes = new Map(history.steps.flatMap((step) => step.present || []).map(([base, , size]) => [base, size]));
  let total = [...sizes.values()].reduce((sum, size) => sum + size, 0);
  const resize = (base, size) => {
    total += size - (sizes.get(base) ?? 0);
    sizes.set(base, size);
  };
  return changes.map((change) => {
    for (const base of change.added) resize(base, 0);
    for (const [base, , size] of [...change.removed, change.active]) resize(base, size);
    return total;
  });
}

// The answer of the broker for the segments before the change number `index`.
function listBefore(history, changes, index) {
  const rows = new Map(history.steps.flatMap((step) => step.present || []).map((row) => [row[0], row]));
  for (const change of changes.slice(0, index + 1)) {
    for (const base of change.added) rows.delete(base);
    for (const [base, next, size, newest] of [...change.removed, change.active]) rows.set(base, [base, next, size, UNKNOWN, newest, UNKNOWN, UNKNOWN]);
  }
  const segments = [...rows.values()].sort((a, b) => a[0] - b[0]);
  // If the segments after one were removed, it ends where the next one begins.
  segments.forEach((row, at) => (segments[at] = [row[0], segments[at + 1]?.[0] ?? row[1], ...row.slice(2)]));
  return { segments };
}

// What the cleaner knew then, as far as it is kept: its dirty section.
function factsOf({ first_dirty_offset, end_offset }, facts) {
  return { ...facts, job: null, damage: [], live_bytes: null, clean_bytes: null, dirty_bytes: null, waiting_bytes: null,
    first_dirty_offset, end_offset };
}
