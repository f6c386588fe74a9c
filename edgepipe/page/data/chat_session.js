// The open chat and the answer that runs. It lives as long as the tab, whichever page is shown.
import { ask, requestBody } from "./answer.js";
import { allChats, imported, newChat, removeChat, saveChat } from "./chats.js";

/**
 * @typedef {import("./chats.js").Chat} Chat
 * @typedef {import("./answer.js").Settings} Settings
 */

const DRAW_MS = 60; // shortest time between two drawings of a growing answer
const TITLE_CHARS = 48;

export class ChatSession {
  /** @type {Chat[]} */
  chats = [];
  /** @type {Chat} */
  chat = newChat("");
  status = ""; // of the running answer: "reading 60 %"
  problem = ""; // why chats are not kept
  /** @type {AbortController | null} */
  running = null;
  #listeners = /** @type {Set<() => void>} */ (new Set());
  #drawnMs = 0;

  /** @param {() => void} listener @returns {() => void} */
  listen(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  async load() {
    await this.#keep(async () => {
      this.chats = await allChats();
    });
  }

  start() {
    this.stop();
    this.chat = newChat(this.chat.model);
    this.#notify();
  }

  /** @param {string} id */
  open(id) {
    const found = this.chats.find((chat) => chat.id === id);
    if (found === undefined) return;
    this.stop();
    this.chat = found;
    this.#notify();
  }

  /** @param {string} id */
  async remove(id) {
    if (id === this.chat.id) this.start();
    await this.#keep(() => removeChat(id));
    await this.load();
  }

  /** @param {string} text of an exported file @returns {Promise<number>} how many chats it holds */
  async importText(text) {
    const found = imported(text);
    await this.#keep(async () => {
      for (const chat of found) await saveChat(chat);
    });
    await this.load();
    return found.length;
  }

  /** @param {Partial<Pick<Chat, "model" | "settings">>} change */
  change(change) {
    this.chat = { ...this.chat, ...change };
    this.#notify();
  }

  /** Send a text after the first `kept` messages. @param {string} text @param {number} kept */
  async send(text, kept = this.chat.messages.length) {
    const messages = [...this.chat.messages.slice(0, kept), { role: /** @type {const} */ ("user"), content: text }];
    const first = messages[0]?.content ?? text;
    const title = first.length > TITLE_CHARS ? `${first.slice(0, TITLE_CHARS - 1)}…` : first;
    this.chat = { ...this.chat, messages, title };
    await this.#answer();
  }

  /** Answer the last question again. */
  async regenerate() {
    const last = this.chat.messages.findLastIndex((message) => message.role === "user");
    this.chat = { ...this.chat, messages: this.chat.messages.slice(0, last + 1) };
    await this.#answer();
  }

  stop() {
    this.running?.abort();
    this.running = null;
    this.status = "";
  }

  async #answer() {
    this.stop();
    const { chat } = this;
    const running = (this.running = new AbortController());
    this.status = "waiting for the first word";
    this.#notify();
    await this.#save(chat);
    await ask(requestBody(chat.model, chat.messages, chat.settings), running.signal, (reader) => {
      if (this.chat.id !== chat.id || (this.running !== running && this.running !== null)) return;
      this.status = reader.status;
      this.chat = { ...this.chat, messages: [...chat.messages, { ...reader.message }] };
      if (performance.now() - this.#drawnMs >= DRAW_MS) this.#notify();
    });
    if (this.running === running) {
      this.running = null;
      this.status = "";
    }
    this.#notify();
    if (this.chat.id === chat.id) await this.#save(this.chat);
  }

  /** @param {Chat} chat */
  async #save(chat) {
    await this.#keep(() => saveChat({ ...chat, changed_ms: Date.now() }));
    await this.load();
  }

  /** Run work on the disk. Without a disk, as in some private windows, chats last as long as the tab. */
  /** @param {() => Promise<unknown>} work */
  async #keep(work) {
    try {
      await work();
      this.problem = "";
    } catch {
      this.problem = "This browser does not keep chats: they last as long as this tab.";
    }
    this.#notify();
  }

  #notify() {
    this.#drawnMs = performance.now();
    for (const listener of this.#listeners) listener();
  }
}
