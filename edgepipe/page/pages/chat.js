// Chat with any served or loadable model. Chats stay in this browser.
import { html } from "../html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { exported } from "../data/chats.js";
import { download } from "../parts.js";
import { ChatMessage } from "./chat_message.js";
import { SettingsForm } from "./chat_settings.js";

/**
 * @typedef {import("../data/types.js").View} View
 * @typedef {import("../data/state.js").State} State
 * @typedef {import("../data/chat_session.js").ChatSession} ChatSession
 */

/** @param {{state: State, session: ChatSession}} props */
export function Chat({ state: { view }, session }) {
  const [, redraw] = useState(0);
  const [editing, setEditing] = useState(-1);
  useEffect(() => session.listen(() => redraw((count) => count + 1)), [session]);
  const { chat } = session;
  const names = modelNames(view);
  const model = names.includes(chat.model) || !names[0] ? chat.model : names[0];
  useEffect(() => {
    if (model !== session.chat.model) session.change({ model });
  }, [model]);
  const context = view?.models.find((each) => each.name === model)?.context ?? 0;
  const last = chat.messages.length - 1;
  useFollow(session.running !== null);
  return html`<div class="chat">
    <h1 class="hidden">Chat</h1>
    <${Chats} session=${session} />
    <div class="talk">
      <div class="chat-head">
        <label for="model">Model</label>
        <select id="model" value=${model} onChange=${(/** @type {any} */ event) => session.change({ model: event.target.value })}>
          ${names.map((name) => html`<option value=${name}>${name}${loads(view, name) ? " (loads first)" : ""}</option>`)}
          ${names.length === 0 ? html`<option value="">no model</option>` : null}
        </select>
        <${SettingsForm} settings=${chat.settings} onChange=${(/** @type {any} */ settings) => session.change({ settings })} />
      </div>
      ${session.problem ? html`<p class="news warn">${session.problem}</p>` : null}
      <div class="messages" aria-live="off">
        ${chat.messages.length === 0 ? html`<p class="quiet">Ask something. The chat stays in this browser.</p>` : null}
        ${chat.messages.map((message, index) =>
          index === editing
            ? html`<${Composer} key="edit" text=${message.content} label="Send again" onSend=${(/** @type {string} */ text) => { setEditing(-1); void session.send(text, index); }} onCancel=${() => setEditing(-1)} />`
            : html`<${ChatMessage} key=${index} message=${message} context=${context} running=${session.running !== null && index === last}
                onEdit=${session.running === null && message.role === "user" ? () => setEditing(index) : null}
                onRegenerate=${session.running === null && index === last ? () => void session.regenerate() : null} />`,
        )}
      </div>
      <p class="status quiet" role="status">${session.running ? session.status || "answering" : ""}</p>
      <${Composer} text="" label="Send" busy=${session.running !== null} disabled=${!model} onStop=${() => { session.stop(); redraw((count) => count + 1); }} onSend=${(/** @type {string} */ text) => void session.send(text)} />
    </div>
  </div>`;
}

/**
 * Keep the end of a growing answer in sight, unless the reader has scrolled up.
 *
 * @param {boolean} grows
 */
function useFollow(grows) {
  const atEnd = useRef(true);
  useEffect(() => {
    const look = () => {
      const page = document.documentElement;
      atEnd.current = page.scrollHeight - page.clientHeight - window.scrollY < 80;
    };
    window.addEventListener("scroll", look, { passive: true });
    return () => window.removeEventListener("scroll", look);
  }, []);
  useEffect(() => {
    if (grows && atEnd.current) window.scrollTo(0, document.documentElement.scrollHeight);
  });
}

/** @param {View | null} view */
function modelNames(view) {
  if (view === null) return [];
  return [...new Set([...view.models.filter((model) => model.state !== "failed").map((model) => model.name), ...view.loadable])];
}

/** @param {View | null} view @param {string} name */
function loads(view, name) {
  return view !== null && !view.models.some((model) => model.name === name);
}

/**
 * A text field that sends: Enter sends, Shift-Enter begins a line.
 *
 * @param {any} props `text`, `label`, `onSend(text)`; `onStop` while `busy`; `onCancel` for an edit
 */
function Composer({ text, label, onSend, onStop, onCancel, busy, disabled }) {
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const send = (/** @type {Event} */ event) => {
    event.preventDefault();
    const typed = field.current?.value ?? "";
    if (!typed.trim() || busy || disabled) return;
    if (field.current) field.current.value = "";
    onSend(typed);
  };
  const press = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape") (busy ? onStop : onCancel)?.();
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea ref=${field} rows="3" aria-label="Message" placeholder="Message (Enter sends, Shift-Enter begins a line)" defaultValue=${text} onKeyDown=${press}></textarea>
    <div>
      ${busy ? html`<button type="button" onClick=${onStop}>Stop</button>` : html`<button type="submit" disabled=${disabled}>${label}</button>`}
      ${onCancel ? html`<button type="button" onClick=${onCancel}>Cancel</button>` : null}
    </div>
  </form>`;
}

/** @param {{session: ChatSession}} props */
function Chats({ session }) {
  const [said, setSaid] = useState("");
  const take = async (/** @type {any} */ event) => {
    const file = event.target.files[0];
    if (!file) return;
    const count = await session.importText(await file.text());
    setSaid(count ? `${count} chat${count === 1 ? "" : "s"} imported` : "The file holds no chats");
    event.target.value = "";
  };
  return html`<details class="chats" open=${matchMedia("(min-width: 860px)").matches}>
    <summary>Chats (${session.chats.length})</summary>
    <div class="row">
      <button type="button" onClick=${() => session.start()}>New chat</button>
      <button type="button" onClick=${() => download("edgepipe-chats.json", exported(session.chats))} disabled=${session.chats.length === 0}>Export</button>
      <label class="file">Import<input type="file" accept=".json,application/json" onChange=${take} /></label>
    </div>
    <p class="quiet" role="status">${said}</p>
    <ul>
      ${session.chats.map(
        (chat) => html`<li key=${chat.id}>
          <button type="button" class="title" aria-current=${chat.id === session.chat.id ? "true" : null} onClick=${() => session.open(chat.id)}>${chat.title || "New chat"}</button>
          <button type="button" class="quiet" aria-label=${`Remove ${chat.title}`} onClick=${() => void session.remove(chat.id)}>×</button>
        </li>`,
      )}
    </ul>
  </details>`;
}
