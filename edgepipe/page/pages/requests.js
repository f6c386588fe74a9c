// Requests: what each stage does now, and where the time of each request went.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { act } from "../data/acting.js";
import { firstTokenS, phases, quantile } from "../data/requests.js";
import { newestEnd, stageFigures, traceJson } from "../data/steps.js";
import { clock, milliseconds, percent, whole } from "../data/units.js";
import { Problem, Twin, download, useWidth } from "../parts.js";
import { Gantt } from "../pictures/gantt.js";
import { PHASES, PhaseBar, PhaseLegend } from "../pictures/phases.js";

/**
 * @typedef {import("../data/state.js").State} State
 * @typedef {import("../data/types.js").Model} Model
 * @typedef {import("../data/types.js").RequestRow} RequestRow
 * @typedef {import("../data/types.js").Trace} Trace
 */

const WINDOWS_MS = [100, 500, 2000, 10_000];
const MOST_ROWS = 200;
/** @type {Record<string, string>} */
const ENDS = { stop: "done", tool_calls: "done", length: "limit", client_left: "client left" };

/** @param {{state: State, manages: boolean, ask: (path: string) => void}} props */
export function Requests({ state, manages, ask }) {
  const models = state.view?.models ?? [];
  const [chosen, choose] = useState("");
  const model = models.find((each) => each.name === chosen) ?? models[0];
  const name = model?.name ?? "";
  useEffect(() => {
    ask(`/ui/events?${new URLSearchParams({ requests: name })}`);
  }, [name]);
  useEffect(() => () => ask("/ui/events"), []);
  return html`
    <h1>Requests</h1>
    ${models.length > 1
      ? html`<div class="choice" role="group" aria-label="Model">
          ${models.map((each) => html`<button type="button" aria-pressed=${each === model} onClick=${() => choose(each.name)}>${each.name}</button>`)}
        </div>`
      : null}
    ${model ? html`<${Stages} model=${model} trace=${state.trace} />` : null}
    <${Table} rows=${state.requests} models=${models} manages=${manages} />
  `;
}

/** @param {{model: Model, trace: Trace}} props */
function Stages({ model, trace }) {
  const [ref, width] = useWidth();
  const [windowMs, setWindow] = useState(500);
  const [held, hold] = useState(/** @type {Trace | null} */ (null));
  const shown = held ?? trace;
  const steps = shown.model === model.name ? shown.steps : [];
  const end = newestEnd(steps);
  const begin = end - windowMs * 1000;
  const near = steps.filter((step) => step.spans.some((span) => span.begin + span.length > begin));
  const stages = model.stages.map((stage) => stage.name);
  const figures = stageFigures(near, begin, end);
  return html`<section class="panel" aria-labelledby="stages">
    <div class="head">
      <h2 id="stages">What the stages do</h2>
      <div class="row">
        <label for="window" class="quiet">Window</label>
        <select id="window" value=${windowMs} onChange=${(/** @type {any} */ event) => setWindow(Number(event.target.value))}>
          ${WINDOWS_MS.map((each) => html`<option value=${each}>${milliseconds(each)}</option>`)}
        </select>
        <button type="button" aria-pressed=${held !== null} onClick=${() => hold(held ? null : trace)}>Pause</button>
        <button type="button" disabled=${steps.length === 0} onClick=${() => download("edgepipe-trace.json", traceJson(shown, stages))}>Export trace</button>
      </div>
    </div>
    <div ref=${ref}></div>
    ${steps.length === 0
      ? html`<p class="quiet">No step yet. Steps appear here while ${model.name} answers.</p>`
      : html`${width > 0 ? html`<${Gantt} steps=${near} stages=${stages} begin=${begin} end=${end} width=${width} />` : null}
          <p class="quiet">
            A bar is a step; its colour is its micro-batch, hatched: with prompt tokens. Grey: the stage waits.
            ${" "}${stages.map((stage, index) => `${stage} busy ${percent(figures[index]?.busy ?? 0)}`).join(", ")}.
          </p>
          <${Twin} title="Stages" columns=${["Stage", "Machine", "Busy", "Median step", "Longest wait"]} rows=${stages.map((stage, index) => [index, stage, percent(figures[index]?.busy ?? 0), milliseconds(figures[index]?.step_ms ?? 0), milliseconds(figures[index]?.wait_ms ?? 0)])} />`}
  </section>`;
}

/** @param {{rows: RequestRow[], models: Model[], manages: boolean}} props */
function Table({ rows, models, manages }) {
  const [problem, setProblem] = useState("");
  const now_s = Date.now() / 1000;
  const running = rows.filter((row) => row.whole_s === null);
  const queued = running.filter((row) => row.state === "queue").length;
  const elsewhere = models.reduce((sum, model) => sum + model.running + model.waiting, 0) - (running.length - queued);
  const first = rows.map(firstTokenS);
  const gaps = rows.map((row) => row.itl_s);
  const figures = [
    [whole(running.length - queued), "run here"],
    [whole(queued), "wait in this node's queue"],
    [whole(Math.max(0, elsewhere)), "of other machines"],
    [seconds(quantile(first, 0.5)), `first token, median (p95 ${seconds(quantile(first, 0.95))})`],
    [seconds(quantile(gaps, 0.5)), `between tokens, median (p95 ${seconds(quantile(gaps, 0.95))})`],
  ];
  const several = models.length > 1;
  const recovered = rows.some((row) => row.recovery_s > 0 || row.recovering);
  const columns = ["Began", "State", "Where its time went", "Queue", "Prompt", "Answer", ...(recovered ? ["Recovery"] : []), "Tokens", "First token", "Between", ...(several ? ["Model"] : []), ""];
  const most_s = rows.reduce((most, row) => Math.max(most, row.whole_s ?? now_s - row.at_s), 0);
  return html`<section class="panel" aria-labelledby="newest">
    <h2 id="newest">The newest ${MOST_ROWS} requests of this node</h2>
    <dl class="figures">${figures.map(([value, words]) => html`<div><dt>${words}</dt><dd>${value}</dd></div>`)}</dl>
    <${Problem} text=${problem} />
    ${rows.length === 0 ? html`<p class="quiet">No request yet. The texts of requests are never kept.</p>` : html`<${PhaseLegend} />`}
    ${rows.length > 0
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Requests">
          <table class="requests">
            <thead>
              <tr>${columns.map((each) => html`<th scope="col">${each}</th>`)}</tr>
            </thead>
            <tbody>
              ${rows.map((row) => html`<${Row} key=${row.id} row=${row} now_s=${now_s} most_s=${most_s} several=${several} recovered=${recovered} manages=${manages} onProblem=${setProblem} />`)}
            </tbody>
          </table>
        </div>`
      : null}
  </section>`;
}

/** @param {{row: RequestRow, now_s: number, most_s: number, several: boolean, recovered: boolean, manages: boolean, onProblem: (text: string) => void}} props */
function Row({ row, now_s, most_s, several, recovered, manages, onProblem }) {
  const parts = phases(row, now_s);
  const words = parts.map(({ phase, seconds: long }) => `${PHASES[phase]} ${seconds(long)}`).join(", ");
  const cancel = async () => onProblem((await act("/ui/requests/cancel", { id: row.id })).problem);
  return html`<tr class=${row.state}>
    <td>${clock(row.at_s, now_s)}</td>
    <td>${row.recovering ? "recovering" : row.whole_s !== null ? (ENDS[row.end] ?? row.end) : (PHASES[row.state] ?? row.state)}</td>
    <td><${PhaseBar} parts=${parts} most_s=${most_s} words=${words} /></td>
    ${[row.queue_s, row.prefill_s, row.decode_s].map((each) => html`<td>${seconds(each)}</td>`)}
    ${recovered ? html`<td>${row.recovery_s ? seconds(row.recovery_s) : "–"}</td>` : null}
    <td>${whole(row.prompt_tokens)} + ${whole(row.output_tokens)}</td>
    <td>${seconds(firstTokenS(row))}</td>
    <td>${seconds(row.itl_s)}</td>
    ${several ? html`<td>${row.model}</td>` : null}
    <td>${manages && row.whole_s === null ? html`<button type="button" class="quiet" onClick=${cancel}>Cancel</button>` : null}</td>
  </tr>`;
}

/** @param {number | null} value */
function seconds(value) {
  return value === null ? "–" : value === 0 ? "0" : milliseconds(value * 1000);
}
