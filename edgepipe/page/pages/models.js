// Models: what is served and on which disks, what would fit, and what becomes of it.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { NEEDS_SESSION, act } from "../data/acting.js";
import { useResult } from "../data/results.js";
import { bytes, rate } from "../data/units.js";
import { Confirm, Problem } from "../parts.js";
import { Preview } from "./preview.js";
import { Tasks, ended } from "./tasks.js";

/**
 * @typedef {import("../data/state.js").State} State
 * @typedef {import("../data/types.js").Disk} Disk
 * @typedef {import("../data/types.js").Model} Model
 * @typedef {import("../data/types.js").Choices} Choices
 * @typedef {{model: string, size_bytes: number, fits: string, tokens_per_s: number}} Fit
 * @typedef {{model: string, pull: string, fits: string | null, size_bytes: number, problem: string}} Listed
 */

/** @param {{state: State, manages: boolean}} props */
export function Models({ state, manages }) {
  const machines = state.view?.machines ?? [];
  const finished = state.tasks.filter((task) => ended(task) && (task.kind === "pull" || task.kind === "remove")).length;
  const listed = /** @type {Listed[] | null} */ (useResult("list", "", state.tasks, manages, finished).result);
  const fits = /** @type {Fit[] | null} */ (useResult("fits", "", state.tasks, manages, machines.length).result);
  return html`
    <h1>Models</h1>
    ${manages ? null : html`<p class="news info">To pull, load or remove models, type <code>edgepipe open</code> on this node's machine.</p>`}
    ${manages ? html`<${PullForm} fits=${fits ?? []} />` : null}
    <${Tasks} tasks=${state.tasks} manages=${manages} />
    <${Interrupted} listed=${listed ?? []} />
    <section aria-labelledby="disks">
      <h2 id="disks">On the cluster's disks</h2>
      ${state.disks.length === 0 ? html`<p class="quiet">No model yet. On a machine: <code>edgepipe models pull qwen3:8b</code></p>` : null}
      <ul class="cards">
        ${state.disks.map((disk) => html`<li class="panel" key=${disk.name + disk.content}><${DiskCard} disk=${disk} state=${state} manages=${manages} fits=${listed?.find((row) => row.model === disk.name)?.fits ?? null} /></li>`)}
      </ul>
    </section>
    ${fits ? html`<${Fits} fits=${fits} disks=${state.disks} />` : null}
  `;
}

/** @param {{fits: Fit[]}} props */
function PullForm({ fits }) {
  const [problem, setProblem] = useState("");
  const send = async (/** @type {any} */ event) => {
    event.preventDefault();
    const field = event.target.elements.name;
    const { problem: found } = await act("/ui/tasks", { kind: "pull", model: field.value.trim() });
    setProblem(found);
    if (!found) field.value = "";
  };
  return html`<form class="panel" onSubmit=${send}>
    <label for="name">Fetch a model: a known name, or ORG/NAME of the Hugging Face Hub</label>
    <div class="row">
      <input id="name" name="name" list="known" required autocomplete="off" placeholder="qwen3:8b" />
      <datalist id="known">${fits.map((fit) => html`<option value=${fit.model} />`)}</datalist>
      <button type="submit">Pull</button>
    </div>
    <${Problem} text=${problem} />
  </form>`;
}

/** @param {{listed: Listed[]}} props */
function Interrupted({ listed }) {
  const [problem, setProblem] = useState("");
  const begun = listed.filter((row) => row.pull === "interrupted");
  if (begun.length === 0) return null;
  const start = async (/** @type {string} */ kind, /** @type {string} */ model) => setProblem((await act("/ui/tasks", { kind, model })).problem);
  return html`<section class="panel" aria-labelledby="begun">
    <h2 id="begun">Interrupted pulls</h2>
    <${Problem} text=${problem} />
    <ul class="tasks">
      ${begun.map(
        (row) => html`<li class="row">
          <strong>${row.model}</strong> <span class="quiet">${bytes(row.size_bytes)} are kept</span>
          <button type="button" class="quiet" onClick=${() => void start("pull", row.model)}>Resume</button>
          <button type="button" class="quiet" onClick=${() => void start("remove", row.model)}>Delete</button>
        </li>`,
      )}
    </ul>
  </section>`;
}

/** @param {{disk: Disk, state: State, manages: boolean, fits: string | null}} props */
function DiskCard({ disk, state, manages, fits }) {
  const [problem, setProblem] = useState("");
  const [previewed, preview] = useState(false);
  const served = state.view?.models.find((model) => model.name === disk.name);
  const machines = state.view?.machines.length ?? 0;
  const here = disk.holders.some((holder) => holder.self);
  const busy = state.tasks.some((task) => !ended(task) && task.model === disk.name);
  const start = async (/** @type {string} */ kind, /** @type {Choices | undefined} */ choices = undefined) => setProblem((await act("/ui/tasks", { kind, model: disk.name, ...choices })).problem);
  const stop = async () => setProblem((await act("/ui/stop", { model: disk.name })).problem);
  useEffect(() => {
    if (served) preview(false);
  }, [served !== undefined]);
  return html`
    <h3>${disk.name}</h3>
    <p class="quiet">
      ${bytes(disk.size_bytes)} · ${disk.copies === 1 ? "1 copy" : `${disk.copies} copies`}${fits && !served ? ` · fits: ${fits}` : ""}
      ${served ? html` <span class="state ${served.state}">${served.state}</span>` : null}
    </p>
    <p class="quiet">${disk.holders.map((holder) => `${holder.name}${holder.whole ? "" : " (part)"}`).join(", ")}</p>
    ${disk.copies < 2 && machines > 1 ? html`<p class="quiet">If that machine is lost, the model is lost.</p>` : null}
    <div class="row">
      <a class="button" href="#chat">Chat</a>
      ${manages && served ? html`<button type="button" onClick=${stop}>Stop</button>` : null}
      ${manages && !served ? html`<button type="button" disabled=${busy} onClick=${() => preview(!previewed)} aria-expanded=${previewed}>Serve …</button>` : null}
      ${manages && disk.copies < 2 && machines > 1 ? html`<button type="button" disabled=${busy} onClick=${() => void start("replicate")}>Copy to another disk</button>` : null}
      ${manages && here ? html`<${Confirm} label="Remove" question=${`Delete ${disk.name} from this machine${served ? " and stop it" : ""}?`} onYes=${() => void start("remove")} />` : null}
    </div>
    <${Problem} text=${problem} />
    ${previewed && !served ? html`<${Preview} model=${disk.name} tasks=${state.tasks} onServe=${(/** @type {Choices} */ choices) => void start("serve", choices)} busy=${busy} />` : null}
  `;
}

/** @param {{fits: Fit[], disks: Disk[]}} props */
function Fits({ fits, disks }) {
  const [problem, setProblem] = useState("");
  const pull = async (/** @type {string} */ model) => setProblem((await act("/ui/tasks", { kind: "pull", model })).problem);
  const here = new Set(disks.map((disk) => disk.name));
  return html`<section class="panel" aria-labelledby="fits">
    <h2 id="fits">Well-known models on this cluster</h2>
    <p class="quiet">The speed of one chat is predicted from data sheets and free memory.</p>
    <${Problem} text=${problem === NEEDS_SESSION ? "" : problem} />
    <div class="scroll" tabindex="0" role="region" aria-label="Well-known models">
      <table>
        <thead><tr>${["Model", "Size", "Fits on", "One chat", ""].map((each) => html`<th scope="col">${each}</th>`)}</tr></thead>
        <tbody>
          ${fits.map(
            (fit) => html`<tr>
              <td>${fit.model}</td>
              <td>${bytes(fit.size_bytes)}</td>
              <td>${fit.fits || "no"}</td>
              <td>${fit.fits ? `${rate(fit.tokens_per_s)} tokens/s` : "–"}</td>
              <td>${fit.fits && !here.has(fit.model) ? html`<button type="button" class="quiet" aria-label="Pull ${fit.model}" onClick=${() => void pull(fit.model)}>Pull</button>` : null}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  </section>`;
}
