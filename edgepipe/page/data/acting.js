// Actions and questions to the node. A refusal is a problem with words for people.
import { authorization, endSession } from "./access.js";
import { EventReader } from "./events.js";

export const NEEDS_SESSION = "This needs the right to manage. On the node's machine, type: edgepipe open";

/** @typedef {{data: any, problem: string}} Outcome */

/**
 * Send an action.
 *
 * @param {string} path
 * @param {Record<string, unknown>} [body]
 * @returns {Promise<Outcome>}
 */
export async function act(path, body = {}) {
  const headers = { ...authorization(), "Content-Type": "application/json" };
  return await outcome(() => fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** @param {string} path @returns {Promise<Outcome>} */
export async function get(path) {
  return await outcome(() => fetch(path, { headers: authorization(), cache: "no-store" }));
}

/** @param {() => Promise<Response>} send @returns {Promise<Outcome>} */
async function outcome(send) {
  try {
    const answer = await send();
    if (answer.ok) return { data: await answer.json(), problem: "" };
    return { data: null, problem: await problemOf(answer) };
  } catch {
    return { data: null, problem: "the node does not answer" };
  }
}

/** @param {Response} answer */
async function problemOf(answer) {
  const found = await answer.json().catch(() => null);
  if (found?.error?.code === "session_needed") {
    endSession();
    window.dispatchEvent(new Event("session"));
  }
  return found?.error?.message ?? `the node answered with status ${answer.status}`;
}

/**
 * Read a stream of events until it ends or `signal` aborts it. Return the problem that ended it.
 *
 * @param {string} path
 * @param {RequestInit} options
 * @param {AbortSignal} signal
 * @param {(name: string, data: any) => void} onEvent
 */
export async function follow(path, options, signal, onEvent) {
  try {
    const answer = await fetch(path, { ...options, headers: { ...authorization(), ...options.headers }, signal });
    if (!answer.ok || answer.body === null) return await problemOf(answer);
    const reader = new EventReader();
    const pieces = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await pieces.read(); !piece.done; piece = await pieces.read()) {
      for (const part of reader.push(piece.value)) {
        if (!("name" in part)) continue;
        const data = JSON.parse(part.data);
        if (part.name === "error") return [data.what, data.fact, data.next_step].filter(Boolean).join(". ");
        onEvent(part.name, data);
      }
    }
    return "";
  } catch {
    return signal.aborted ? "" : "the connection to the node is lost";
  }
}
