// Numbers as people read them.

const DIGITS = new Intl.NumberFormat("en-US"); // toLocaleString makes one at each call
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? value.toFixed(1) : value} ${UNITS[unit]}`;
}

export function number(count) {
  return count === null || count === undefined ? "–" : DIGITS.format(count);
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// By how much something shrank or grew, from its percentage: what is left of it is no 100 %.
export function reduction(percentage) {
  const size = Math.abs(percentage);
  const text = size > 99 && size < 100 ? Math.min(99.9, size).toFixed(1) : Math.round(size);
  return `${text}\u00a0% ${percentage < 0 && text !== 0 ? "more" : "less"}`;
}

export function span(milliseconds) {
  const seconds = Math.max(0, milliseconds / 1000);
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function ago(atMs) {
  if (atMs <= 0) return "no time";
  const age = Date.now() - atMs;
  return age < 1000 ? "just now" : `${span(age)} ago`;
}

// A time of the day in UTC, as all times here: "22:53:07 UTC".
export function clock(atMs) {
  return `${dateTime(atMs).slice(11)} UTC`;
}

// The offsets [first, next) as people read them: inclusive.
export function offsets(first, next) {
  if (first >= next) return `no records, next offset ${number(next)}`;
  return first === next - 1 ? `offset ${number(first)}` : `offsets ${number(first)} to ${number(next - 1)}`;
}

// The stages of a clean, and how it can end, in words.
export const STAGES = { map: "reading keys", rewrite: "writing live records" };
export const OUTCOMES = { damaged: "left damaged segments", stale: "discarded: the log has changed" };

export function sentence(text) {
  return text[0].toUpperCase() + text.slice(1);
}

// A day and a time in UTC, as in the log of the broker: "2026-11-25 22:53:07". Producers choose the times
// of records, so some are no day of any year.
export function dateTime(atMs, hasMilliseconds = false) {
  const time = new Date(atMs);
  if (Number.isNaN(time.getTime())) return `${number(atMs)} ms`;
  return time.toISOString().replace("T", " ").replace(hasMilliseconds ? "Z" : /\.\d+Z$/, "");
}

// A name or text of a client, with escapes for characters that one cannot see or that turn text around.
export function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

// One noun for a count: plural(1, "segment") is "1 segment".
export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
