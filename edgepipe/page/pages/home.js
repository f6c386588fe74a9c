// Home: the ring of a model, its speed, and the machines.
import { html } from "../html.js";
import { useState } from "../vendor/hooks.js";
import { Twin, useWidth } from "../parts.js";
import { byMinute } from "../data/history.js";
import { clusterNews, modelNews } from "../data/news.js";
import { bytes, duration, milliseconds, percent, rate, whole } from "../data/units.js";
import { Legend, USES, WORDS } from "../pictures/memory.js";
import { Ring } from "../pictures/ring.js";
import { Speed } from "../pictures/speed.js";
import { MachineCards } from "./machine_cards.js";

/**
 * @typedef {import("../data/types.js").View} View
 * @typedef {import("../data/state.js").State} State
 * @typedef {import("../data/types.js").Model} Model
 * @typedef {import("../data/types.js").Sample} Sample
 */

/** @param {{state: State}} props */
export function Home({ state: { view, history } }) {
  const [chosen, choose] = useState("");
  if (view === null) return null;
  const model = view.models.find((each) => each.title === chosen) ?? view.models[0];
  const now_s = Date.now() / 1000;
  const news = [...(model ? modelNews(model, now_s) : []), ...clusterNews(view, now_s)];
  const inRing = new Set(model?.stages.map((stage) => stage.machine) ?? []);
  const others = view.machines.filter((machine) => !inRing.has(machine.id));
  return html`
    ${view.models.length > 1 ? html`<${Choice} models=${view.models} chosen=${model} choose=${choose} />` : null}
    ${news.map((each) => html`<p class="news ${each.level}" role="status">${each.text}</p>`)}
    ${model ? html`<${ModelPart} model=${model} view=${view} samples=${history[model.title] ?? []} />` : html`<${NoModel} view=${view} />`}
    ${others.length > 0
      ? html`<section aria-labelledby="others">
          <h2 id="others">${model ? "Machines outside this ring" : "Machines"}</h2>
          <${MachineCards} machines=${others} />
        </section>`
      : null}
    <${Twin} title="Memory" columns=${["Machine", ...USES.map((use) => WORDS[use])]} rows=${view.machines.map((machine) => [machine.name, ...USES.map((use) => bytes(machine.memory[use]))])} />
  `;
}

/** @param {{models: Model[], chosen: Model, choose: (title: string) => void}} props */
function Choice({ models, chosen, choose }) {
  return html`<div class="choice" role="group" aria-label="Model">
    ${models.map(
      (model) => html`<button type="button" aria-pressed=${model === chosen} onClick=${() => choose(model.title)}>
        ${model.title}
      </button>`,
    )}
  </div>`;
}

/** @param {{view: View}} props */
function NoModel({ view }) {
  return html`<section class="panel">
    <h1>No model is served</h1>
    ${view.loadable.length > 0
      ? html`<p>
          On the cluster's disks: ${view.loadable.slice(0, 8).join(", ")}. To load one, choose it in
          <a href="#chat"> Chat</a>, or type <code>edgepipe serve ${view.loadable[0]}</code>.
        </p>`
      : html`<p>Fetch a model first: <code>edgepipe models pull qwen3:8b</code>, then <code>edgepipe serve qwen3:8b</code>.</p>`}
  </section>`;
}

/** @param {{model: Model, view: View, samples: Sample[]}} props */
function ModelPart({ model, view, samples }) {
  const [ref, width] = useWidth();
  return html`<section aria-labelledby="model">
    <div class="head">
      <h1 id="model">${model.title} <span class="state ${model.state}">${model.state}</span></h1>
      <${Figures} model=${model} />
    </div>
    <div class="measure" ref=${ref}></div>
    <div class="panel">
      ${width > 0 && model.stages.length > 0
        ? html`<${Ring} model=${model} machines=${view.machines} width=${width} />`
        : html`<p class="quiet">The ring is not built yet.</p>`}
      <${Legend} />
      <${Twin} title="Ring" columns=${["Stage", "Machine", "Layers", "Weights", "KV", "Step", "Busy", "One way", "Upload"]} rows=${ringRows(model)} />
    </div>
    <div class="panel">
      <h2>Tokens per second</h2>
      ${width > 0 ? html`<${Speed} samples=${samples} width=${width} />` : null}
      <p class="quiet">Last 15 minutes. Dashed: the predicted rate of the present load.</p>
      <${Twin} title="Speed" columns=${["Minutes ago", "Tokens/s", "Predicted", "Running"]} rows=${byMinute(samples).map((row) => [row.minutes, rate(row.tokens_per_s), rate(row.predicted), row.running.toFixed(1)])} />
    </div>
    <${Why} model=${model} />
  </section>`;
}

/** @param {Model} model */
function ringRows(model) {
  return model.stages.map((stage, index) => [
    index,
    stage.name,
    stage.layers,
    bytes(stage.weight_bytes),
    bytes(stage.kv_bytes),
    milliseconds(stage.step_ms),
    percent(stage.busy),
    index < model.stages.length - 1 ? milliseconds(stage.one_way_ms) : "–",
    index < model.stages.length - 1 ? milliseconds(stage.upload_ms) : "–",
  ]);
}

/** @param {{model: Model}} props */
function Figures({ model }) {
  const figures = [
    [rate(model.tokens_per_s), "tokens/s"],
    [whole(model.running), model.waiting ? `running, ${whole(model.waiting)} waiting` : "running"],
    [whole(model.context), "tokens of context"],
    [model.kv_tokens ? percent(model.kv_used_tokens / model.kv_tokens) : "–", "of the KV cache used"],
  ];
  return html`<dl class="figures">
    ${figures.map(([value, words]) => html`<div><dt>${words}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** @param {{model: Model}} props */
function Why({ model }) {
  if (model.state !== "ready" || !model.why) return null;
  return html`<div class="panel">
    <h2>${model.micro_batches} micro-batch${model.micro_batches === 1 ? "" : "es"} in flight</h2>
    <ul class="why">
      ${model.why.split("; ").map((reason) => html`<li>${reason}</li>`)}
      ${model.bottleneck
        ? html`<li>slowest: ${model.bottleneck}; ${rate(model.predicted_tokens_per_s)} tokens/s expected of this load</li>`
        : null}
      ${model.latency_ms ? html`<li>a turn of the ring waits ${milliseconds(model.latency_ms)} for links and sampling</li>` : null}
      ${model.recoveries
        ? html`<li>recovered ${model.recoveries} time${model.recoveries === 1 ? "" : "s"}; answers paused for ${duration(model.stall_ms / 1000)} in total</li>`
        : null}
      ${model.advice ? html`<li>a faster layout exists: ${model.advice}</li>` : null}
    </ul>
  </div>`;
}
