// Topics: all of them, and the partitions of one.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { get, pages } from "../api.js";
import { bytes, number, percent, plural } from "../format.js";
import { List, More } from "../parts/list.js";
import { viewOf } from "../parts/partitions.js";
import { Bar, Empty, isMissing, Loaded, Table, Tag, TopicLink, topicPath, usePoll } from "../parts/parts.js";
import { TopicSurvival } from "../parts/survival.js";

const POLL_MS = 4000;
const PAGE = 500;

// The words of the policy, and a link to the view if `topic` has one.
export function policyTags(policy, topic = null) {
  return html`${policy.map((word) => html`<${Tag} key=${word} kind=${word}>${word}<//>`)}
    ${topic !== null && html`<a class="tag view" href=${topicPath(viewOf(topic))} aria-label=${`View of ${topic}`}>view</a>`}`;
}

export function TopicsPage() {
  const [showsInternal, setShowsInternal] = useState(false);
  const internal = html`<label class="check">
    <input type="checkbox" checked=${showsInternal} onChange=${(event) => setShowsInternal(event.target.checked)} />
    Show internal topics
  </label>`;
  return html`<div class="titlebar"><h1>Topics</h1><a class="button main" href="#/create-topic">Create topic</a></div>
    <${List} path=${`/api/v1/topics?internal=${showsInternal}`} noun="topics" limit=${PAGE} milliseconds=${POLL_MS}
      events="/api/v1/events/topics"
      tools=${() => internal} empty=${html`<${NoTopics} />`}>
      ${(rows) => html`<${TopicTable} rows=${rows} />`}
    <//>`;
}

// With the command of a demo, unless this broker would refuse it or the user may not see the overview.
function NoTopics() {
  const [demo, setDemo] = useState(null);
  useEffect(() => {
    get("/api/v1/overview").then((overview) => setDemo(overview.demo), () => setDemo(null));
  }, []);
  return html`<${Empty} title="No topics yet"><a href="#/create-topic">Create one</a> here or with any Kafka
    client${demo ? html`, or try<br /><code>${demo}</code>` : "."}<//>`;
}

function TopicTable({ rows }) {
  const columns = [
    { title: "Topic", className: "name", cell: (t) => html`<${TopicLink} topic=${t.name} />` },
    { title: "Policy", cell: (t) => policyTags(t.cleanup_policy, t.view ? t.name : null) },
    { title: "Partitions", className: "number", cell: (t) => number(t.partitions) },
    { title: "Size", className: "number", cell: (t) => bytes(t.size_bytes) },
    { title: "Live", className: "number", cell: (t) => (isCompacted(t) ? live(t) : "") },
    { title: "Dirty", className: "number", cell: (t) => (isCompacted(t) ? dirty(t) : "") },
    { title: "State", cell: topicState },
  ];
  return html`<${Table} caption="Topics" stacks=${true} columns=${columns} rows=${rows} keyOf=${(t) => t.name} />`;
}

// The bytes of records that a clean would keep, as far as cleans have counted them.
export function live(row) {
  return row.live_bytes === null ? html`<span class="small">not counted<span class="block">by a clean yet</span></span>` : bytes(row.live_bytes);
}

// The bytes that a clean would read, and those that are not cleanable yet.
function dirty(row) {
  const rest = notCleanable(row);
  return html`${bytes(row.dirty_bytes || 0)} ${rest > 0 && html`<small class="block">+ ${bytes(rest)} not cleanable yet</small>`}`;
}

// The active segment is among them.
function notCleanable(row) {
  return Math.max(0, row.size_bytes - (row.clean_bytes || 0) - (row.dirty_bytes || 0));
}

export function isCompacted(topic) {
  return topic.cleanup_policy.includes("compact");
}

function topicState(topic) {
  return html`
    ${topic.policy_unknown && html`<${Tag} kind="warn">policy unknown<//>`}
    ${topic.offline > 0 && html`<${Tag} kind="bad">${topic.offline} offline<//>`}
    ${topic.damaged > 0 && html`<${Tag} kind="bad">${topic.damaged} damaged<//>`}
    ${topic.paused > 0 && html`<${Tag} kind="warn">${topic.paused} paused<//>`}
    ${topic.in_progress > 0 && html`<${Tag} kind="busy">cleaning<//>`}
  `;
}

const TABS = [
  { name: "partitions", title: "Partitions", path: "" },
  { name: "messages", title: "Messages", path: "/messages" },
  { name: "settings", title: "Settings", path: "/settings" },
  { name: "erasures", title: "Erasures", path: "/erasures" },
];

// The head of the pages of one topic; `state` is that of the page's poll. The view of a topic, its `base`, has
// no settings and no erasures of its own.
export function TopicFrame({ topic, tab, state, base = null, children }) {
  const path = topicPath(topic);
  const tabs = base === null ? TABS : TABS.slice(0, 2);
  return html`<p class="crumbs"><a href="#/topics">Topics</a>${base !== null && html` / <${TopicLink} topic=${base} />`}</p>
    <h1>${topic}</h1>
    ${!(state && isMissing(state)) && html`<nav class="tabs" aria-label="Topic">
      ${tabs.map((each) => html`<a key=${each.name} href=${path + each.path}
        aria-current=${each.name === tab ? "page" : undefined}>${each.title}</a>`)}
    </nav>`}
    ${children}`;
}

export function TopicPage({ topic }) {
  const [count, setCount] = useState(1);
  const path = `/api/v1/cleaner/partitions?limit=${PAGE}&topic=${encodeURIComponent(topic)}`;
  const state = usePoll(() => pages(path, "partitions", count), POLL_MS, [topic, count],
    `/api/v1/topics/${encodeURIComponent(topic)}/events`);
  return html`<${TopicFrame} topic=${topic} tab="partitions" state=${state}>
    <${Loaded} state=${state}>${({ rows, hasMore, answer }) => html`
      <${Partitions} topic=${topic} rows=${rows} hasMore=${hasMore} hasView=${answer.view} />
      <${More} hasMore=${hasMore} noun="partitions" onMore=${() => setCount(count + 1)} />
    `}<//>
  <//>`;
}

function Partitions({ topic, rows, hasMore, hasView }) {
  if (!rows.length) return html`<${Empty} title="No partition is served">See the broker's log for the reason.<//>`;
  const policy = rows[0].cleanup_policy;
  const size = rows.reduce((sum, row) => sum + row.size_bytes, 0);
  const ofCompacted = [
    { title: "Live", className: "number", cell: live },
    { title: "Dirty", className: "number", cell: dirty },
    { title: "Dirty ratio", className: "number", cell: (p) => (p.dirty_ratio === null ? "" : percent(p.dirty_ratio)) },
  ];
  const columns = [
    {
      title: "Partition",
      cell: (p) => html`<a href=${`${topicPath(topic)}/${p.partition}`}>${p.partition}</a>`,
    },
    ...(isCompacted(rows[0]) ? [{ title: "Layers", className: "wide", cell: layers }] : []),
    { title: "Size", className: "number", cell: (p) => bytes(p.size_bytes) },
    { title: "Segments", className: "number", cell: (p) => number(p.segments) },
    ...(isCompacted(rows[0]) ? ofCompacted : []),
    { title: "Blocked by", cell: blockedBy },
  ];
  return html`<p>${policyTags(policy, hasView ? topic : null)} ${hasMore && "the first "}${plural(rows.length, "partition")}, ${bytes(size)}</p>
    <${Table} caption=${`Partitions of ${topic}`} stacks=${true} columns=${columns} rows=${rows} keyOf=${(p) => p.partition} />
    ${policy.includes("compact") && html`<${TopicSurvival} topic=${topic} partitions=${rows.map((row) => row.partition)} />`}`;
}

function layers(partition) {
  const clean = partition.clean_bytes || 0;
  const dirty = partition.dirty_bytes || 0;
  const rest = notCleanable(partition);
  if (!partition.size_bytes) return html`<span class="small">empty</span>`;
  const parts = [
    { value: clean, className: "clean", label: `${bytes(clean)} clean` },
    { value: dirty, className: "dirty", label: `${bytes(dirty)} dirty` },
    { value: rest, className: "rest", label: `${bytes(rest)} not cleanable yet` },
  ];
  return html`<${Bar} parts=${parts}
    label=${`${bytes(clean)} clean, ${bytes(dirty)} dirty, ${bytes(rest)} not cleanable yet`} />`;
}

// Why no clean of it begins now.
function blockedBy(partition) {
  if (partition.damage.length) return html`<${Tag} kind="bad">damaged<//>`;
  if (partition.paused) return html`<${Tag} kind="warn">paused<//>`;
  if (partition.job) return html`<${Tag} kind="busy">cleaning<//>`;
  if (partition.to_clean) return html`<${Tag} kind="busy">waits for a worker<//>`;
  if (partition.blocked_by === "policy") return ""; // the tags above say that it is not compacted
  return partition.blocked_by ? html`<span class="small">${partition.blocked_by}</span>` : "";
}
