// Messages: the records of a partition by offset, time or key, and what became of each version.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { get, post } from "../api.js";
import { ago, bytes, dateTime, number, offsets, percent, plural, sentence, span, visible } from "../format.js";
import { More } from "../parts/list.js";
import { Action, Empty, isMissing, Loaded, Problem, Tag, topicPath, usePoll } from "../parts/parts.js";
import { decoded } from "../schemas/schemas.js";
import { TopicFrame } from "./topics.js";

const PAGE = 50;
const VERSIONS_MAX = 500; // of a key: more than a person reads
const NO_TIME = -1;
const SHOWN = 50; // rows at first
const FOLLOW_MS = 1000;
const EXISTENCE_MS = 4000;
const FOLLOWED_MAX = 500; // records that a page which follows the log keeps
const GAPS_MAX = 20;
const PAGES_MAX = 20; // of a browsing step: in a compacted log, offsets are sparse
const INDENTS_MAX = 20; // of JSON, which may be nested as deeply as it is long
const WAYS = [
  ["latest", "Newest"],
  ["earliest", "Oldest"],
  ["offset", "From an offset"],
  ["time", "From a time"],
  ["key", "Every version of a key"],
];

export function MessagesPage({ topic, partition }) {
  const state = useExistence(topic, partition);
  const [served, setServed] = useState(null); // the numbers of the partitions
  useEffect(() => {
    get(`/api/v1/cleaner/partitions?limit=5000&topic=${encodeURIComponent(topic)}`)
      .then((answer) => setServed(answer.partitions.map((row) => row.partition)), () => setServed(null));
  }, [topic]);
  return html`<${TopicFrame} topic=${topic} tab="messages" state=${state}>
    ${isMissing(state) ? html`<${Loaded} state=${state} />` : html`<${Browser} topic=${topic} partition=${partition} served=${served} />`}
  <//>`;
}

// Whether the partition exists: asks for records behind its end, which reads nothing and needs no other
// permission than the page.
function useExistence(topic, partition) {
  const path = `/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/records`;
  return usePoll(() => get(`${path}?from=${Number.MAX_SAFE_INTEGER}&limit=1`), EXISTENCE_MS, [topic, partition]);
}

// The buttons Stop and Show have keys: without them one element would be both, and the click that stops a
// search would submit the form, which begins it again.
function Browser({ topic, partition, served }) {
  const [way, setWay] = useState("latest");
  const [text, setText] = useState("");
  const [follows, setFollows] = useState(false);
  const search = useSearch(topic, partition);
  const canFollow = way === "latest" && search.state.way === "latest";
  useEffect(() => void search.run("latest", ""), [topic, partition]);
  const submit = (event) => {
    event.preventDefault();
    search.run(way, text);
  };
  const choose = (event) => {
    setWay(event.target.value);
    setText("");
    if (["latest", "earliest"].includes(event.target.value)) search.run(event.target.value, "");
  };
  return html`
    <form class="tools" onSubmit=${submit}>
      ${served !== null && html`<label>Partition
        <select value=${partition} onChange=${(event) => (location.hash = `${topicPath(topic)}/messages/${event.target.value}`)}>
          ${[...new Set([...served, Number(partition)])].map((each) => html`<option key=${each} value=${String(each)} selected=${String(each) === partition}>${each}</option>`)}
        </select></label>`}
      <label>Show
        <select value=${way} onChange=${choose}>
          ${WAYS.map(([value, title]) => html`<option key=${value} value=${value} selected=${value === way}>${title}</option>`)}
        </select></label>
      <${Place} way=${way} text=${text} onInput=${setText} />
      ${search.state.busy
        ? html`<button key="stop" type="button" onClick=${search.stop}>Stop</button>`
        : html`<button key="show" class="main">Show</button>`}
      ${canFollow && html`<label class="check"><input type="checkbox" checked=${follows}
        onChange=${(event) => setFollows(event.target.checked)} /> Follow</label>`}
      <${Produce} topic=${topic} partition=${partition} isOnly=${served?.length === 1} onDone=${() => search.run("latest", "")} />
    </form>
    ${canFollow && follows && html`<${Follower} topic=${topic} partition=${partition} more=${search.more} />`}
    <${Results} search=${search} topic=${topic} />
  `;
}

// Adds what producers write to the newest records, as long as it is on the page.
function Follower({ topic, partition, more }) {
  const events = `/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/events`;
  const { error } = usePoll(more, FOLLOW_MS, [topic, partition], events);
  return !isMissing({ error }) && html`<${Problem} error=${error} />`; // the page says that it was deleted
}

function Place({ way, text, onInput }) {
  const input = (event) => onInput(event.target.value);
  if (way === "offset") return html`<label>Offset <input type="number" min="0" required value=${text} onInput=${input} /></label>`;
  if (way === "time") return html`<label>Time (UTC) <input type="datetime-local" step="1" required value=${text} onInput=${input} /></label>`;
  if (way === "key") return html`<label>Key <input type="search" required value=${text} onInput=${input} spellcheck=${false} /></label>`;
  return null;
}

// Runs one search at a time, page after page, and keeps what it has found.
function useSearch(topic, partition) {
  const path = `/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/records`;
  const [state, setState] = useState({ busy: true, rows: [], gaps: [], error: null, page: null, key: null, way: "latest" });
  const current = useRef(null);
  const latest = useRef(state); // for `more`, which a timer calls
  latest.current = state;
  const run = async (way, text) => {
    const mine = (current.current = {});
    const key = way === "key" ? text : null;
    const limit = key === null ? PAGE : VERSIONS_MAX;
    let found = { busy: true, rows: [], gaps: [], error: null, page: null, key, way, scanned: 0 };
    setState(found);
    let from = { latest: "latest", time: time(text), offset: text }[way] || "earliest";
    for (let pages = 0; current.current === mine; pages += 1) {
      try {
        const left = limit - found.rows.length;
        const query = `from=${encodeURIComponent(from)}&limit=${Math.min(left, PAGE)}`;
        const page = await get(`${path}?${query}${key === null ? "" : `&key=${encodeURIComponent(key)}`}`);
        const rows = [...found.rows, ...page.records];
        const isOver = page.done || rows.length >= limit || (key === null && pages >= PAGES_MAX);
        const scanned = found.scanned + page.scanned_bytes;
        const start = found.start ?? page.first_offset;
        found = { ...found, busy: !isOver, rows, gaps: [...found.gaps, ...page.unreadable], page, scanned, start };
        from = page.next_offset;
      } catch (error) {
        found = { ...found, busy: false, error };
      }
      if (current.current !== mine) return;
      setState(found);
      if (!found.busy) return;
    }
  };
  // Reads what was written since the last page, and keeps the last FOLLOWED_MAX records. If one answer does
  // not have all of it, it takes the newest ones, fewer each time, so that the page stays at the end.
  const more = async () => {
    const mine = current.current;
    const old = latest.current;
    if (old.busy || !old.page || old.error) return;
    const next = old.page.next_offset;
    const read = (from, limit) => get(`${path}?from=${from}&limit=${limit}`);
    let page = await read(next, FOLLOWED_MAX);
    for (let limit = FOLLOWED_MAX; limit && !page.done; limit = Math.floor(limit / 4)) page = await read("latest", limit);
    if (current.current !== mine || latest.current !== old) return;
    const rows = [...old.rows, ...page.records.filter((row) => row.offset >= next)].slice(-FOLLOWED_MAX);
    const skipped = (old.skipped || 0) + Math.max(0, page.first_offset - next);
    setState({ ...old, rows, page, skipped, gaps: [...old.gaps, ...page.unreadable].slice(-GAPS_MAX) });
  };
  // Shows the records before those on the page. In a compacted log the last ones before an offset may be
  // far away, so it looks for one in windows of twice the size each.
  const older = async () => {
    const mine = (current.current = {});
    const { start, page } = latest.current;
    let from = start;
    setState((old) => ({ ...old, busy: true }));
    for (let window = PAGE; from > page.log_start_offset && current.current === mine; window *= 2) {
      from = Math.max(page.log_start_offset, start - window);
      const { records: [first] } = await get(`${path}?from=${from}&limit=1`).catch(() => ({ records: [{ offset: from }] }));
      if (first && first.offset < start) break;
    }
    if (current.current === mine) run("offset", String(from));
  };
  useEffect(() => () => (current.current = null), []);
  const stop = () => {
    current.current = null;
    setState((old) => ({ ...old, busy: false }));
  };
  return { state, run, more, older, stop };
}

// A time of an input, which is UTC as those of the records.
function time(text) {
  const date = new Date(`${text}Z`);
  return Number.isNaN(date.getTime()) ? "" : date.toISOString();
}

function Results({ search, topic }) {
  const { state, run, older } = search;
  const { busy, rows, gaps, error, page, key, way } = state;
  if (error?.status === 403) {
    return html`<div class="empty" role="alert"><h3>You may not read these records</h3><p>${error.message}.</p></div>`;
  }
  return html`
    <${Problem} error=${error} />
    <p class="progress" role="status">${progress(state)}</p>
    ${gaps.map((gap) => html`<p key=${gap.first_offset} class="notice bad">${gapText(gap)}</p>`)}
    ${!rows.length && !busy && !error && html`<${Nothing} state=${state} />`}
    ${rows.length > 0 && html`<${Records} topic=${topic} rows=${rows} isHistory=${key !== null} isComplete=${page.done}
      isNewestFirst=${key !== null || way === "latest"} />`}
    ${key === null && page && !busy && html`<div class="buttons">
      ${state.start > page.log_start_offset && html`<button type="button" onClick=${older}>Older</button>`}
      ${!page.done && html`<button type="button" onClick=${() => run("offset", String(page.next_offset))}>Newer</button>`}
    </div>`}
  `;
}

function Nothing({ state }) {
  if (state.key !== null) {
    return html`<${Empty} title="No record has this key">Keys are compared byte for byte, in this partition only.<//>`;
  }
  if (state.page && state.page.end_offset === state.page.log_start_offset) {
    return html`<${Empty} title="No records yet">What producers write appears here.<//>`;
  }
  return html`<${Empty} title="No records here">There is none behind this place. Choose <i>Newest</i> or an earlier one.<//>`;
}

function progress({ busy, page, scanned, start, rows, key, skipped }) {
  if (!page) return busy ? "Reading …" : "";
  const total = page.end_offset - start;
  const share = total > 0 ? Math.min(1, (page.next_offset - start) / total) : 1;
  if (busy && key !== null) return `Searching: ${percent(share)}, ${bytes(scanned)} read, ${plural(rows.length, "version")} found`;
  if (busy) return "Reading …";
  if (key !== null) return `${plural(rows.length, "version")} of this key${page.done ? "" : " up to here"}; ${bytes(scanned)} read`;
  const lost = skipped ? `. ${plural(skipped, "record")} skipped: they came faster than this page reads` : "";
  return sentence(`${offsets(page.log_start_offset, page.end_offset)}${lost}`);
}

function gapText({ first_offset: first, next_offset: next, reason }) {
  if (next === null) return `From offset ${number(first)} on, nothing can be read: ${reason}. Verify the log with varve log verify.`;
  return sentence(`${offsets(first, next)} cannot be read: ${reason}.`);
}

function Records({ topic, rows, isHistory, isComplete, isNewestFirst }) {
  const [shown, setShown] = useState(SHOWN);
  const lines = rows.map((row, index) => ({ row, end: isHistory ? fate(rows, index, isComplete) : null }));
  if (isNewestFirst) lines.reverse();
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Records">
    <table class="records">
      <caption class="hidden">Records</caption>
      <thead><tr>
        <th scope="col" class="number">Offset</th><th scope="col">Time (UTC)</th>
        ${isHistory ? html`<th scope="col">What became of it</th>` : html`<th scope="col">Key</th>`}
        <th scope="col">Value</th>
      </tr></thead>
      <tbody>${lines.slice(0, shown).map(({ row, end }) => html`<${Row} key=${row.offset} topic=${topic} row=${row} end=${end} />`)}</tbody>
    </table>
  </div>
  <${More} hasMore=${lines.length > shown} noun="versions" onMore=${() => setShown(shown + SHOWN)} />`;
}

// What became of one version of a key: { text, kind }.
function fate(rows, index, isComplete) {
  const row = rows[index];
  const next = rows[index + 1];
  const isTombstone = row.value === null;
  if (next) return { text: `superseded by offset ${number(next.offset)}`, kind: "plain" };
  if (!isComplete) return { text: "latest so far", kind: "busy" };
  if (!isTombstone) return { text: "latest", kind: "good" };
  const horizon = row.delete_horizon_ms;
  if (horizon === null) return { text: "deleted; the next clean sets until when it stays", kind: "warn" };
  const wait = horizon - Date.now();
  const text = wait > 0 ? `deleted; stays for ${span(wait)}` : "deleted; the next clean removes it";
  return { text, kind: "warn" };
}

// What the registry's schemas make of a key and a value: { key, value }, each { text, schema }, { error } or null.
function useDecoded(topic, row) {
  const [parts, setParts] = useState({ key: null, value: null });
  useEffect(() => {
    let isOver = false;
    for (const name of ["key", "value"]) {
      decoded(topic, row, name)
        .catch((error) => ({ error: error.message }))
        .then((part) => part && !isOver && setParts((old) => ({ ...old, [name]: part })));
    }
    return () => (isOver = true);
  }, [topic, row]);
  return parts;
}

function Row({ topic, row, end }) {
  const [isOpen, setOpen] = useState(false);
  const parts = useDecoded(topic, row);
  return html`<tr>
      <td class="number"><button type="button" class="quiet small" aria-expanded=${isOpen}
        onClick=${() => setOpen(!isOpen)}>${isOpen ? "▾" : "▸"} ${number(row.offset)}</button></td>
      <td class="nowrap" title=${ago(row.timestamp_ms)}>${stamp(row.timestamp_ms)}</td>
      ${end
        ? html`<td><${Tag} kind=${end.kind}>${end.text}<//></td>`
        : html`<td class="data"><${Short} row=${row} part=${parts.key} name="key" none="no key" /></td>`}
      <td class="data"><${Short} row=${row} part=${parts.value} name="value" none="tombstone" /></td>
    </tr>
    ${isOpen && html`<tr class="details"><td colspan="4"><${Details} row=${row} parts=${parts} /></td></tr>`}`;
}

function stamp(ms) {
  return ms === NO_TIME ? "–" : dateTime(ms, true);
}

// The beginning of a key or value, in one line.
function Short({ row, part, name, none }) {
  if (part?.text) return html`<span class="twolines">${visible(part.text).slice(0, 300)}</span>`;
  if (row[name] === null) return html`<i class="small">${none}</i>`;
  const text = data(row, name);
  return html`<span class="twolines">${row[name] === undefined && html`<${Tag} kind="plain">bytes<//>`}${text.slice(0, 300)}</span>`;
}

function Details({ row, parts }) {
  return html`<dl class="facts">
    <dt>Time</dt><dd>${stamp(row.timestamp_ms)} UTC, ${ago(row.timestamp_ms)}</dd>
    <dt>Key</dt><dd><${Whole} row=${row} part=${parts.key} name="key" none="no key" /></dd>
    <dt>Value</dt><dd><${Whole} row=${row} part=${parts.value} name="value" none="null: a tombstone" /></dd>
    ${row.headers.length > 0 && html`<dt>Headers</dt><dd>${row.headers.map(
      (header, index) => html`<div key=${index}><b>${visible(header.name)}</b> ${header.value === null ? html`<i>null</i>` : data(header, "value")}</div>`,
    )}${row.headers_left_out > 0 && html`<small>and ${plural(row.headers_left_out, "header")} more</small>`}</dd>`}
  </dl>`;
}

function Whole({ row, part, name, none }) {
  if (row[name] === null) return html`<i>${none}</i>`;
  const size = row[`${name}_bytes`];
  if (part?.text) return html`<pre tabindex="0">${visible(pretty(part.text))}</pre><small>${bytes(size)}, ${part.schema}</small>`;
  const isCut = row.truncated.includes(name);
  const note = `${bytes(size)}${row[name] === undefined ? ", not UTF-8, shown as hexadecimal" : ""}${isCut ? ", the first 4 KiB are shown" : ""}${part?.error ? `, ${part.error}` : ""}`;
  return html`<pre tabindex="0">${isCut ? data(row, name) : visible(pretty(data(row, name)))}</pre><small>${note}</small>`;
}

// JSON with line ends and indents. It is not made of the parsed value, which has fewer digits of large
// numbers, and no name twice.
function pretty(text) {
  if (!/^\s*[[{]/.test(text)) return text;
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let depth = 0;
  const indent = () => `\n${"  ".repeat(Math.min(depth, INDENTS_MAX))}`;
  return text.replace(/"(?:[^"\\]|\\.)*"|\s+|\[\s*\]|\{\s*\}|[[\]{},:]/g, (token) => {
    if (token[0] === '"') return JSON.stringify(JSON.parse(token));
    if (!token.trim()) return "";
    if (token === ":") return ": ";
    if (token === ",") return token + indent();
    if (token.length > 1) return token[0] + token.at(-1);
    const isBegin = "[{".includes(token);
    depth += isBegin ? 1 : -1;
    return isBegin ? token + indent() : indent() + token;
  });
}

// Bytes as text: those that are not UTF-8 in hexadecimal.
function data(fields, name) {
  if (typeof fields[name] === "string") return visible(fields[name]);
  const raw = atob(fields[`${name}_base64`]);
  return Array.from(raw, (letter) => letter.charCodeAt(0).toString(16).padStart(2, "0")).join(" ");
}

function Produce({ topic, partition, isOnly, onDone }) {
  const [key, setKey] = useState("");
  const [value, setValue] = useState("");
  const [isTombstone, setTombstone] = useState(false);
  const act = async () => {
    const path = `/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/records`;
    await post(path, { key: key === "" ? null : key, value: isTombstone ? null : value });
    onDone();
  };
  return html`<${Action} label="Produce" title="Produce a record" act=${act}>
    <label class="field">Key <input type="text" value=${key} onInput=${(event) => setKey(event.target.value)} /></label>
    <label class="field">Value <textarea rows="4" disabled=${isTombstone} value=${value} onInput=${(event) => setValue(event.target.value)}></textarea></label>
    <label><input type="checkbox" checked=${isTombstone} onChange=${(event) => setTombstone(event.target.checked)} /> Tombstone: delete this key</label>
    ${!isOnly && html`<small class="block">It goes to partition ${partition}, where other producers may not look for this key.</small>`}
  <//>`;
}
