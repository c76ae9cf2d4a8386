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

export function partitionPath(root, topic, partition) {
  return `/api/v1/${root}/partitions/${encodeURIComponent(topic)}/${partition}`;
}

async function send(method, path, body) {
  const headers = { Accept: "application/json", "X-Requested-With": "console" };
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
  if (!response.ok) throw new ApiError(response.status, answer.detail || response.statusText);
  return answer;
}
