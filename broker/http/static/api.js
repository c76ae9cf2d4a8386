// Requests to the HTTP API of the broker that served this page.
//
// The credentials stay in this tab: sessionStorage, until the tab is closed or the user signs out.

const KEY = "varve.authorization";
const ANSWER_MS = 30_000; // the broker reads for less than this

// A response that is not 2xx, or no response at all (status 0).
export class ApiError extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

let onRefused = () => {};

// Calls `listener` with the reason whenever the API wants credentials, or others (401).
export function watchRefusals(listener) {
  onRefused = listener;
}

export function signIn(user, secret) {
  const bytes = new TextEncoder().encode(`${user}:${secret}`);
  const basic = btoa(String.fromCharCode(...bytes));
  sessionStorage.setItem(KEY, user ? `Basic ${basic}` : `Bearer ${secret}`);
}

export function signOut() {
  sessionStorage.removeItem(KEY);
}

export function isSignedIn() {
  return sessionStorage.getItem(KEY) !== null;
}

export function get(path) {
  return send("GET", path);
}

export function post(path, body = {}) {
  return send("POST", path, JSON.stringify(body));
}

export function put(path, body) {
  return send("PUT", path, JSON.stringify(body));
}

// `etag` is that of what was read: the broker refuses the change if somebody else made one since.
export function patch(path, body, etag) {
  return send("PATCH", path, JSON.stringify(body), { "If-Match": etag });
}

export function del(path) {
  return send("DELETE", path, "{}");
}

// Follows `next`: the rows of the first pages, the last answer, and whether more follow. `path` has a query.
export async function pages(path, key, count) {
  const rows = [];
  let answer;
  let next = null;
  for (let page = 0; page < count && (page === 0 || next !== null); page += 1) {
    answer = await get(next === null ? path : `${path}&after=${encodeURIComponent(next)}`);
    rows.push(...answer[key]);
    next = answer.next;
  }
  return { rows, answer, hasMore: next !== null };
}

// A document of the broker, for a link: with a link, the browser itself sends no credentials.
export async function download(path) {
  const response = await request("GET", path, undefined, { Accept: "text/plain, application/json" });
  if (response.ok) return response.blob();
  const text = await response.text();
  throw new ApiError(response.status, path.startsWith("/api/") ? JSON.parse(text).detail : text.trim());
}

// Yields when the stream of events at `path` begins, and whenever it says that something changed, until
// it ends. Throws an ApiError if there is no stream, and an error at `signal`.
export async function* changes(path, signal) {
  const response = await request("GET", path, undefined, { Accept: "text/event-stream" }, signal);
  if (!response.ok) throw new ApiError(response.status, response.statusText);
  yield;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    if (blocks.some((block) => block.startsWith("event: changed"))) yield;
  }
}

// Whether the present credentials are accepted, whatever they permit. Throws the refusal.
export async function checkCredentials() {
  try {
    await send("GET", "/api/v1/overview", undefined, {}, () => {});
  } catch (error) {
    if (error.status !== 403) throw error;
  }
}

export function partitionPath(root, topic, partition) {
  return `/api/v1/${root}/partitions/${encodeURIComponent(topic)}/${partition}`;
}

async function request(method, path, body, more, signal) {
  const headers = { Accept: "application/json", "X-Requested-With": "console", ...more };
  const authorization = sessionStorage.getItem(KEY);
  if (authorization) headers.Authorization = authorization;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, { method, headers, body, cache: "no-store", signal });
  } catch {
    throw new ApiError(0, "The broker does not answer. Is it running?");
  }
}

async function send(method, path, body, more = {}, refused = onRefused) {
  const authorization = sessionStorage.getItem(KEY);
  const late = new AbortController();
  const timer = method === "GET" && setTimeout(() => late.abort(), ANSWER_MS); // a change may take longer
  const response = await request(method, path, body, more, late.signal);
  const answer = await response.json().catch(() => null);
  clearTimeout(timer);
  if (response.ok && answer === null) throw new ApiError(0, "The answer of the broker broke off. Is it running?");
  if (!response.ok) {
    const reason = answer?.detail || response.statusText;
    const isCurrent = sessionStorage.getItem(KEY) === authorization; // the user may have signed in again
    if (response.status === 401 && isCurrent) refused(authorization ? reason : null);
    throw new ApiError(response.status, reason);
  }
  const etag = response.headers.get("ETag");
  return etag ? { ...answer, etag } : answer;
}
