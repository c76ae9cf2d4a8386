// A form that creates a topic.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { get, post } from "../api.js";
import { Loaded, Problem, topicPath, useAttempt } from "../parts/parts.js";
import { Help, SettingInput } from "../parts/setting_input.js";

export function CreateTopicPage() {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    get("/api/v1/topic-settings").then(
      (data) => setState({ data, error: null }),
      (error) => setState({ data: null, error }),
    );
  }, []);
  return html`<p class="crumbs"><a href="#/topics">Topics</a></p>
    <h1>Create a topic</h1>
    <${Loaded} state=${state}>${(data) => html`<${Form} settings=${data.settings} />`}<//>`;
}

function Form({ settings }) {
  const [name, setName] = useState("");
  const [partitions, setPartitions] = useState("1");
  const [values, setValues] = useState({ "cleanup.policy": "delete" });
  const { busy, error, attempt } = useAttempt();
  const find = (wanted) => settings.find((setting) => setting.name === wanted);
  const set = (key, value) => setValues({ ...values, [key]: value });
  const remove = (key) => setValues(Object.fromEntries(Object.entries(values).filter(([each]) => each !== key)));
  const submit = async (event) => {
    event.preventDefault();
    const topic = { name, partitions: Number(partitions), settings: values };
    if (await attempt(() => post("/api/v1/topics", topic))) location.hash = topicPath(name);
  };
  const wrong = error && Object.keys(values).find((key) => error.message.startsWith(`${key}: `));
  const isOfName = error && !wrong && (error.status === 409 || error.message.startsWith("topic name "));
  const isCompacted = values["cleanup.policy"].includes("compact");
  return html`<form class="card form" onSubmit=${submit}>
    <label class=${`field${isOfName ? " wrong" : ""}`}>Name
      <input name="name" type="text" required maxlength="249" autofocus autocomplete="off" spellcheck=${false}
        value=${name} onInput=${(event) => setName(event.target.value)} />
      <small>Letters, digits, dots, underscores and hyphens.</small>
      ${isOfName && html`<span class="problem" role="alert">${error.message}</span>`}
    </label>
    <label class="field">Partitions
      <input name="partitions" type="number" min="1" required value=${partitions}
        onInput=${(event) => setPartitions(event.target.value)} />
      <small>You can add partitions later, but not remove any. New records of a key may then go to another one.</small>
    </label>
    ${Object.entries(values).map(([key, value]) => html`<${Field} key=${key} setting=${find(key)} value=${value}
      error=${wrong === key ? error : null} onInput=${(next) => set(key, next)}
      onRemove=${key === "cleanup.policy" ? null : () => remove(key)} />`)}
    <div class="field">
      <label for="more">Another setting</label>
      <select id="more" value="" onChange=${(event) => {
        const setting = find(event.target.value);
        if (setting) set(setting.name, (isCompacted && setting.compact_default) || setting.default);
        event.target.value = "";
      }}>
        <option value="">Choose one …</option>
        ${settings.filter(({ name: key }) => !(key in values)).map(({ name: key }) => html`<option key=${key} value=${key}>${key}</option>`)}
      </select>
      <small>Every other setting has the broker's default.</small>
    </div>
    ${!wrong && !isOfName && html`<${Problem} error=${error} />`}
    <div class="buttons">
      <button class="main" disabled=${busy}>${busy ? "One moment …" : "Create topic"}</button>
      <a class="button" href="#/topics">Cancel</a>
    </div>
  </form>`;
}

function Field({ setting, value, error, onInput, onRemove }) {
  const id = `setting-${setting.name}`;
  return html`<div class=${`field${error ? " wrong" : ""}`}>
    <div class="fieldhead">
      <label for=${id}>${setting.name}</label>
      ${onRemove && html`<button type="button" class="quiet small" onClick=${onRemove}
        aria-label=${`Use the default of ${setting.name}`}>Use the default</button>`}
    </div>
    <${SettingInput} setting=${setting} value=${value} onInput=${onInput} id=${id} />
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
    <${Help} setting=${setting} />
  </div>`;
}
