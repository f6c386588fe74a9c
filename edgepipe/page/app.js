// The page's frame: navigation, the stream of events, and the page that is shown.
import { html } from "./html.js";
import { render } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { keepKey } from "./data/access.js";
import { withSample } from "./data/history.js";
import { PageStream } from "./data/stream.js";
import { Hatches } from "./pictures/memory.js";
import { ChatSession } from "./data/chat_session.js";
import { Chat } from "./pages/chat.js";
import { Connect } from "./pages/connect.js";
import { Home } from "./pages/home.js";

/**
 * @typedef {import("./data/types.js").View} View
 * @typedef {import("./data/types.js").Sample} Sample
 * @typedef {import("./data/stream.js").StreamState} StreamState
 */

const LOST_MS = 2000; // a shorter pause is no news

/** @type {{id: string, title: string, page: any, alone: boolean}[]} */
const PAGES = [
  { id: "home", title: "Home", page: Home, alone: false },
  { id: "chat", title: "Chat", page: Chat, alone: true }, // old chats are readable without the node
  { id: "connect", title: "Connect", page: Connect, alone: false },
];

/** @type {Record<string, string>} */
const LOST = {
  lost: "The node does not answer. This page shows the last known state and connects again by itself.",
  full: "Too many pages of this node are open. Close some; this one connects again by itself.",
};

function App() {
  const [view, setView] = useState(/** @type {View | null} */ (null));
  const [history, setHistory] = useState(/** @type {Record<string, Sample[]>} */ ({}));
  const [state, setState] = useState(/** @type {StreamState} */ ("connecting"));
  const [shown, setShown] = useState(shownPage());
  const session = useRef(/** @type {ChatSession | null} */ (null));
  session.current ??= new ChatSession();
  const stream = useRef(/** @type {PageStream | null} */ (null));
  useEffect(() => {
    stream.current = new PageStream((name, data) => {
      if (name === "view") setView(data);
      else if (name === "history") setHistory(data.models);
      else if (name === "sample") setHistory((before) => withSample(before, data.models));
    }, setState);
    stream.current.start();
    void session.current?.load();
    window.addEventListener("hashchange", () => setShown(shownPage()));
  }, []);
  const late = useLate(state !== "live" && state !== "connecting");
  const { page: Page, title, alone } = PAGES.find((each) => each.id === shown) ?? { page: Home, title: "Home", alone: false };
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
      <span class="quiet node">${view ? `${view.node.name} · ${view.node.version}` : ""}</span>
    </header>
    ${late && LOST[state] ? html`<p class="news bad banner" role="alert">${LOST[state]}</p>` : null}
    <main id="content" tabindex="-1">
      ${state === "key"
        ? html`<${KeyForm} onKey=${() => stream.current?.restart()} />`
        : view || (alone && state !== "connecting")
          ? html`<${Page} view=${view} history=${history} session=${session.current} />`
          : html`<p class="quiet">Connecting to the node …</p>`}
    </main>
  `;
}

function shownPage() {
  const name = location.hash.slice(1);
  return PAGES.some((each) => each.id === name) ? name : "home";
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
    <p>On the node's machine, the file <code>api-key</code> in the node's data directory holds it; <code>edgepipe config show</code> names the directory.</p>
    <label for="key">API key</label>
    <input id="key" name="key" type="password" autocomplete="off" required />
    <button type="submit">Open</button>
  </form>`;
}

render(html`<${App} />`, /** @type {Element} */ (document.getElementById("app")));
