// Groups: who reads what, and how far behind.

import { html } from "../vendor/preact-htm.js";
import { number, plural, visible } from "../format.js";
import { List } from "../parts/list.js";
import { Empty, Table, Tag, TopicLink } from "../parts/parts.js";

const POLL_MS = 4000;

export function GroupsPage() {
  return html`<h1>Groups</h1>
    <${List} path="/api/v1/groups" noun="groups" milliseconds=${POLL_MS} events="/api/v1/events/groups"
      empty=${html`<${Empty} title="No groups yet">A group appears when a consumer with a <code>group.id</code> joins.<//>`}>
      ${(rows) => html`<${GroupTable} rows=${rows} />`}
    <//>`;
}

function GroupTable({ rows }) {
  const columns = [
    { title: "Group", className: "name", cell: (group) => html`<a href=${`#/groups/${encodeURIComponent(group.group)}`}>${visible(group.group)}</a>` },
    { title: "State", cell: (group) => html`<${Tag} kind=${stateKind(group.state)}>${group.state}<//>` },
    { title: "Protocol", cell: (group) => group.type },
    { title: "Members", className: "number", cell: (group) => number(group.members) },
    { title: "Topics", cell: topicLinks },
    { title: "Lag in offsets", className: "number", cell: (group) => number(group.lag) },
  ];
  return html`<${Table} caption="Groups" stacks=${true} columns=${columns} rows=${rows} keyOf=${(group) => group.group} />`;
}

export function stateKind(state) {
  return { Stable: "good", Empty: "plain", Dead: "bad" }[state] || "warn";
}

function topicLinks(group) {
  const links = group.topics.map(
    ({ topic, lag }) => html`<span class="item" key=${topic}>
      <${TopicLink} topic=${topic} /> <small>${number(lag)}</small>
    </span>`,
  );
  return html`${links}${group.topics_left_out > 0 && html`<small>and ${plural(group.topics_left_out, "topic")} more</small>`}`;
}
