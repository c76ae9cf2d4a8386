// Lists that come a page of rows at a time, with a filter above them.

import { html, useState } from "../vendor/preact-htm.js";
import { pages } from "../api.js";
import { Empty, Loaded, usePoll } from "./parts.js";

// Shows the rows `rows` of the answer of `path` with the Table or list that `children(rows, reload)`
// returns. `empty`: what is shown if there are none; `noun`: what a row is, in the plural. `off`: what is
// shown alone if the broker answers that it does not use such a list (409).
export function List({ path, noun, rows: key = noun, limit = 200, milliseconds, events, label = "Name contains", hint, empty, off, tools, children }) {
  const [filter, setFilter] = useState("");
  const [count, setCount] = useState(1);
  const query = `${path}${path.includes("?") ? "&" : "?"}limit=${limit}&contains=${encodeURIComponent(filter)}`;
  const state = usePoll(() => pages(query, key, count), milliseconds, [query, count], events);
  if (off && state.error?.status === 409) return off;
  const isEmpty = !state.data?.rows.length; // no longer true, perhaps, once the broker does not answer
  return html`
    <div class="tools">
      <label>${label}
        <input type="search" value=${filter} placeholder=${hint} onInput=${(event) => setFilter(event.target.value)} />
      </label>
      ${tools?.(state.reload)}
    </div>
    <${Loaded} state=${state.error && isEmpty ? { ...state, data: null } : state}>${({ rows, hasMore }) => html`
      ${rows.length ? children(rows, state.reload) : filter ? html`<${NoneMatches} noun=${noun} />` : empty}
      <${More} hasMore=${hasMore} noun=${noun} onMore=${() => setCount(count + 1)} />
    `}<//>`;
}

function NoneMatches({ noun }) {
  return html`<${Empty} title=${`None of the ${noun} matches`}>Change the filter above.<//>`;
}

// A button that asks for the next page of a list.
export function More({ hasMore, onMore, noun }) {
  if (!hasMore) return null;
  return html`<p><button type="button" onClick=${onMore}>Show more ${noun}</button></p>`;
}
