// The frame of the console: navigation, sign-in, and the page that the address names.

import { html, render, useEffect, useErrorBoundary, useLayoutEffect, useState } from "./vendor/preact-htm.js";
import { AccessPage } from "./pages/access.js";
import { checkCredentials, download, isSignedIn, signIn, signOut, watchRefusals } from "./api.js";
import { AuditPage } from "./pages/audit.js";
import { CleanerPage } from "./pages/cleaner.js";
import { CreateTopicPage } from "./pages/create_topic.js";
import { ErasuresPage } from "./pages/erasures.js";
import { GroupPage } from "./pages/group.js";
import { GroupsPage } from "./pages/groups.js";
import { LeasesPage } from "./pages/leases.js";
import { MessagesPage } from "./pages/messages.js";
import { OverviewPage } from "./pages/overview.js";
import { PartitionPage } from "./pages/partition.js";
import { SettingsPage } from "./pages/settings.js";
import { TopicSettingsPage } from "./pages/topic_settings.js";
import { TopicPage, TopicsPage } from "./pages/topics.js";
import { baseOf } from "./parts/partitions.js";
import { Problem, useAttempt } from "./parts/parts.js";
import { ViewPage, ViewsPage } from "./pages/views.js";

const PAGES = [
  { path: "", title: "Overview" },
  { path: "topics", title: "Topics" },
  { path: "groups", title: "Groups" },
  { path: "views", title: "Views" },
  { path: "cleaner", title: "Cleaner" },
  { path: "leases", title: "Leases" },
  { path: "access", title: "Access" },
  { path: "settings", title: "Settings" },
  { path: "audit", title: "Audit" },
];

// "#/topics/orders/0" is ["topics", "orders", "0"].
function route() {
  const words = location.hash.replace(/^#\/?/, "").split("/");
  return words.map((word) => {
    try {
      return decodeURIComponent(word);
    } catch {
      return word;
    }
  });
}

// The words of the address. It listens before the browser may do anything else: an effect that waits for
// the next frame would miss a link that is followed before it.
function useRoute() {
  const [words, setWords] = useState(route());
  useLayoutEffect(() => {
    const follow = () => setWords(route());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return words;
}

// Shows why a page cannot be drawn, instead of the half of it that could.
function Drawn({ place, children }) {
  const [error, again] = useErrorBoundary((thrown) => reportError(thrown));
  useEffect(again, [place]);
  if (!error) return children;
  return html`<p class="notice bad" role="alert">The console cannot show this page: ${error.message}. This is a bug of the console:
    report it with the address of the page.</p>`;
}

function Page({ words }) {
  const [kind, name, part, place] = words;
  const isNumber = (text) => /^\d+$/.test(text);
  if (kind === "create-topic") return html`<${CreateTopicPage} />`;
  if (kind === "topics" && part === "settings") return html`<${TopicSettingsPage} key=${name} topic=${name} />`;
  if (kind === "topics" && part === "erasures") return html`<${ErasuresPage} key=${name} topic=${name} />`;
  if (kind === "topics" && part === "messages") {
    const partition = isNumber(place) ? Number(place) : null;
    return html`<${MessagesPage} key=${`${name}/${partition}`} topic=${name} partition=${partition} />`;
  }
  if (kind === "topics" && isNumber(part)) {
    return html`<${PartitionPage} key=${`${name}/${part}`} topic=${name} partition=${part} />`;
  }
  if (kind === "topics" && name && baseOf(name) !== null) return html`<${ViewPage} key=${name} topic=${name} />`;
  if (kind === "topics" && name) return html`<${TopicPage} key=${name} topic=${name} />`;
  if (kind === "topics") return html`<${TopicsPage} />`;
  if (kind === "groups" && name) return html`<${GroupPage} key=${name} group=${name} />`;
  if (kind === "groups") return html`<${GroupsPage} />`;
  if (kind === "views") return html`<${ViewsPage} />`;
  if (kind === "leases") return html`<${LeasesPage} />`;
  if (kind === "access") return html`<${AccessPage} />`;
  if (kind === "settings") return html`<${SettingsPage} part=${name} />`;
  if (kind === "audit") return html`<${AuditPage} />`;
  if (kind === "cleaner") return html`<${CleanerPage} />`;
  if (kind === "") return html`<${OverviewPage} />`;
  return html`<h1>No such page</h1>
    <p>The console has no page <code>#/${words.join("/")}</code>. See the <a href="#/">overview</a>.</p>`;
}

function SignIn({ reason, onDone }) {
  const [way, setWay] = useState("user");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(reason);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    setBusy(true);
    signIn(way === "user" ? form.get("user") : "", form.get("secret"));
    try {
      await checkCredentials();
      onDone();
    } catch (refusal) {
      signOut();
      setError(refusal.message);
      setBusy(false);
    }
  };
  return html`<main class="signin">
    <form onSubmit=${submit}>
      <img src="/console/icon.svg" alt="" width="48" height="48" />
      <h1>Sign in to Varve</h1>
      <p>Use an account of this broker. The credentials stay in this tab.</p>
      ${error && html`<p class="notice bad" role="alert">${error}</p>`}
      <div class="choice" role="group" aria-label="Kind of credentials">
        <button type="button" aria-pressed=${way === "user"} onClick=${() => setWay("user")}>
          User
        </button>
        <button type="button" aria-pressed=${way === "token"} onClick=${() => setWay("token")}>
          Token
        </button>
      </div>
      ${way === "user" &&
      html`<label>User <input name="user" autocomplete="username" required autofocus /></label>`}
      <label>
        ${way === "user" ? "Password" : "Token"}
        <input name="secret" type="password" autocomplete="current-password" required />
      </label>
      <button class="main" disabled=${busy}>${busy ? "One moment …" : "Sign in"}</button>
    </form>
  </main>`;
}

// Links to documents of the broker, which may need the credentials of this tab.
function Footer() {
  const { error, attempt } = useAttempt();
  const open = (path) => (event) => {
    if (!isSignedIn()) return;
    event.preventDefault();
    attempt(async () => location.assign(URL.createObjectURL(await download(path))));
  };
  return html`<footer>
    <a href="/api/v1/openapi.json" onClick=${open("/api/v1/openapi.json")}>OpenAPI</a>
    <a href="/metrics" onClick=${open("/metrics")}>Metrics</a>
    <a href="/readyz">Readiness</a>
    <${Problem} error=${error} />
  </footer>`;
}

// Whether the API asks for credentials, and the reason if it refused those of this tab. It watches before the
// page sends its first request.
function useAccess() {
  const [access, setAccess] = useState({ isRefused: false, reason: null });
  useLayoutEffect(() => watchRefusals((reason) => {
    if (reason !== null) signOut();
    setAccess((old) => (old.isRefused ? old : { isRefused: true, reason }));
  }), []);
  return { ...access, allow: () => setAccess({ isRefused: false, reason: null }) };
}

function App() {
  const words = useRoute();
  const access = useAccess();
  const place = words[0] === "create-topic" ? "topics" : words[0];
  const page = PAGES.find((entry) => entry.path === place) || { title: "No such page" };
  useEffect(() => {
    document.title = words[1] ? `${words.slice(1).join(" / ")} – Varve` : `${page.title} – Varve`;
    document.getElementById("content")?.focus({ preventScroll: true });
  }, [words.join("/")]);
  if (access.isRefused) return html`<${SignIn} reason=${access.reason} onDone=${access.allow} />`;
  const leave = () => {
    signOut();
    location.reload();
  };
  return html`
    <a class="skip" href="#content" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("content").focus();
    }}>Skip to the content</a>
    <header>
      <a class="brand" href="#/"><img src="/console/icon.svg" alt="" width="28" height="28" />Varve</a>
      <nav aria-label="Pages">
        ${PAGES.map(
          (entry) => html`<a href=${`#/${entry.path}`}
            aria-current=${entry === page ? "page" : undefined}>${entry.title}</a>`,
        )}
      </nav>
      ${isSignedIn() && html`<button type="button" class="quiet" onClick=${leave}>Sign out</button>`}
    </header>
    <main id="content" tabindex="-1"><${Drawn} place=${words.join("/")}><${Page} words=${words} /><//></main>
    <${Footer} key=${words.join("/")} />
  `;
}

render(html`<${App} />`, document.getElementById("app"));
