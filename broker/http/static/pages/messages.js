// Messages: the records of a topic or of one partition by offset, time or key, and what became of each version.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { get, post } from "../api.js";
import { ago, bytes, dateTime, number, offsets, percent, plural, sentence, span, visible } from "../format.js";
import { More } from "../parts/list.js";
import { partitionOfKey, partitionsOf } from "../parts/partitions.js";
import { Action, Empty, isMissing, Loaded, Problem, Tag, topicPath, usePoll } from "../parts/parts.js";
import { decoded } from "../schemas/schemas.js";
import { TopicFrame } from "./topics.js";

const PAGE = 50;
const VERSIONS_MAX = 500; // of a key: more than a person reads
const NO_TIME = -1;
const SHOWN = 50; // rows at first
const FOLLOW_MS = 1000;
const FOLLOW_PARTITION_MS = 150; // more for each partition: the broker is asked for each that has grown
const EXISTENCE_MS = 4000;
const FOLLOWED_MAX = 500; // records that a page which follows the log keeps, or that come from all partitions
const PARTITIONS_MAX = 32; // that are read for one page: the records of each are a request
const GAPS_MAX = 20;
const PAGES_MAX = 20; // of a browsing step: in a compacted log, offsets are sparse
const INDENTS_MAX = 20; // of JSON, which may be nested as deeply as it is long
const WAYS = [
  ["latest", "Newest"],
  ["earliest", "Oldest"],
  ["offset", "From an offset"], // of one partition
  ["time", "From a time"],
  ["key", "Every version of a key"],
];

// `partition` is null for all of them.
export function MessagesPage({ topic, partition }) {
  const state = usePartitions(topic, partition);
  return html`<${TopicFrame} topic=${topic} tab="messages" state=${state} base=${state.data?.base}>
    <${Loaded} state=${state}>${(partitions) => html`<${Browser} topic=${topic} partitions=${partitions}
      partition=${partition ?? (partitions.count === 1 ? 0 : null)} />`}<//>
  <//>`;
}

// The partitions when the page was opened, and then whether the topic and the partition still exist: one row of
// the list tells it, or records after the end of the partition, which reads nothing.
function usePartitions(topic, partition) {
  const first = useRef(null);
  return usePoll(async () => {
    const isFirst = first.current === null;
    const last = isFirst || partition === null ? await partitionsOf(topic, isFirst ? undefined : 1) : null;
    const behind = `${recordsPath(topic, partition)}?from=${Number.MAX_SAFE_INTEGER}&limit=1`;
    if (partition !== null) await get(behind).catch((error) => { if (isMissing({ error })) throw error; });
    first.current ??= last;
    return first.current;
  }, EXISTENCE_MS, [topic, partition]);
}

function recordsPath(topic, partition) {
  return `/api/v1/topics/${encodeURIComponent(topic)}/partitions/${partition}/records`;
}

// The buttons Stop and Show have keys: without them one element would be both, and the click that stops a
// search would submit the form, which begins it again.
function Browser({ topic, partition, partitions }) {
  const [way, setWay] = useState("latest");
  const [text, setText] = useState("");
  const [follows, setFollows] = useState(false);
  const search = useSearch(topic, partition);
  const canFollow = way === "latest" && search.state.way === "latest";
  const served = [...new Set([...partitions.rows.map((row) => row.partition), ...(partition === null ? [] : [partition])])];
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
  const open = (event) => (location.hash = `${topicPath(topic)}/messages${event.target.value && `/${event.target.value}`}`);
  const ways = WAYS.filter(([value]) => value !== "offset" || partition !== null);
  return html`
    <form class="tools" onSubmit=${submit}>
      <label>Partition
        <select value=${partition ?? ""} onChange=${open}>
          ${partitions.count > 1 && html`<option value="" selected=${partition === null}>all</option>`}
          ${served.map((each) => html`<option key=${each} value=${String(each)} selected=${each === partition}>${each}</option>`)}
        </select></label>
      <label>Show
        <select value=${way} onChange=${choose}>
          ${ways.map(([value, title]) => html`<option key=${value} value=${value} selected=${value === way}>${title}</option>`)}
        </select></label>
      <${Place} way=${way} text=${text} onInput=${setText} />
      ${search.state.busy
        ? html`<button key="stop" type="button" onClick=${search.stop}>Stop</button>`
        : html`<button key="show" class="main">Show</button>`}
      ${canFollow && html`<label class="check"><input type="checkbox" checked=${follows}
        onChange=${(event) => setFollows(event.target.checked)} /> Follow</label>`}
      ${partitions.base === null && html`<${Produce} topic=${topic} served=${served} count=${partitions.count}
        onDone=${() => search.run("latest", "")} />`}
    </form>
    ${canFollow && follows && !search.state.busy && html`<${Follower} topic=${partitions.base ?? topic} partition=${partition} search=${search} />`}
    <${Results} search=${search} topic=${topic} partition=${partition} />
  `;
}

// Adds what producers write to the newest records, as long as it is on the page. A view grows with its topic.
function Follower({ topic, partition, search }) {
  const place = partition === null ? "" : `/partitions/${partition}`;
  const pause = Math.max(FOLLOW_MS, FOLLOW_PARTITION_MS * search.state.places.length);
  const events = `/api/v1/topics/${encodeURIComponent(topic)}${place}/events`;
  const { error } = usePoll(search.more, pause, [topic, partition], events, 1);
  return !isMissing({ error }) && html`<${Problem} error=${error} />`; // the page says that it was deleted
}

function Place({ way, text, onInput }) {
  const input = (event) => onInput(event.target.value);
  if (way === "offset") return html`<label>Offset <input type="number" min="0" required value=${text} onInput=${input} /></label>`;
  if (way === "time") return html`<label>Time (UTC) <input type="datetime-local" step="1" required value=${text} onInput=${input} /></label>`;
  if (way === "key") return html`<label>Key <input type="search" required value=${text} onInput=${input} spellcheck=${false} /></label>`;
  return null;
}

// The partitions that a search reads, in this order, and how many others have records, too. A key is first
// where Kafka's default partitioner puts it.
async function placesOf(topic, partition, key) {
  if (partition !== null) return { places: [partition], left: 0 };
  const { rows, count } = await partitionsOf(topic);
  const filled = rows.filter((row) => (row.log_start_offset ?? 0) < row.log_end_offset).map((row) => row.partition);
  const usual = key === null ? -1 : partitionOfKey(key, count);
  filled.sort((a, b) => (b === usual) - (a === usual) || a - b);
  const places = key === null ? filled.slice(0, PARTITIONS_MAX) : filled;
  return { places, left: filled.length - places.length };
}

// Records of several partitions: by time, but the versions of a key by partition, as they were found.
function merged(rows, key, places) {
  if (key !== null || places.length === 1) return rows;
  return rows.sort((a, b) => a.timestamp_ms - b.timestamp_ms || a.partition - b.partition || a.offset - b.offset);
}

// Runs one search at a time, partition after partition and page after page, and keeps what it has found.
// `pages` has the last page of each partition that was read, and where the first one began.
function useSearch(topic, partition) {
  const empty = { busy: true, rows: [], gaps: [], error: null, pages: new Map(), places: [], left: 0, key: null, way: "latest", scanned: 0 };
  const [state, setState] = useState(empty);
  const current = useRef(null);
  const latest = useRef(state); // for `more`, which a timer calls
  latest.current = state;
  const read = async (place, from, limit, key = null) => {
    const wanted = key === null ? "" : `&key=${encodeURIComponent(key)}`;
    const page = await get(`${recordsPath(topic, place)}?from=${encodeURIComponent(from)}&limit=${limit}${wanted}`);
    return { ...page, records: page.records.map((row) => ({ ...row, partition: place })) };
  };
  const run = async (way, text) => {
    const mine = (current.current = {});
    const key = way === "key" ? text : null;
    let found = { ...empty, key, way };
    const show = (more) => current.current === mine && setState((found = { ...found, ...more }));
    show({});
    try {
      show(await placesOf(topic, partition, key));
      const places = found.places;
      const limit = key === null ? Math.min(PAGE, Math.ceil(FOLLOWED_MAX / places.length)) : VERSIONS_MAX;
      for (const place of places) {
        let from = { latest: "latest", time: time(text), offset: text }[way] || "earliest";
        let left = key === null ? limit : limit - found.rows.length;
        for (let steps = key === null ? Math.ceil(PAGES_MAX / places.length) : Infinity; steps > 0 && left > 0; steps -= 1) {
          const page = await read(place, from, Math.min(left, PAGE), key);
          if (current.current !== mine) return;
          const start = found.pages.get(place)?.start ?? page.first_offset;
          show({
            rows: merged([...found.rows, ...page.records], key, places),
            pages: new Map(found.pages).set(place, { ...page, start }),
            gaps: [...found.gaps, ...gapsOf(page)],
            scanned: found.scanned + page.scanned_bytes,
          });
          left -= page.records.length;
          from = page.next_offset;
          if (page.done) break;
        }
      }
      show({ busy: false });
    } catch (error) {
      show({ busy: false, error });
    }
  };
  // Reads what was written since the last page, and keeps the last FOLLOWED_MAX records. If one answer does
  // not have all of it, it takes the newest ones, fewer each time, so that the page stays at the end.
  const more = async () => {
    const mine = current.current;
    const old = latest.current;
    if (old.busy || old.error) return;
    let { rows, gaps, skipped = 0 } = old;
    const pages = new Map(old.pages);
    for (const place of partition === null ? await grown(topic, pages) : old.places) {
      const next = pages.get(place)?.next_offset ?? 0;
      let page = await read(place, next, FOLLOWED_MAX);
      for (let limit = FOLLOWED_MAX; limit && !page.done; limit = Math.floor(limit / 4)) page = await read(place, "latest", limit);
      rows = [...rows, ...page.records.filter((row) => row.offset >= next)];
      gaps = [...gaps, ...gapsOf(page)].slice(-GAPS_MAX);
      skipped += Math.max(0, page.first_offset - next);
      pages.set(place, { start: page.first_offset, ...pages.get(place), ...page });
    }
    if (current.current !== mine || latest.current !== old) return;
    const places = partition === null ? [...pages.keys()] : old.places;
    setState({ ...old, rows: merged(rows, null, places).slice(-FOLLOWED_MAX), pages, places, skipped, gaps });
  };
  // Shows the records of the partition before those on the page. In a compacted log the last ones before an
  // offset may be far away, so it looks for one in windows of twice the size each.
  const older = async () => {
    const mine = (current.current = {});
    const { start, log_start_offset: first } = latest.current.pages.get(partition);
    let from = start;
    setState((old) => ({ ...old, busy: true }));
    for (let window = PAGE; from > first && current.current === mine; window *= 2) {
      from = Math.max(first, start - window);
      const { records: [found] } = await read(partition, from, 1).catch(() => ({ records: [{ offset: from }] }));
      if (found && found.offset < start) break;
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

function gapsOf(page) {
  return page.unreadable.map((gap) => ({ ...gap, partition: page.partition }));
}

// The partitions that have more than was read, among PARTITIONS_MAX.
async function grown(topic, pages) {
  const { rows } = await partitionsOf(topic);
  const places = rows.filter((row) => (pages.get(row.partition)?.next_offset ?? 0) < row.log_end_offset).map((row) => row.partition);
  const free = PARTITIONS_MAX - pages.size;
  return [...places.filter((place) => pages.has(place)), ...places.filter((place) => !pages.has(place)).slice(0, Math.max(0, free))];
}

// A time of an input, which is UTC as those of the records.
function time(text) {
  const date = new Date(`${text}Z`);
  return Number.isNaN(date.getTime()) ? "" : date.toISOString();
}

function Results({ search, topic, partition }) {
  const { state, run, older } = search;
  const { busy, rows, gaps, error, pages, key, way } = state;
  const page = pages.get(partition);
  if (error?.status === 403) {
    return html`<div class="empty" role="alert"><h3>You may not read these records</h3><p>${error.message}.</p></div>`;
  }
  return html`
    <${Problem} error=${error} />
    <p class="progress" role="status">${partition === null ? progressOfAll(state) : progress({ ...state, page })}</p>
    ${gaps.map((gap) => html`<p key=${`${gap.partition}/${gap.first_offset}`} class="notice bad">${partition === null && `Partition ${gap.partition}: `}${gapText(gap)}</p>`)}
    ${!rows.length && !busy && !error && html`<${Nothing} state=${state} partition=${partition} />`}
    ${rows.length > 0 && html`<${Records} topic=${topic} rows=${rows} isOfAll=${partition === null} isHistory=${key !== null}
      isComplete=${(place) => pages.get(place).done} isNewestFirst=${way === "latest"} />`}
    ${key === null && page && !busy && html`<div class="buttons">
      ${page.start > page.log_start_offset && html`<button type="button" onClick=${older}>Older</button>`}
      ${!page.done && html`<button type="button" onClick=${() => run("offset", String(page.next_offset))}>Newer</button>`}
    </div>`}
  `;
}

function Nothing({ state, partition }) {
  if (state.key !== null) {
    return html`<${Empty} title="No record has this key">Keys are compared byte for byte, in ${partition === null
      ? "all partitions" : "this partition only"}.<//>`;
  }
  if ([...state.pages.values()].every((page) => page.end_offset === page.log_start_offset)) {
    return html`<${Empty} title="No records yet">What producers write appears here.<//>`;
  }
  return html`<${Empty} title="No records here">No record follows this position. Choose <i>Newest</i> or an earlier position.<//>`;
}

function progress({ busy, page, scanned, rows, key, skipped }) {
  if (!page) return busy ? "Reading …" : "";
  const total = page.end_offset - page.start;
  const share = total > 0 ? Math.min(1, (page.next_offset - page.start) / total) : 1;
  if (busy && key !== null) return `Searching: ${percent(share)}, ${bytes(scanned)} read, ${plural(rows.length, "version")} found`;
  if (busy) return "Reading …";
  if (key !== null) return `${plural(rows.length, "version")} of this key${page.done ? "" : " up to here"}; ${bytes(scanned)} read`;
  return sentence(`${offsets(page.log_start_offset, page.end_offset)}${skippedText(skipped)}`);
}

function progressOfAll({ busy, pages, places, left, scanned, rows, key, way, skipped }) {
  const versions = plural(rows.length, "version");
  if (busy && key !== null) return `Searching partition ${pages.size} of ${places.length}: ${bytes(scanned)} read, ${versions} found`;
  if (busy) return "Reading …";
  const isComplete = pages.size === places.length && [...pages.values()].every((page) => page.done);
  if (key !== null) return `${versions} of this key${isComplete ? "" : " up to here"}; ${plural(pages.size, "partition")}, ${bytes(scanned)} read`;
  if (!places.length) return "";
  const order = { latest: "the newest", earliest: "the oldest" }[way] || "the first";
  if (places.length === 1 && !left) return `Only partition ${places[0]} has records${skippedText(skipped)}`;
  const rest = left ? `; ${plural(left, "more partition")} with records: choose one above` : "";
  return sentence(`${order} records of ${plural(places.length, "partition")}, by time${rest}${skippedText(skipped)}`);
}

function skippedText(skipped) {
  return skipped ? `. ${plural(skipped, "record")} skipped: producers are faster than this page` : "";
}

function gapText({ first_offset: first, next_offset: next, reason }) {
  if (next === null) return `From offset ${number(first)} on, nothing can be read: ${reason}. Verify the log with varve log verify.`;
  return sentence(`${offsets(first, next)} cannot be read: ${reason}.`);
}

// `isComplete(partition)`: whether all versions of the key there are among the rows.
function Records({ topic, rows, isOfAll, isHistory, isComplete, isNewestFirst }) {
  const [shown, setShown] = useState(SHOWN);
  const lines = isHistory ? histories(rows, isComplete) : rows.map((row) => ({ row, end: null }));
  if (isNewestFirst) lines.reverse();
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Records">
    <table class="records">
      <caption class="hidden">Records</caption>
      <thead><tr>
        <th scope="col" class="number">Offset<span class="phone">${isOfAll ? "Partition, time (UTC)" : "Time (UTC)"}</span></th>
        ${isOfAll && html`<th scope="col" class="number desktop">Partition</th>`}
        <th scope="col" class="desktop">Time (UTC)</th>
        ${isHistory ? html`<th scope="col">What became of it</th>` : html`<th scope="col">Key</th>`}
        <th scope="col">Value</th>
      </tr></thead>
      <tbody>${lines.slice(0, shown).map(({ row, end }) => html`<${Row} key=${`${row.partition}/${row.offset}`} topic=${topic} row=${row}
        end=${end} isOfAll=${isOfAll} />`)}</tbody>
    </table>
  </div>
  <${More} hasMore=${lines.length > shown} noun=${isHistory ? "versions" : "records"} onMore=${() => setShown(shown + SHOWN)} />`;
}

// The versions of a key with what became of them, the newest of each partition first. A later record in another
// partition supersedes nothing.
function histories(rows, isComplete) {
  const places = [...new Set(rows.map((row) => row.partition))];
  return places.flatMap((place) => {
    const versions = rows.filter((row) => row.partition === place);
    return versions.map((row, index) => ({ row, end: fate(versions, index, isComplete(place)) })).reverse();
  });
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
  if (horizon === null) return { text: "deleted; the next clean decides how long the tombstone stays", kind: "warn" };
  const wait = horizon - Date.now();
  const text = wait > 0 ? `deleted; the tombstone stays for ${span(wait)}` : "deleted; the next clean removes the tombstone";
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

// A click anywhere in the row opens it, unless it selects text.
function Row({ topic, row, end, isOfAll }) {
  const [isOpen, setOpen] = useState(false);
  const parts = useDecoded(topic, row);
  const toggle = () => getSelection().isCollapsed && setOpen(!isOpen);
  return html`<tr class="row" onClick=${toggle}>
      <td class="number"><button type="button" class="quiet small" aria-expanded=${isOpen}
        >${isOpen ? "▾" : "▸"} ${number(row.offset)}</button>
        <span class="phone">${isOfAll && `partition ${row.partition}, `}${stamp(row.timestamp_ms)}</span></td>
      ${isOfAll && html`<td class="number desktop">${row.partition}</td>`}
      <td class="desktop nowrap" title=${ago(row.timestamp_ms)}>${stamp(row.timestamp_ms)}</td>
      ${end
        ? html`<td><${Tag} kind=${end.kind}>${end.text}<//></td>`
        : html`<td class="data"><${Short} row=${row} part=${parts.key} name="key" none="no key" /></td>`}
      <td class="data"><${Short} row=${row} part=${parts.value} name="value" none="tombstone" /></td>
    </tr>
    ${isOpen && html`<tr class="details"><td colspan=${isOfAll ? 5 : 4}><${Details} row=${row} parts=${parts} /></td></tr>`}`;
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

// A form that writes one record: to the partition where other producers look for its key, unless one is chosen.
function Produce({ topic, served, count, onDone }) {
  const [key, setKey] = useState("");
  const [value, setValue] = useState("");
  const [isTombstone, setTombstone] = useState(false);
  const [chosen, setChosen] = useState("");
  const usual = key === "" ? null : partitionOfKey(key, count);
  const act = async () => {
    const any = served[Math.floor(Math.random() * served.length)];
    const place = chosen === "" ? usual ?? any : chosen;
    await post(recordsPath(topic, place), { key: key === "" ? null : key, value: isTombstone ? null : value });
    setKey("");
    setValue("");
    setTombstone(false);
    setChosen("");
    onDone();
  };
  return html`<${Action} label="Produce" title="Produce a record" act=${act}>
    <label class="field">Key <input type="text" value=${key} onInput=${(event) => setKey(event.target.value)} /></label>
    <label class="field">Value <textarea rows="4" disabled=${isTombstone} value=${value} onInput=${(event) => setValue(event.target.value)}></textarea></label>
    <label><input type="checkbox" checked=${isTombstone} onChange=${(event) => setTombstone(event.target.checked)} /> Tombstone: delete this key</label>
    ${count > 1 && html`<label class="field">Partition
      <select value=${chosen} onChange=${(event) => setChosen(event.target.value)}>
        <option value="">chosen by key</option>
        ${served.map((each) => html`<option key=${each} value=${String(each)}>${each}</option>`)}
      </select>
      <small>${destination(chosen, usual)}</small></label>`}
  <//>`;
}

// What the form says of the partition; `usual` is that of the key, null without a key.
function destination(chosen, usual) {
  if (chosen === "") return usual === null ? "Without a key, any partition." : `Partition ${usual}, as Kafka's default partitioner.`;
  if (usual === null || usual === Number(chosen)) return "";
  return `Producers and readers look for this key in partition ${usual}.`;
}
