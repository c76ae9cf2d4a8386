// Groups: who reads what, and how far behind.

import { html, useState } from "./vendor/preact-htm.js";
import { pages } from "./api.js";
import { number, plural } from "./format.js";
import { Empty, Loaded, More, Table, Tag, usePoll } from "./parts.js";

const POLL_MS = 4000;
const PAGE = 200;

export function GroupsPage() {
  const [filter, setFilter] = useState("");
  const [count, setCount] = useState(1);
  const path = `/api/v1/groups?limit=${PAGE}&contains=${encodeURIComponent(filter)}`;
  const state = usePoll(() => pages(path, "groups", count), POLL_MS, [path, count]);
  return html`<h1>Groups</h1>
    <div class="tools">
      <label>Name contains
        <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      </label>
    </div>
    <${Loaded} state=${state}>${({ rows, hasMore }) => html`
      <${GroupTable} rows=${rows} isFiltered=${filter !== ""} />
      <${More} hasMore=${hasMore} noun="groups" onMore=${() => setCount(count + 1)} />
    `}<//>`;
}

function GroupTable({ rows, isFiltered }) {
  if (!rows.length && isFiltered) return html`<${Empty} title="No group has this name">Change the filter above.<//>`;
  if (!rows.length) {
    return html`<${Empty} title="No groups yet">A group appears when a consumer with a <code>group.id</code> joins.<//>`;
  }
  const columns = [
    { title: "Group", cell: (group) => html`<a href=${`#/groups/${encodeURIComponent(group.group)}`}>${group.group}</a>` },
    { title: "State", cell: (group) => html`<${Tag} kind=${stateKind(group.state)}>${group.state}<//>` },
    { title: "Protocol", cell: (group) => group.type },
    { title: "Members", className: "number", cell: (group) => number(group.members) },
    { title: "Topics", cell: topicLinks },
    { title: "Lag in offsets", className: "number", cell: (group) => number(group.lag) },
  ];
  return html`<${Table} caption="Groups" columns=${columns} rows=${rows} keyOf=${(group) => group.group} />`;
}

export function stateKind(state) {
  return { Stable: "good", Empty: "plain", Dead: "bad" }[state] || "warn";
}

function topicLinks(group) {
  const links = group.topics.map(
    ({ topic, lag }) => html`<span class="item" key=${topic}>
      <a href=${`#/topics/${encodeURIComponent(topic)}`}>${topic}</a> <small>${number(lag)}</small>
    </span>`,
  );
  return html`${links}${group.topics_left_out > 0 && html`<small>and ${plural(group.topics_left_out, "topic")} more</small>`}`;
}
