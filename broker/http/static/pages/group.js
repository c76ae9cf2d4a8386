// One consumer group: who reads what, how far behind, and how to move it.

import { html, useRef, useState } from "../vendor/preact-htm.js";
import { del, get, post } from "../api.js";
import { number, plural, visible } from "../format.js";
import { Action, Empty, Figure, Loaded, PartitionLink, Problem, Table, Tag, usePoll } from "../parts/parts.js";
import { stateKind } from "./groups.js";

const POLL_MS = 4000;

export function GroupPage({ group }) {
  const path = `/api/v1/groups/${encodeURIComponent(group)}`;
  const state = usePoll(() => get(path), POLL_MS, [group], "/api/v1/events/groups");
  return html`<p class="crumbs"><a href="#/groups">Groups</a></p>
    <h1>${visible(group)}</h1>
    <${Loaded} state=${state} noun="group">${(data) => html`<${Group} path=${path} group=${data} reload=${state.reload} />`}<//>`;
}

function Group({ path, group, reload }) {
  const lags = group.offsets.map((row) => row.lag).filter((lag) => lag !== null);
  const lag = lags.length ? lags.reduce((sum, each) => sum + each, 0) : null;
  const isEmpty = group.members.length === 0;
  return html`
    <dl class="figures">
      <${Figure} label="State" value=${html`<${Tag} kind=${stateKind(group.state)}>${group.state}<//>`} note=${`${group.type} protocol`} />
      <${Figure} label="Members" value=${number(group.members.length + group.members_left_out)} note=${group.protocol || "no assignor"} />
      <${Figure} label="Lag in offsets" value=${number(lag)} note=${plural(group.offsets.length, "partition")} />
    </dl>
    <section><h2>Members</h2><${Members} members=${group.members} /></section>
    <section><h2>Offsets</h2><${Offsets} rows=${group.offsets} /></section>
    <section><h2>Move the group</h2><${Reset} path=${path} group=${group} isEmpty=${isEmpty} reload=${reload} /></section>
    <section class="danger">
      <h2>Delete this group</h2>
      <p>This removes its committed offsets. Consumers that come back start where <code>auto.offset.reset</code> says.</p>
      ${isEmpty
        ? html`<${Action} label="Delete group" kind="bad" confirm=${visible(group.group)}
            question="The group forgets how far it has read." act=${async () => {
              await del(path);
              location.hash = "#/groups";
            }} />`
        : html`<p class="small">It has members. Stop its consumers first.</p>`}
    </section>
  `;
}

function Members({ members }) {
  if (!members.length) return html`<${Empty} title="No members">The group keeps its offsets for consumers that come back.<//>`;
  const columns = [
    { title: "Client", cell: (member) => html`<b>${visible(member.client_id)}</b><small class="block">${visible(member.member_id)}</small>` },
    { title: "Host", cell: (member) => member.host },
    { title: "Partitions", className: "number", cell: (member) => number(member.partitions) },
    { title: "Topics", cell: (member) => member.topics.join(", ") },
  ];
  return html`<${Table} caption="Members" columns=${columns} rows=${members} keyOf=${(member) => member.member_id} />`;
}

function Offsets({ rows }) {
  if (!rows.length) return html`<${Empty} title="No committed offsets">Offsets appear when a consumer commits.<//>`;
  const columns = [
    { title: "Partition", className: "name", cell: PartitionLink },
    { title: "Committed", className: "number", cell: (row) => number(row.committed_offset) },
    { title: "End", className: "number", cell: (row) => number(row.end_offset) },
    { title: "Lag", className: "number", cell: (row) => number(row.lag) },
  ];
  return html`<${Table} caption="Committed offsets" columns=${columns} rows=${rows} keyOf=${(row) => `${row.topic}-${row.partition}`} />`;
}

// First shows what would change, then changes it.
function Reset({ path, group, isEmpty, reload }) {
  const topics = [...new Set(group.offsets.map((row) => row.topic))];
  const [topic, setTopic] = useState(topics[0] || "");
  const [partition, setPartition] = useState("");
  const [way, setWay] = useState("earliest");
  const [text, setText] = useState("");
  const [state, setState] = useState({ preview: null, error: null, done: false });
  const asked = useRef(null); // the change that is previewed; none after the form has changed
  if (!isEmpty) return html`<p>The group has members, which would commit their own offsets again. Stop its consumers first.</p>`;
  const request = (change, dryRun) => post(`${path}/offsets`, { ...change, dry_run: dryRun });
  const edit = (set) => (event) => {
    set(event.target.value);
    asked.current = null;
    setState({ preview: null, error: null, done: false });
  };
  const preview = async (event) => {
    event.preventDefault();
    const to = way === "time" ? new Date(`${text}Z`).toISOString() : way === "offset" ? Number(text) : way;
    const change = (asked.current = partition === "" ? { topic, to } : { topic, to, partition: Number(partition) });
    const answer = await request(change, true).then((data) => ({ preview: data, error: null }), (error) => ({ preview: null, error }));
    if (asked.current === change) setState({ ...answer, done: false });
  };
  const apply = async () => {
    await request(asked.current, false);
    setState({ preview: null, error: null, done: true });
    reload();
  };
  return html`<form class="tools" onSubmit=${preview}>
      <label>Topic <input type="text" list="topics-of-group" required value=${topic} onInput=${edit(setTopic)} /></label>
      <datalist id="topics-of-group">${topics.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
      <label>Partition <input type="number" min="0" placeholder="all" class="short" value=${partition} onInput=${edit(setPartition)} /></label>
      <label>To
        <select value=${way} onChange=${edit(setWay)}>
          <option value="earliest">the oldest record</option>
          <option value="latest">the end</option>
          <option value="time">a time</option>
          <option value="offset">an offset</option>
        </select></label>
      ${way === "time" && html`<label>Time (UTC) <input type="datetime-local" step="1" required value=${text} onInput=${edit(setText)} /></label>`}
      ${way === "offset" && html`<label>Offset <input type="number" min="0" required value=${text} onInput=${edit(setText)} /></label>`}
      <button>Preview</button>
    </form>
    <${Problem} error=${state.error} />
    ${state.done && html`<p class="notice good" role="status">The offsets are committed.</p>`}
    ${state.preview && html`<${Preview} answer=${state.preview} apply=${apply} />`}`;
}

function Preview({ answer, apply }) {
  const moved = answer.partitions.filter((row) => row.before !== row.after);
  const columns = [
    { title: "Partition", className: "name", cell: (row) => `${answer.topic}-${row.partition}` },
    { title: "Now", className: "number", cell: (row) => number(row.before) },
    { title: "Then", className: "number", cell: (row) => number(row.after) },
    { title: "", cell: difference },
  ];
  return html`<${Table} caption="Offsets before and after" stacks=${true} columns=${columns} rows=${answer.partitions} keyOf=${(row) => row.partition} />
    <div class="buttons">
      <${Action} label="Commit these offsets" kind="main" act=${apply}
        question=${`${plural(moved.length, "partition")} of ${answer.topic} will be read from another offset.`} />
    </div>`;
}

function difference({ before, after }) {
  if (before === null) return html`<span class="small">first commit</span>`;
  if (before === after) return html`<span class="small">stays</span>`;
  return after < before ? `reads ${number(before - after)} offsets again` : `skips ${number(after - before)} offsets`;
}
