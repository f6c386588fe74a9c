// The event stream of the page: it reconnects by itself and closes while the page is hidden.
import { EventReader } from "./events.js";
import { authorization } from "./access.js";

const SILENT_MS = 5000; // samples come each second: a longer silence means that the connection is lost
const FIRST_WAIT_MS = 500;
const LAST_WAIT_MS = 5000;

/**
 * @typedef {"connecting" | "live" | "lost" | "key" | "full"} StreamState
 * "key": the server wants a key. "full": too many pages are open.
 */

export class PageStream {
  #onEvent;
  #onState;
  #abort = new AbortController();
  #running = false;
  #waitMs = FIRST_WAIT_MS;
  #timer = 0;
  #path = "/ui/events";

  /**
   * @param {(name: string, data: any) => void} onEvent
   * @param {(state: StreamState) => void} onState
   */
  constructor(onEvent, onState) {
    this.#onEvent = onEvent;
    this.#onState = onState;
  }

  /** Follow the page's visibility: browsers allow six connections to a host. */
  start() {
    document.addEventListener("visibilitychange", () => this.#follow());
    this.#follow();
  }

  /** Ask for other events from now on. @param {string} path */
  ask(path) {
    if (path === this.#path) return;
    this.#path = path;
    this.restart();
  }

  /** Connect again at once, as with a new key. */
  restart() {
    this.#stop();
    this.#follow();
  }

  #follow() {
    if (document.hidden) this.#stop();
    else if (!this.#running) void this.#run();
  }

  #stop() {
    this.#running = false;
    this.#abort.abort();
    clearTimeout(this.#timer);
  }

  async #run() {
    this.#running = true;
    this.#waitMs = FIRST_WAIT_MS;
    const abort = (this.#abort = new AbortController());
    while (!abort.signal.aborted) {
      const state = await this.#once(abort.signal);
      if (abort.signal.aborted) return;
      this.#onState(state);
      if (state === "key") {
        this.#running = false;
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, this.#waitMs));
      this.#waitMs = Math.min(LAST_WAIT_MS, 2 * this.#waitMs);
    }
  }

  /**
   * Read one connection to its end.
   *
   * @param {AbortSignal} stopped
   * @returns {Promise<StreamState>}
   */
  async #once(stopped) {
    const silence = new AbortController();
    const signal = AbortSignal.any([stopped, silence.signal]);
    const heard = () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => silence.abort(), SILENT_MS);
    };
    try {
      heard();
      const answer = await fetch(this.#path, { headers: authorization(), signal, cache: "no-store" });
      if (answer.status === 401) return "key";
      if (answer.status === 503) return "full";
      if (!answer.ok || answer.body === null) return "lost";
      const reader = new EventReader();
      const pieces = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await pieces.read();
        if (done) return "lost";
        heard();
        for (const part of reader.push(value)) if ("name" in part) this.#take(part.name, part.data);
      }
    } catch {
      return "lost";
    } finally {
      clearTimeout(this.#timer);
    }
  }

  /** @param {string} name @param {string} data */
  #take(name, data) {
    this.#waitMs = FIRST_WAIT_MS;
    this.#onState("live");
    this.#onEvent(name, JSON.parse(data));
  }
}
