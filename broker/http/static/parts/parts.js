// Parts that several pages use: how a page loads its data and keeps it current (`usePoll`), tables, tags, buttons.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { changes } from "../api.js";
import { clock } from "../format.js";

const IDLE_MS = 60_000; // without a key, a click or a scroll: nobody seems to read
const IDLE_FACTOR = 5; // so much less often the broker is asked then
const STREAM_POLL_MS = 5000; // while a stream of events tells of changes: times such as "3 s ago" age
const STREAM_RETRY_MS = 30_000; // after a stream that could not be opened

let lastInput = Date.now();
for (const kind of ["pointermove", "pointerdown", "keydown", "wheel"]) {
  addEventListener(kind, noteInput, { passive: true });
}

function noteInput() {
  const wasIdle = isIdle();
  lastInput = Date.now();
  if (wasIdle) dispatchEvent(new Event("busyagain"));
}

function isIdle() {
  return Date.now() - lastInput > IDLE_MS;
}

// Calls `load` now and then every `milliseconds`: not while the tab is hidden, and less often while
// nobody uses it. Returns the last answer and when it was asked for, the last error, and a function that
// loads at once.
// What was loaded with other `inputs` stays until the next answer; use a `key` to forget it.
// With `events`, the path of a stream of events, it is called after each event instead, though not more
// often than every `milliseconds`, and without one every few seconds. As long as there is no such stream, it polls.
// `idleFactor` is 1 for a page that somebody watches without touching it.
export function usePoll(load, milliseconds, inputs, events = null, idleFactor = IDLE_FACTOR) {
  const [state, setState] = useState({ data: null, error: null, loadedMs: null });
  const reload = useRef(() => {});
  useEffect(() => {
    let isOver = false;
    let timer = null;
    let running = null;
    let isStreaming = false;
    let hasChanged = false; // since the present load began
    let began = 0; // the last load
    const usualPause = () => milliseconds * (isIdle() ? idleFactor : 1);
    const schedule = () => {
      clearTimeout(timer);
      if (isOver || document.hidden || running) return;
      const changedPause = Math.max(0, began + usualPause() - Date.now());
      const quietPause = Math.max(milliseconds, STREAM_POLL_MS) * (isIdle() ? idleFactor : 1);
      timer = setTimeout(run, hasChanged ? changedPause : isStreaming ? quietPause : usualPause());
    };
    const run = async () => {
      clearTimeout(timer);
      hasChanged = false;
      began = Date.now();
      const mine = (running = {});
      let answer;
      try {
        const data = await load();
        answer = () => ({ data, error: null, loadedMs: began });
      } catch (error) {
        answer = (old) => ({ ...old, data: error.status === 403 ? null : old.data, error });
      }
      if (isOver || running !== mine) return;
      setState(answer);
      running = null;
      schedule();
    };
    const wake = () => !document.hidden && !running && run();
    const unfollow = events && follow(events, (isOpen) => {
      isStreaming = isOpen;
      hasChanged = true; // or may have, before the stream began or after it ended
      schedule();
    });
    reload.current = run;
    run();
    document.addEventListener("visibilitychange", wake);
    addEventListener("busyagain", wake);
    return () => {
      isOver = true;
      clearTimeout(timer);
      unfollow?.();
      document.removeEventListener("visibilitychange", wake);
      removeEventListener("busyagain", wake);
    };
  }, inputs);
  return { ...state, reload: () => reload.current() };
}

// Follows a stream of events while the tab is visible: calls `note(true)` when it begins and at each
// event, `note(false)` when it has ended. Opens it again until the function that it returns is called.
function follow(events, note) {
  let isOver = false;
  let timer = null;
  let stream = null;
  const open = async () => {
    clearTimeout(timer);
    if (isOver || stream || document.hidden) return;
    stream = new AbortController();
    let pause = STREAM_RETRY_MS;
    try {
      for await (const _ of changes(events, stream.signal)) {
        pause = 1000;
        note(true);
      }
    } catch {
      if (stream.signal.aborted) pause = 1000;
    }
    stream = null;
    if (isOver) return;
    note(false);
    timer = setTimeout(open, pause);
  };
  const follow = () => (document.hidden ? stream?.abort() : open());
  document.addEventListener("visibilitychange", follow);
  open();
  return () => {
    isOver = true;
    clearTimeout(timer);
    stream?.abort();
    document.removeEventListener("visibilitychange", follow);
  };
}

// Shows an error above what was loaded before it, or a line while nothing has come yet. What does not exist
// is no error: the page says so. What was deleted since is none either: the page says so and shows nothing
// more, or with `keepsLast` what it showed last.
export function Loaded({ state, noun = "topic", keepsLast = false, children }) {
  if (state.error?.status === 403) return html`<${Denied} error=${state.error} />`;
  if (isMissing(state) && !state.data) return html`<${Missing} noun=${noun} error=${state.error} />`;
  const isGone = isDeleted(state);
  return html`
    ${isGone ? html`<${Deleted} noun=${noun} />` : html`<${Problem} error=${state.error} />`}
    ${isStale(state) && html`<p role="status">The page shows the state of ${clock(state.loadedMs)}.</p>`}
    ${state.data ? (!isGone || keepsLast) && children(state.data) : !state.error && html`<p class="loading">Loading …</p>`}
  `;
}

// Whether the broker has failed to answer since what a page shows was loaded.
export function isStale(state) {
  return state.error !== null && state.data !== null && !isMissing(state);
}

function Deleted({ noun }) {
  return html`<p class="notice" role="status">This ${noun} was deleted.</p>`;
}

function Missing({ noun, error }) {
  return html`<p class="notice" role="status">The broker answers: ${error.message}.${" "}
    See the list of <a href=${`#/${noun}s`}>${noun}s</a>.</p>`;
}

// Whether what a page is about does not exist, or no longer.
export function isMissing(state) {
  return state.error?.status === 404;
}

// Whether what a page shows was deleted while the page was open.
export function isDeleted(state) {
  return isMissing(state) && state.data !== null;
}

function Denied({ error }) {
  return html`<div class="empty" role="alert">
    <h3>You may not see this</h3>
    <p>The broker answers: ${error.message}. Ask its operator for this permission.</p>
  </div>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><h3>${title}</h3><p>${children}</p></div>`;
}

// Text with `code` in it.
export function Marked({ text }) {
  return (text || "").split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part));
}

export function Tag({ kind = "plain", children }) {
  return html`<span class="tag ${kind}">${children}</span>`;
}

export function Figure({ label, value, note }) {
  return html`<div class="figure">
    <dt>${label}</dt>
    <dd>${value}${note && html`<small>${note}</small>`}</dd>
  </div>`;
}

// A bar of parts: [{ value, className, label }].
export function Bar({ parts, label }) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  return html`<div class="bar" role="img" aria-label=${label}>
    ${parts.map(
      (part) =>
        part.value > 0 &&
        html`<span class=${part.className} title=${part.label}
          style=${{ width: `${(100 * part.value) / total}%` }}></span>`,
    )}
  </div>`;
}

// A table of columns [{ title, cell(row), className }]. With `stacks`, a phone shows each row as a list.
export function Table({ caption, columns, rows, keyOf, stacks = false }) {
  return html`<div class=${`scroll${stacks ? " stacks" : ""}`} tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="hidden">${caption}</caption>
      <thead>
        <tr>${columns.map((c) => html`<th scope="col" class=${c.className}>${c.title}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${keyOf(row)}>
            ${columns.map((c) => html`<td class=${c.className} data-title=${c.title}>${stacks ? html`<div>${c.cell(row)}</div>` : c.cell(row)}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

export function topicPath(topic) {
  return `#/topics/${encodeURIComponent(topic)}`;
}

export function TopicLink({ topic }) {
  return html`<a href=${topicPath(topic)}>${topic}</a>`;
}

export function PartitionLink({ topic, partition }) {
  return html`<a href=${`${topicPath(topic)}/${partition}`}>${topic}-${partition}</a>`;
}

// Why the broker refused what somebody asked for.
export function Problem({ error }) {
  return error && html`<p class="notice bad" role="alert">${error.message}</p>`;
}

// For forms and buttons: whether an act runs, the error that ended the last one, and a function that
// runs one and returns whether it succeeded.
export function useAttempt() {
  const [state, setState] = useState({ busy: false, error: null });
  const attempt = async (act) => {
    setState({ busy: true, error: null });
    try {
      await act();
      setState({ busy: false, error: null });
      return true;
    } catch (error) {
      setState({ busy: false, error });
      return false;
    }
  };
  return { ...state, attempt, reset: () => setState({ busy: false, error: null }) };
}

// For figures that are asked for with a button: the last answer or error, and a function that asks.
export function useAnswer(ask) {
  const [state, setState] = useState({ data: null, error: null, busy: false });
  const load = async () => {
    setState({ data: null, error: null, busy: true });
    try {
      setState({ data: await ask(), error: null, busy: false });
    } catch (error) {
      setState({ data: null, error, busy: false });
    }
  };
  return { ...state, load };
}

// A button that asks before it acts, and shows what the broker answered. With `confirm`, one has to
// type this text first. Children are the fields of a form, in place of a question. Buttons that take
// turns in one place have a `key` each: an open question must not become the other one. What cannot be undone
// is of the kind "bad", and red. `hint` is shown when one points at the button.
export function Action({ label, question, act, kind = "", confirm = null, title = null, hint = null, disabled = false, children }) {
  const dialog = useRef(null);
  const [typed, setTyped] = useState("");
  const { busy, error, attempt, reset } = useAttempt();
  const open = () => {
    setTyped("");
    reset();
    dialog.current.showModal();
  };
  const run = async (event) => {
    event.preventDefault();
    if (await attempt(act)) dialog.current?.close();
  };
  const isReady = confirm === null || typed === confirm;
  return html`
    <button type="button" class=${kind} disabled=${disabled} onClick=${open} aria-label=${title || undefined} title=${hint || undefined}>${label}</button>
    <dialog ref=${dialog} aria-label=${title || label}>
      <form onSubmit=${run}>
        <h2>${title || label}${question && "?"}</h2>
        ${question && html`<p>${question}</p>`}
        ${children}
        ${confirm !== null && html`<label class="field"><span>Type <b>${confirm}</b> to confirm</span>
          <input type="text" value=${typed} autocomplete="off" spellcheck=${false} onInput=${(event) => setTyped(event.target.value)} /></label>`}
        <${Problem} error=${error} />
        <div class="buttons">
          <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
          <button class=${kind.includes("bad") ? "main bad" : "main"} disabled=${disabled || busy || !isReady}>${busy ? "One moment …" : label}</button>
        </div>
      </form>
    </dialog>
  `;
}
