// Where the layers of a model would go, and the predicted speed, before anything is loaded.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { useResult } from "../data/results.js";
import { bytes, layers, milliseconds, rate, whole } from "../data/units.js";

/**
 * @typedef {import("../data/types.js").Task} Task
 * @typedef {import("../data/types.js").Choices} Choices
 */

/** @type {Choices} */
const DEFAULTS = { kv: "auto", context: 0, concurrency: 0, draft: "auto" };
const MOST_CONTEXT = 1 << 24; // as the gateway's
const MOST_CHATS = 1 << 12;
const SETTLED_MS = 400;
/** @type {Record<string, string>} */
const KV_FORMS = { auto: "the model's type", "8bit": "8 bits: half the memory", "4bit": "4 bits: a quarter" };
/** @type {Record<string, string>} */
const DRAFTS = { auto: "automatic", lookup: "from prompt and answer", mtp: "from the model's own layer", off: "none" };

/** @param {{model: string, tasks: Task[], busy: boolean, onServe: (choices: Choices) => void}} props */
export function Preview({ model, tasks, busy, onServe }) {
  const [choices, setChoices] = useState(DEFAULTS);
  const settled = useSettled(choices);
  const planned = { ...settled, draft: settled.draft === "mtp" ? "mtp" : "" }; // other drafts take no memory
  return html`<div class="preview" role="region" aria-label="Plan of ${model}">
    <${ChoicesForm} choices=${choices} onChange=${(/** @type {Partial<Choices>} */ change) => setChoices((now) => ({ ...now, ...change }))} />
    <${Forecast} key=${JSON.stringify(planned)} model=${model} choices=${planned} tasks=${tasks} busy=${busy || settled !== choices} onServe=${() => onServe(choices)} />
  </div>`;
}

/** The choices once they have not changed for a while: each change makes a new plan. @param {Choices} choices */
function useSettled(choices) {
  const [settled, setSettled] = useState(choices);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(choices), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [choices]);
  return settled;
}

/** @param {{choices: Choices, onChange: (change: Partial<Choices>) => void}} props */
function ChoicesForm({ choices, onChange }) {
  return html`<div class="fields">
    <${Select} label="KV cache" words=${KV_FORMS} value=${choices.kv} onChange=${(/** @type {string} */ kv) => onChange({ kv })} />
    <${Count} label="Context, in tokens" most=${MOST_CONTEXT} empty="the model's" value=${choices.context} onChange=${(/** @type {number} */ context) => onChange({ context })} />
    <${Count} label="Chats at the same time" most=${MOST_CHATS} empty="automatic" value=${choices.concurrency} onChange=${(/** @type {number} */ concurrency) => onChange({ concurrency })} />
    <${Select} label="Drafts of tokens" words=${DRAFTS} value=${choices.draft} onChange=${(/** @type {string} */ draft) => onChange({ draft })} />
  </div>`;
}

/** @param {{label: string, words: Record<string, string>, value: string, onChange: (value: string) => void}} props */
function Select({ label, words, value, onChange }) {
  return html`<label>${label}
    <select value=${value} onChange=${(/** @type {any} */ event) => onChange(event.target.value)}>
      ${Object.entries(words).map(([name, text]) => html`<option value=${name}>${text}</option>`)}
    </select>
  </label>`;
}

/** @param {{label: string, most: number, empty: string, value: number, onChange: (value: number) => void}} props */
function Count({ label, most, empty, value, onChange }) {
  const send = (/** @type {any} */ event) => event.target.checkValidity() && onChange(Math.trunc(Number(event.target.value)));
  return html`<label>${label}
    <input type="number" min="1" max=${most} step="1" placeholder=${empty} value=${value || ""} onInput=${send} />
  </label>`;
}

/** @param {{model: string, choices: Choices, tasks: Task[], busy: boolean, onServe: () => void}} props */
function Forecast({ model, choices, tasks, busy, onServe }) {
  const { result, task } = useResult("plan", model, tasks, true, "", choices);
  return html`<div>
    ${result?.stages
      ? html`<${Plan} plan=${result} /><button type="button" class="primary" disabled=${busy} onClick=${onServe}>Serve ${model}</button>`
      : result?.missing_bytes
        ? html`<${Shortfall} short=${result} />`
        : task?.state === "failed"
          ? html`<pre class="lines">${task.error.join("\n")}</pre>`
          : html`<p class="quiet" role="status">Measuring devices and links …</p>`}
  </div>`;
}

/** @param {{plan: any}} props */
function Plan({ plan }) {
  return html`
    <p><strong>${rate(plan.one_chat_tokens_per_s)} tokens/s</strong> for one chat${plan.many_chats > 1 ? `, ${rate(plan.many_chats_tokens_per_s)} for ${whole(plan.many_chats)}` : ""}; first token of ${whole(plan.first_token_prompt_tokens)} after ${milliseconds(plan.first_token_s * 1000)}</p>
    <ul class="why">
      ${plan.stages.map((/** @type {any} */ stage) => html`<li>${stage.node}: ${layers(stage.layers)}, ${bytes(stage.weight_bytes)} of weights</li>`)}
      ${plan.left_out.map((/** @type {any} */ each) => html`<li>${each.node} is left out: ${each.reason}</li>`)}
      <li>room for ${whole(plan.kv_tokens)} tokens of context in all; slowest: ${plan.bottleneck}; ${plan.source}</li>
    </ul>
    ${plan.note ? html`<p class="quiet">${plan.note}</p>` : null}
  `;
}

/** @param {{short: any}} props */
function Shortfall({ short }) {
  return html`
    <p class="news warn">It does not fit: it needs ${bytes(short.needed_bytes)}, ${bytes(short.free_bytes)} are free.</p>
    <ul class="why">
      ${short.helps.map((/** @type {any} */ help) => html`<li>${help.what}: ${bytes(help.gain_bytes)} more${help.enough ? ", enough" : ""}</li>`)}
    </ul>
  `;
}
