// Tasks of the node: pulls, loads, copies, removals. They go on when this page is closed.
import { html } from "../html.js";
import { useState } from "../vendor/hooks.js";
import { act } from "../data/acting.js";
import { bytes, clock, percent } from "../data/units.js";
import { Problem } from "../parts.js";

/** @typedef {import("../data/types.js").Task} Task */

/** @type {Record<string, string>} */
const VERBS = { pull: "Pull", remove: "Remove", replicate: "Copy", serve: "Load", drain: "Drain this machine" };
/** @type {Record<string, string>} */
const STATES = { waiting: "waits for other tasks", done: "done", failed: "failed", cancelled: "cancelled" };
const KEPT = 6; // ended tasks that are shown

/** @param {Task[]} tasks */
export function shownTasks(tasks) {
  const known = tasks.filter((task) => task.kind in VERBS);
  const running = known.filter((task) => !ended(task));
  return [...running, ...known.filter(ended).slice(0, KEPT)];
}

/** @param {Task} task */
export function ended(task) {
  return task.state !== "waiting" && task.state !== "running";
}

/** @param {{tasks: Task[], manages: boolean}} props */
export function Tasks({ tasks, manages }) {
  const shown = shownTasks(tasks);
  if (shown.length === 0) return null;
  return html`<section class="panel" aria-labelledby="tasks">
    <h2 id="tasks">Tasks of this node</h2>
    <p class="quiet">They go on when this page is closed. <code>edgepipe ps --tasks</code> lists them.</p>
    <ul class="tasks">${shown.map((task) => html`<li key=${task.id}><${TaskRow} task=${task} manages=${manages} /></li>`)}</ul>
  </section>`;
}

/** @param {{task: Task, manages: boolean}} props */
function TaskRow({ task, manages }) {
  const [problem, setProblem] = useState("");
  const cancel = async () => setProblem((await act("/ui/tasks/cancel", { id: task.id })).problem);
  const again = async () => setProblem((await act("/ui/tasks", { kind: task.kind, model: task.model })).problem);
  const resumes = task.kind === "pull" && (task.state === "cancelled" || task.state === "failed");
  return html`
    <div class="row">
      <strong>${VERBS[task.kind]} ${task.model}</strong>
      <span class="state ${task.state}">${STATES[task.state] ?? "runs"}</span>
      <span class="quiet">${clock(task.ended_s || task.begun_s, Date.now() / 1000)}</span>
      ${manages && !ended(task) ? html`<button type="button" class="quiet" onClick=${cancel} aria-label="Cancel ${VERBS[task.kind]} ${task.model}">Cancel</button>` : null}
      ${manages && resumes ? html`<button type="button" class="quiet" onClick=${again} aria-label="Resume the pull of ${task.model}">Resume</button>` : null}
    </div>
    ${ended(task) ? null : html`<${Progress} task=${task} />`}
    ${task.error.length > 0 ? html`<pre class="lines">${task.error.join("\n")}</pre>` : null}
    <${Problem} text=${problem} />
  `;
}

/** @param {{task: Task}} props */
function Progress({ task }) {
  const share = task.bytes_total ? task.bytes_done / task.bytes_total : 0;
  const size = task.kind === "serve" ? percent(share) : `${bytes(task.bytes_done)} of ${bytes(task.bytes_total)}`;
  return html`
    ${task.bytes_total > 0 ? html`<progress max=${task.bytes_total} value=${task.bytes_done} aria-label=${task.phase}></progress>` : null}
    <p class="quiet">${task.phase || "starts"}${task.bytes_total > 0 ? `: ${size}` : ""}</p>
  `;
}
