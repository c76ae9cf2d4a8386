// Users and ACLs: who can sign in, and who may do what.

import { html, useState } from "../vendor/preact-htm.js";
import { del, post, put } from "../api.js";
import { number } from "../format.js";
import { List } from "../parts/list.js";
import { Action, Empty, Table, Tag } from "../parts/parts.js";

const POLL_MS = 5000;
const MECHANISMS = ["SCRAM-SHA-512", "SCRAM-SHA-256"];
const CLUSTER = "kafka-cluster"; // the only resource of type cluster
// What Kafka's operations are for, by type of resource; the others have no effect there.
const OPERATIONS = {
  topic: ["read", "write", "create", "delete", "alter", "describe", "describe_configs", "alter_configs", "all"],
  group: ["read", "delete", "describe", "describe_configs", "alter_configs", "all"],
  cluster: ["create", "alter", "describe", "cluster_action", "describe_configs", "alter_configs", "idempotent_write", "all"],
  transactional_id: ["write", "describe", "two_phase_commit", "all"],
};

export function AccessPage() {
  return html`<h1>Users and ACLs</h1>
    <section><h2>Users</h2>
      <p class="small">Users that sign in with SASL/SCRAM. Those of the settings file are not listed.</p>
      <${List} path="/api/v1/users" noun="users" milliseconds=${POLL_MS} tools=${(reload) => html`<${PutUser} label="Create user" kind="main" reload=${reload} />`}
        empty=${html`<${Empty} title="No users yet">The broker stores none. Its settings file may have some.<//>`}>
        ${(rows, reload) => html`<${Users} rows=${rows} reload=${reload} />`}
      <//>
    </section>
    <section><h2>Access control lists</h2>
      <${List} path="/api/v1/acls" noun="acls" label="Principal or name contains" milliseconds=${POLL_MS}
        off=${html`<p>Access control is off: whoever can connect may do everything. With <code>authorization.enabled</code>${" "}
          in the settings file, entries here say who may do what.</p>`}
        tools=${(reload) => html`<${AddAcl} reload=${reload} />
          <span class="small">Each entry allows or denies one operation. Where none allows it, an operation is denied.</span>`} empty=${html`<${Empty} title="No entries yet">Only super users may do anything.<//>`}>
        ${(rows, reload) => html`<${Acls} rows=${rows} reload=${reload} />`}
      <//>
    </section>`;
}

function Users({ rows, reload }) {
  const remove = (user) => async () => {
    await del(`/api/v1/users/${encodeURIComponent(user)}`);
    reload();
  };
  const columns = [
    { title: "User", cell: (row) => row.user },
    {
      title: "Mechanisms",
      className: "wide",
      cell: (row) => row.mechanisms.map((each) => html`<span class="item" key=${each.mechanism}>${each.mechanism}${" "}
        <small>${number(each.iterations)} iterations</small></span>`),
    },
    {
      title: "",
      cell: (row) => html`<span class="rowbuttons">
        <${PutUser} label="Password" kind="small" user=${row.user} reload=${reload} />
        <${Action} label="Delete" kind="small bad" title=${`Delete ${row.user}`} act=${remove(row.user)}
          question=${`${row.user} cannot sign in any more. Its entries in the access control lists stay.`} />
      </span>`,
    },
  ];
  return html`<${Table} caption="Users" stacks=${true} columns=${columns} rows=${rows} keyOf=${(row) => row.user} />`;
}

// A form that creates a user or, with `user`, gives one another password.
function PutUser({ label, kind, reload, user = null }) {
  const [name, setName] = useState("");
  const [password, setPassword] = useState("");
  const [mechanism, setMechanism] = useState(MECHANISMS[0]);
  const act = async () => {
    await put(`/api/v1/users/${encodeURIComponent(user ?? name)}`, { password, mechanism });
    setName("");
    setPassword("");
    reload();
  };
  return html`<${Action} label=${label} kind=${kind} title=${user && `Change the password of ${user}`} act=${act}>
    ${user === null && html`<label class="field">User
      <input type="text" required autocomplete="off" spellcheck=${false} value=${name} onInput=${(event) => setName(event.target.value)} /></label>`}
    <label class="field">Password
      <input type="password" required autocomplete="new-password" value=${password} onInput=${(event) => setPassword(event.target.value)} /></label>
    <label class="field">Mechanism
      <${Select} value=${mechanism} values=${MECHANISMS} onChange=${setMechanism} /></label>
  <//>`;
}

function Acls({ rows, reload }) {
  const remove = (row) => async () => {
    await del(`/api/v1/acls?${new URLSearchParams(row)}`);
    reload();
  };
  const columns = [
    { title: "Principal", cell: (row) => html`${row.principal}${row.host !== "*" && html`<small class="block">from ${row.host}</small>`}` },
    { title: "May", cell: (row) => html`<${Tag} kind=${row.permission === "allow" ? "good" : "bad"}>${row.permission}<//> ${words(row.operation)}` },
    { title: "On", className: "wide", cell: resource },
    {
      title: "",
      cell: (row) => html`<${Action} label="Remove" kind="small bad" title=${`Remove ${sentence(row)}`} act=${remove(row)}
        question="The entry is no longer in effect." />`,
    },
  ];
  return html`<${Table} caption="Access control lists" stacks=${true} columns=${columns} rows=${rows} keyOf=${sentence} />`;
}

function words(name) {
  return name.replaceAll("_", " ");
}

function resource(row) {
  if (row.resource_type === "cluster") return "the cluster";
  const name = row.pattern_type === "prefixed" ? `${row.resource_name}*` : row.resource_name;
  return html`${words(row.resource_type)} <b>${name}</b>${row.pattern_type === "prefixed" && html` <small>by prefix</small>`}`;
}

function sentence(row) {
  return `${row.permission} ${row.principal} from ${row.host}: ${row.operation} on ${row.pattern_type} ${row.resource_type} ${row.resource_name}`;
}

function AddAcl({ reload }) {
  const [entry, setEntry] = useState({
    principal: "", host: "*", permission: "allow", operation: "read",
    resource_type: "topic", pattern_type: "literal", resource_name: "",
  });
  const set = (name) => (value) => setEntry({ ...entry, [name]: value });
  const isCluster = entry.resource_type === "cluster";
  const setType = (type) => {
    const operation = OPERATIONS[type].includes(entry.operation) ? entry.operation : OPERATIONS[type][0];
    setEntry({ ...entry, resource_type: type, operation, pattern_type: "literal", resource_name: "" });
  };
  const act = async () => {
    await post("/api/v1/acls", isCluster ? { ...entry, resource_name: CLUSTER } : entry);
    reload();
  };
  return html`<${Action} label="Add entry" kind="main" act=${act}>
    <label class="field">Principal
      <${Text} value=${entry.principal} placeholder="User:ada" onInput=${set("principal")} /></label>
    <label class="field">Host <${Text} value=${entry.host} onInput=${set("host")} />
      <small>An address, or * for any.</small></label>
    <label class="field">Permission
      <${Select} value=${entry.permission} values=${["allow", "deny"]} onChange=${set("permission")} /></label>
    <label class="field">Type of resource
      <${Select} value=${entry.resource_type} values=${Object.keys(OPERATIONS)} onChange=${setType} /></label>
    <label class="field">Operation
      <${Select} value=${entry.operation} values=${OPERATIONS[entry.resource_type]} onChange=${set("operation")} /></label>
    ${!isCluster && html`<label class="field">Names
        <${Select} value=${entry.pattern_type} values=${["literal", "prefixed"]} onChange=${set("pattern_type")} /></label>
      <label class="field">Name <${Text} value=${entry.resource_name} onInput=${set("resource_name")} />
        <small>${entry.pattern_type === "prefixed" ? "The beginning of the names." : "One name, or * for all."}</small></label>`}
  <//>`;
}

function Text({ value, onInput, placeholder }) {
  return html`<input type="text" required autocomplete="off" spellcheck=${false} placeholder=${placeholder} value=${value}
    onInput=${(event) => onInput(event.target.value)} />`;
}

function Select({ value, values, onChange }) {
  return html`<select value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${values.map((each) => html`<option key=${each} value=${each} selected=${each === value}>${words(each)}</option>`)}
  </select>`;
}
