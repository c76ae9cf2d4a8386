// Settings of the broker: what is in effect, why, and what the last reload of the file did.

import { html } from "../vendor/preact-htm.js";
import { get, patch } from "../api.js";
import { ago, plural } from "../format.js";
import { Loaded, usePoll } from "../parts/parts.js";
import { SettingList } from "../parts/setting_list.js";

const POLL_MS = 10_000;
const PATH = "/api/v1/settings";

export function SettingsPage({ part }) {
  const state = usePoll(() => get(PATH), POLL_MS, []);
  const save = async (change) => {
    try {
      await patch(PATH, change, "*");
    } finally {
      state.reload();
    }
  };
  const isFile = part === "file";
  return html`<h1>Settings</h1>
    <nav class="tabs" aria-label="Settings">
      <a href="#/settings" aria-current=${isFile ? undefined : "page"}>Broker</a>
      <a href="#/settings/file" aria-current=${isFile ? "page" : undefined}>Settings file</a>
    </nav>
    <${Loaded} state=${state}>${(data) => html`
      <${Reload} last=${data.reload} hasFile=${data.has_file} />
      ${isFile
        ? html`<p>${data.has_file ? "Change these in the settings file. Those that need no restart take effect at a reload (SIGHUP)." : "Options of varve serve set some of these; a settings file (--config) can set all of them."}</p>
            <${SettingList} key="file" settings=${data.file.map((row) => fileRow(row, data.has_file))} />`
        : html`<p>The settings of the broker under Kafka's names. A change here overrides the settings file until you take it back.</p>
            <${SettingList} key="broker" settings=${data.settings} save=${save} />`}
    `}<//>`;
}

// A key of the settings file as a row of the list.
function fileRow(row, hasFile) {
  const isDefault = row.value === row.default;
  return {
    ...row,
    value: row.value === "null" ? "" : row.value,
    text: row.needs_restart ? `${row.text} A change needs a restart.` : row.text,
    source: isDefault ? "default" : hasFile ? "static_broker" : "option",
    unit: row.name.endsWith("_ms") ? "ms" : row.name.includes("bytes") ? "bytes" : "",
    choices: [],
    minimum: null,
    maximum: null,
    has_effect: true,
    read_only: true,
  };
}

function Reload({ last, hasFile }) {
  if (!hasFile) return html`<p class="small">The broker was started without a settings file.</p>`;
  if (last === null) return html`<p class="small">The settings file has not been reloaded since the start.</p>`;
  if (last.failure !== null) {
    const meaning = last.is_in_effect ? "put the settings in effect, but did not create all topics" : "failed, and the old settings stay in effect";
    return html`<p class="notice bad" role="alert">The reload ${ago(last.at_ms)} ${meaning}:
      ${" "}${last.failure}. Correct the file and reload it.</p>`;
  }
  const changed = last.changed.length ? `it changed ${last.changed.join(", ")}` : "nothing changed";
  return html`<p class="notice good">The settings file was reloaded ${ago(last.at_ms)}: ${changed}.</p>
    ${last.needs_restart.length > 0 && html`<p class="notice">${plural(last.needs_restart.length, "setting")} of the file
      will take effect at the next start: ${last.needs_restart.join(", ")}.</p>`}`;
}
