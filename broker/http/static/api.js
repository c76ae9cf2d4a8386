// Requests to the HTTP API of the broker that served this page.
//
// The credentials stay in this tab: sessionStorage, until the tab is closed or the user signs out.

const KEY = "varve.authorization";

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

// Follows `next`: the rows of the first pages, and whether more follow. `path` has a query.
export async function pages(path, key, count) {
  const rows = [];
  let next = null;
  for (let page = 0; page < count && (page === 0 || next !== null); page += 1) {
    const answer = await get(next === null ? path : `${path}&after=${encodeURIComponent(next)}`);
    rows.push(...answer[key]);
    next = answer.next;
  }
  return { rows, hasMore: next !== null };
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

async function send(method, path, body, more = {}, refused = onRefused) {
  const headers = { Accept: "application/json", "X-Requested-With": "console", ...more };
  const authorization = sessionStorage.getItem(KEY);
  if (authorization) headers.Authorization = authorization;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body, cache: "no-store" });
  } catch {
    throw new ApiError(0, "The broker does not answer. Is it running?");
  }
  let answer;
  try {
    answer = await response.json();
  } catch {
    answer = {};
  }
  if (!response.ok) {
    const reason = answer.detail || response.statusText;
    const isCurrent = sessionStorage.getItem(KEY) === authorization; // the user may have signed in again
    if (response.status === 401 && isCurrent) refused(authorization ? reason : null);
    throw new ApiError(response.status, reason);
  }
  const etag = response.headers.get("ETag");
  return etag ? { ...answer, etag } : answer;
}
