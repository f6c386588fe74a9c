// Chats on this browser's disk (IndexedDB): they are readable without the node.
import { NO_SETTINGS } from "./answer.js";

/**
 * @typedef {import("./answer.js").Message} Message
 * @typedef {import("./answer.js").Settings} Settings
 * @typedef {{id: string, title: string, changed_ms: number, model: string, settings: Settings,
 *   messages: Message[]}} Chat
 */

const STORE = "chats";
const MOST_CHATS = 1000; // of one import
const MOST_CHARS = 20_000_000;

/** @returns {Promise<IDBDatabase>} */
function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("edgepipe", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/**
 * @template T
 * @param {"readonly" | "readwrite"} mode
 * @param {(store: IDBObjectStore) => IDBRequest<T>} work
 * @returns {Promise<T>}
 */
async function run(mode, work) {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const request = work(database.transaction(STORE, mode).objectStore(STORE));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  } finally {
    database.close();
  }
}

/** Return all chats, the newest first. @returns {Promise<Chat[]>} */
export async function allChats() {
  /** @type {Chat[]} */
  const found = await run("readonly", (store) => store.getAll());
  return found.sort((one, other) => other.changed_ms - one.changed_ms);
}

/** @param {Chat} chat */
export async function saveChat(chat) {
  await run("readwrite", (store) => store.put(chat));
}

/** @param {string} id */
export async function removeChat(id) {
  await run("readwrite", (store) => store.delete(id));
}

/** @param {string} model @returns {Chat} */
export function newChat(model) {
  return { id: newId(), title: "New chat", changed_ms: Date.now(), model, settings: NO_SETTINGS, messages: [] };
}

/** `crypto.randomUUID` needs https, which a node on the local network does not have. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Chat[]} chats */
export function exported(chats) {
  return JSON.stringify({ edgepipe_chats: 1, chats }, null, 1);
}

/**
 * Read an exported file. Fields that are no text of a chat are left out; each chat gets an id of its own.
 *
 * @param {string} text
 * @returns {Chat[]} empty if the file holds no chats
 */
export function imported(text) {
  if (text.length > MOST_CHARS) return [];
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    return [];
  }
  const chats = Array.isArray(document?.chats) ? document.chats.slice(0, MOST_CHATS) : [];
  return chats.filter((/** @type {any} */ chat) => Array.isArray(chat?.messages)).map(readChat);
}

/** @param {any} chat @returns {Chat} */
function readChat(chat) {
  /** @type {Message[]} */
  const messages = chat.messages
    .filter((/** @type {any} */ each) => each?.role === "user" || each?.role === "assistant")
    .map((/** @type {any} */ each) => ({
      role: each.role,
      content: words(each.content),
      ...(each.reasoning ? { reasoning: words(each.reasoning) } : {}),
    }));
  const settings = { ...NO_SETTINGS };
  for (const name of /** @type {(keyof Settings)[]} */ (Object.keys(settings))) settings[name] = words(chat.settings?.[name]);
  const changed_ms = Number.isFinite(chat.changed_ms) ? chat.changed_ms : 0;
  return { id: newId(), title: words(chat.title), changed_ms, model: words(chat.model), settings, messages };
}

/** @param {unknown} value */
function words(value) {
  return typeof value === "string" ? value : "";
}
