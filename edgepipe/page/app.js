// The page's frame: navigation, the stream of events, and the page that is shown.
import { html } from "./html.js";
import { render } from "./vendor/preact.js";
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { keepKey, mayManage, openSession } from "./data/access.js";
import { EMPTY, after } from "./data/state.js";
import { PageStream } from "./data/stream.js";
import { Hatches } from "./pictures/memory.js";
import { Home } from "./pages/home.js";

/**
 * @typedef {import("./data/stream.js").StreamState} StreamState
 * @typedef {import("./data/chat_session.js").ChatSession} ChatSession
 * @typedef {typeof import("./pages/others.js")} Others
 */

const LOST_MS = 2000; // a shorter pause is no news

const HOME = "home";
/** @type {{id: string, title: "Home" | "Chat" | "Models" | "Requests" | "Machines" | "Connect", alone: boolean}[]} */
const PAGES = [
  { id: HOME, title: "Home", alone: false },
  { id: "chat", title: "Chat", alone: true }, // old chats are readable without the node
  { id: "models", title: "Models", alone: false },
  { id: "requests", title: "Requests", alone: false },
  { id: "machines", title: "Machines", alone: false },
  { id: "connect", title: "Connect", alone: false },
];

/** @type {Record<string, string>} */
const LOST = {
  lost: "The node does not answer. This page shows the last known state and connects again by itself.",
  full: "Too many pages of this node are open. Close some; this one connects again by itself.",
};

function App() {
  const [data, setData] = useState(EMPTY);
  const [state, setState] = useState(/** @type {StreamState} */ ("connecting"));
  const [manages, setManages] = useState(false);
  const [refused, setRefused] = useState("");
  const [shown, setShown] = useState(shownPage());
  const session = useRef(/** @type {ChatSession | null} */ (null));
  const [others, setOthers] = useState(/** @type {Others | null} */ (null));
  const stream = useRef(/** @type {PageStream | null} */ (null));
  useEffect(() => {
    const events = new PageStream((name, event) => setData((before) => after(before, name, event)), setState);
    stream.current = events;
    const begin = async () => {
      setRefused(await openSession());
      setShown(shownPage());
      events.start();
      setManages(await mayManage());
    };
    void begin();
    window.addEventListener("hashchange", () => (location.hash.startsWith("#ticket=") ? location.reload() : setShown(shownPage())));
    window.addEventListener("session", () => setManages(false));
  }, []);
  const ask = useMemo(() => (/** @type {string} */ path) => stream.current?.ask(path), []);
  const { view } = data;
  const wanted = others === null && (view !== null || shown !== HOME);
  useEffect(() => {
    if (!wanted) return;
    const take = (/** @type {Others} */ loaded) => {
      session.current ??= new loaded.ChatSession();
      void session.current.load();
      setOthers(loaded);
    };
    import("./pages/others.js").then(take, () => undefined); // again when the connection changes
  }, [wanted, state]);
  const late = useLate(state !== "live" && state !== "connecting");
  const { title, alone } = PAGES.find((each) => each.id === shown) ?? { title: "Home", alone: false };
  const Page = title === "Home" ? Home : others?.[title];
  useEffect(() => {
    document.title = `${title} · edgepipe`;
  }, [title]);
  return html`
    <${Hatches} />
    <a class="skip" href="#content" onClick=${focusContent}>To the content</a>
    <header>
      <span class="brand">edgepipe</span>
      <nav aria-label="Pages">
        ${PAGES.map(
          (each) => html`<a href="#${each.id}" aria-current=${each.id === shown ? "page" : null}>${each.title}</a>`,
        )}
      </nav>
      ${manages ? html`<span class="state ready">may manage</span>` : null}
      <span class="quiet node">${view ? `${view.node.name} · ${view.node.version}` : ""}</span>
    </header>
    ${late && LOST[state] ? html`<p class="news bad banner" role="alert">${LOST[state]}</p>` : null}
    ${refused ? html`<p class="news bad banner" role="alert">${refused}</p>` : null}
    <main id="content" tabindex="-1">
      ${state === "key"
        ? html`<${KeyForm} onKey=${() => stream.current?.restart()} />`
        : Page && (view || (alone && state !== "connecting"))
          ? html`<${Page} state=${data} manages=${manages} ask=${ask} session=${session.current} />`
          : html`<p class="quiet">Connecting to the node …</p>`}
    </main>
  `;
}

function shownPage() {
  const name = location.hash.slice(1);
  return PAGES.some((each) => each.id === name) ? name : HOME;
}

/** @param {Event} event */
function focusContent(event) {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

/**
 * Return whether something is so for `LOST_MS` already.
 *
 * @param {boolean} now
 */
function useLate(now) {
  const [late, setLate] = useState(false);
  useEffect(() => {
    if (!now) {
      setLate(false);
      return;
    }
    const timer = setTimeout(() => setLate(true), LOST_MS);
    return () => clearTimeout(timer);
  }, [now]);
  return late;
}

/** @param {{onKey: () => void}} props */
function KeyForm({ onKey }) {
  /** @param {any} event */
  const send = (event) => {
    event.preventDefault();
    keepKey(event.target.elements.key.value.trim());
    onKey();
  };
  return html`<form class="panel" onSubmit=${send}>
    <h1>This node wants its API key</h1>
    <p>On the node's machine, the file <code>api-key</code> in the node's data directory holds it; <code>edgepipe config show</code> names the directory. Or type <code>edgepipe open</code> there.</p>
    <label for="key">API key</label>
    <input id="key" name="key" type="password" autocomplete="off" required />
    <button type="submit">Open</button>
  </form>`;
}

render(html`<${App} />`, /** @type {Element} */ (document.getElementById("app")));
