// What the events of the stream add up to.
import { withSample } from "./history.js";
import { withRequests } from "./requests.js";
import { withSteps } from "./steps.js";

/**
 * @typedef {import("./types.js").View} View
 * @typedef {import("./types.js").Sample} Sample
 * @typedef {import("./types.js").Task} Task
 * @typedef {import("./types.js").Disk} Disk
 * @typedef {import("./types.js").Links} Links
 * @typedef {import("./types.js").RequestRow} RequestRow
 * @typedef {import("./types.js").Trace} Trace
 *
 * @typedef {{view: View | null, history: Record<string, Sample[]>, tasks: Task[], disks: Disk[], links: Links,
 *   requests: RequestRow[], trace: Trace}} State
 */

/** @type {State} */
export const EMPTY = {
  view: null,
  history: {},
  tasks: [],
  disks: [],
  links: { at_s: 0, links: [] },
  requests: [],
  trace: { model: "", epoch: 0, steps: [] },
};

/**
 * Return the state after an event.
 *
 * @param {State} state
 * @param {string} name
 * @param {any} data
 * @returns {State}
 */
export function after(state, name, data) {
  switch (name) {
    case "view":
    case "tasks":
    case "disks":
    case "links":
      return { ...state, [name]: data };
    case "history":
      return { ...state, history: data.models, requests: [], trace: EMPTY.trace };
    case "sample":
      return { ...state, history: withSample(state.history, data.models) };
    case "requests":
      return { ...state, requests: withRequests(state.requests, data) };
    case "steps":
      return data === null ? state : { ...state, trace: withSteps(state.trace, data) };
    default:
      return state;
  }
}
